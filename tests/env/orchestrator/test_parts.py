"""Small parts: patches as bytes, JSON of odd text, logs without keys, runtimes by name."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchard.env.errors import RuntimeRefused
from orchard.env.orchestrator import logging as logs
from orchard.env.orchestrator.patches import encode_patch
from orchard.env.orchestrator.responses import json_bytes
from orchard.env.runtimes.registry import make_runtime


@given(st.binary())
def test_a_patch_of_any_bytes_arrives_as_it_was(data: bytes) -> None:
    sent = json.loads(json.dumps(data.decode("utf-8", "surrogateescape")))
    assert encode_patch(sent) == data


@given(
    st.recursive(
        st.none() | st.text(st.characters()) | st.floats(allow_nan=False), lambda inner: st.lists(inner)
    )
)
def test_any_text_becomes_json_that_reads_back(value: object) -> None:
    assert json.loads(json_bytes(value)) == value


def test_lone_surrogates_are_escaped() -> None:
    assert json.loads(json_bytes({"name": "a\udcff"})) == {"name": "a\udcff"}


def test_logs_are_json_lines_with_ids() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logs.JsonFormatter())
    logger = logging.Logger("orchard.test")
    logger.addHandler(handler)
    token = logs.request_id.set("r1")
    try:
        logger.warning("line\nbreak %s", "x", extra={"sandbox_id": "s1", "api_key": "secret"})
        try:
            raise ValueError("inner")
        except ValueError:
            logger.exception("failed")
    finally:
        logs.request_id.reset(token)
    first, second = (json.loads(line) for line in stream.getvalue().splitlines())
    assert (first["message"], first["sandbox_id"], first["request_id"], first["level"]) == (
        "line\nbreak x", "s1", "r1", "warning",
    )  # fmt: skip
    assert "secret" not in stream.getvalue()
    assert "ValueError: inner" in second["exception"]


@pytest.mark.parametrize(
    ("name", "said"),
    [("docker", "not in this version"), ("kubernetes", "not in this version"), ("x", "unknown")],
)
def test_a_runtime_that_is_not_here_is_refused(tmp_path: Path, name: str, said: str) -> None:
    with pytest.raises(RuntimeRefused, match=said):
        make_runtime(name, tmp_path)
