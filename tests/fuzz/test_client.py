"""The client before a service that answers whatever it likes: a value of the contract, or a typed error."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from orchard.env.client.aio.streams import _happening, _object, _result, told_error
from orchard.env.client.aio.terminals import _understood
from orchard.env.client.sse import EventParser
from orchard.env.errors import InfrastructureError, OrchardError, from_body
from tests.fuzz.profile import JSON, examples

HOSTILE_BODY = st.dictionaries(
    st.sampled_from(
        [
            "detail",
            "code",
            "retryable",
            "infra",
            "request_id",
            "reason",
            "retry_after_s",
            "self",
            "job",
            "death",
            "status",
        ]
    ),
    JSON,
) | st.dictionaries(st.text(max_size=8), JSON, max_size=3)


@examples(200)
@given(status=st.integers(100, 599), body=HOSTILE_BODY)
@example(status=503, body={"detail": 1, "code": ["x"], "retry_after_s": "soon", "self": 1})
@example(status=400, body={"code": "command_failed", "job": 1, "detail": None})
def test_an_error_body_of_any_service_is_an_error(status: int, body: dict[str, Any]) -> None:
    error = from_body(status, body)
    assert isinstance(error, OrchardError)
    assert error.retry_after_s is None or error.retry_after_s >= 0
    assert isinstance(error.retryable, bool)


@examples(200)
@given(
    name=st.sampled_from(["stdout", "stderr", "gap", "exit", "error", "keepalive", "x"]),
    data=st.binary(max_size=30)
    | st.dictionaries(
        st.sampled_from(["offset", "data", "stream", "from", "to", "job", "code", "detail"]), JSON
    ).map(lambda v: json.dumps(v).encode()),
)
def test_an_event_of_any_service_is_understood_or_an_error(name: str, data: bytes) -> None:
    try:
        fields = _object(data)
        if name == "exit":
            _result(fields)
        elif name == "error":
            assert isinstance(told_error(fields), OrchardError)
        else:
            _happening(name, fields)
    except InfrastructureError as error:
        assert not error.retryable


@examples(200)
@given(
    text=st.binary(max_size=30)
    | st.text(max_size=20)
    | st.just("[" * 100_000)
    | st.dictionaries(st.sampled_from(["pty_id", "pid", "data", "offset", "code"]), JSON).flatmap(
        lambda fields: st.sampled_from(["ready", "stdout", "exit", "error", 1, None]).map(
            lambda kind: json.dumps({"type": kind, **fields})
        )
    )
)
def test_a_frame_of_any_terminal_is_understood_or_an_error(text: str | bytes) -> None:
    try:
        assert isinstance(_understood(text)["type"], str)
    except InfrastructureError as error:
        assert not error.retryable


def test_an_event_that_never_ends_is_given_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchard.env.client.sse._EVENT_BYTES", 1000)
    parser = EventParser()
    with pytest.raises(OrchardError, match="longer than 1000 bytes"):
        for _ in range(2000):
            list(parser.feed(b"data: x"))
