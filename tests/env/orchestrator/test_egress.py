"""Lists for a runtime that cannot hold sandboxes to them."""

from __future__ import annotations

import pytest

from orchard.env.errors import SettingsError
from orchard.env.orchestrator.settings import ServiceSettings
from tests.env.orchestrator.conftest import Start


async def test_a_runtime_without_lists_refuses_them(start: Start) -> None:
    run = await start()
    answer = await run.call("POST", "/sandboxes", {"image": "any", "allow_egress": ["example.org"]})
    assert (answer.status, answer.json["code"]) == (503, "runtime_refused")
    assert answer.json["retryable"] is False
    assert "allow_egress" in answer.json["detail"]
    listing = await run.call("GET", "/sandboxes")
    assert listing.json["sandboxes"] == []


def test_a_resolver_that_is_none_is_told_at_start() -> None:
    with pytest.raises(SettingsError, match="egress_resolver"):
        ServiceSettings(egress_resolver="dns.example")
