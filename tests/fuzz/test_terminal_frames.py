"""Frames of a terminal, from a client that sends whatever it likes, to the running service."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from tests.fuzz.profile import JSON, examples
from tests.support.rest import Box, Rest

ANSWER_WITHIN_S = 20.0
REFUSALS = (1000, 4400, 4401, 4404, 4409, 4410, 4503)
#: Of the WebSocket layer itself: no UTF-8, too large.
BELOW = (1007, 1009)
INIT = {"type": "init", "cmd": ["cat"], "env": {}, "cwd": None, "rows": 24, "cols": 80, "login_shell": False}
FIELDS = st.dictionaries(
    st.sampled_from(["cmd", "env", "cwd", "rows", "cols", "login_shell", "data", "sig", "x"]),
    JSON,
    max_size=3,
)
FRAMES = (
    st.builds(
        lambda kind, fields: {"type": kind, **fields},
        st.sampled_from(["init", "stdin", "signal", "resize", "close", "x"]),
        FIELDS,
    ).map(json.dumps)
    | st.text(max_size=20)
    | st.binary(max_size=20)
    | JSON.map(json.dumps)
)


@pytest.fixture(scope="module")
def box(rest: Rest) -> Iterator[Box]:
    with rest.sandbox("host") as shared:
        yield shared
        assert shared.alive()


def opened(rest: Rest, sandbox_id: str, query: str = "") -> ClientConnection:
    url = f"{rest.base_url.replace('http://', 'ws://')}/sandboxes/{sandbox_id}/exec/pty{query}"
    return connect(url, additional_headers=rest.headers(), max_size=8 << 20, compression=None)


def outcome(socket: ClientConnection) -> tuple[list[dict[str, Any]], int]:
    """The frames that still come, and the code of the close."""
    frames = []
    try:
        while True:
            frames.append(json.loads(socket.recv(ANSWER_WITHIN_S)))
    except ConnectionClosed as error:
        assert error.rcvd is not None, "the connection broke"
        return frames, error.rcvd.code


@examples(60)
@given(first=FRAMES)
@example(first="[" * 200_000)
@example(first=json.dumps({**INIT, "rows": "24"}))
@example(first=json.dumps({**INIT, "cmd": ["a\0b"]}))
@example(first=json.dumps({**INIT, "cmd": ["\ud800"]}))
@example(first=json.dumps({**INIT, "env": {"": "x"}}))
def test_any_first_frame_opens_a_terminal_or_is_refused(rest: Rest, box: Box, first: str | bytes) -> None:
    with closing(opened(rest, box.id)) as socket:
        socket.send(first)
        answer = json.loads(socket.recv(ANSWER_WITHIN_S))
        if answer["type"] == "ready":
            socket.send('{"type": "close"}')
        _, code = outcome(socket)
        assert code in REFUSALS
        assert answer["type"] == "ready" or (answer["message"] and answer["code"] != "internal_error"), answer


@examples(60)
@given(frames=st.lists(FRAMES, min_size=1, max_size=4))
@example(frames=['{"type": "stdin", "data": "%s"}' % ("A" * (5 << 20))])
@example(frames=['{"type": "resize", "rows": 24.0, "cols": 80}'])
@example(frames=['{"type": "resize", "rows": 10000, "cols": 1}', '{"type": "signal", "sig": "65"}'])
@example(frames=['{"type": "signal", "sig": "_DFL"}'])
@example(frames=['{"type": "init"}'])
def test_any_later_frame_is_obeyed_or_ends_the_connection_with_a_reason(
    rest: Rest, box: Box, frames: list[str | bytes]
) -> None:
    with closing(opened(rest, box.id)) as socket:
        socket.send(json.dumps(INIT))
        assert json.loads(socket.recv(ANSWER_WITHIN_S))["type"] == "ready"
        try:
            for frame in frames:
                socket.send(frame)
            socket.send('{"type": "close"}')
        except ConnectionClosed:
            pass
        _, code = outcome(socket)
        assert code in (*REFUSALS, *BELOW)


@pytest.mark.parametrize("since", ["-1", "x", "9" * 30, "٣", "1e3", ""])
def test_a_place_to_go_on_from_that_is_no_number_is_refused(rest: Rest, box: Box, since: str) -> None:
    with closing(opened(rest, box.id, f"?pty_id=job-x&since={since}")) as socket:
        frames, code = outcome(socket)
    assert code == 4400
    assert "since" in frames[0]["message"]


@pytest.mark.parametrize(
    "wrong", [{"rows": "24"}, {"cols": True}, {"login_shell": 1}, {"cmd": [1]}, {"unknown": 1}]
)
def test_a_frame_is_not_bent_to_what_it_might_mean(rest: Rest, box: Box, wrong: dict[str, Any]) -> None:
    with closing(opened(rest, box.id)) as socket:
        socket.send(json.dumps({**INIT, **wrong}))
        frames, code = outcome(socket)
    assert code == 4400
    assert next(iter(wrong)) in frames[0]["message"]
