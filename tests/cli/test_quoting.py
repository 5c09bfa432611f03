"""Arguments arrive as they were typed, whatever they hold."""

from __future__ import annotations

import contextlib
import io
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchard.cli.main import main
from tests.support.service import Service

pytestmark = pytest.mark.xdist_group("cli")

# What a program can be given as an argument at all: no NUL, valid Unicode.
words = st.lists(
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12), max_size=6
)


class _Capture(io.TextIOWrapper):
    """Standard output with its bytes kept."""

    def __init__(self) -> None:
        self.kept = io.BytesIO()
        super().__init__(self.kept, encoding="utf-8")

    def text(self) -> str:
        self.flush()
        return self.kept.getvalue().decode()


@given(words)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_exec_is_exact_argv(
    served: Service,
    sandbox_id: str,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
) -> None:
    monkeypatch.setenv("ORCHARD_BASE_URL", served.base_url)
    monkeypatch.setenv("ORCHARD_API_KEY", served.api_key or "")
    command = ["printf", "%s\\0", *arguments, "end"]
    monkeypatch.setattr(sys, "argv", ["orchard", "exec", sandbox_id, "-c", "--", *command])
    with _Capture() as out, contextlib.redirect_stdout(out), pytest.raises(SystemExit) as exit_code:
        try:
            main()
        finally:
            printed = out.text()
    assert exit_code.value.code == 0
    assert printed.split("\0") == [*arguments, "end", ""]
