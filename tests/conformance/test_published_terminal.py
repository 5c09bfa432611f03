"""The published client's terminals as literal frames: `exec(pty=True)` opens a WebSocket, and these are what it sends and
needs back. The facts stand in shared/spec/facts/published-client.md."""

from __future__ import annotations

import base64
import json
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from tests.support.rest import Box, Rest
from tests.support.waiting import eventually


@pytest.fixture
def sandbox_id(box: Box) -> str:
    return box.id


class Terminal:
    """Its WebSocket: the key in the query and in no header, and text frames only."""

    def __init__(self, rest: Rest, sandbox_id: str, key: str | None = None, **options: Any) -> None:
        base = rest.base_url.replace("http://", "ws://")
        asked = f"?api_key={key or rest.api_key}" if "subprotocols" not in options else ""
        url = f"{base}/sandboxes/{sandbox_id}/exec/pty{asked}"
        self.socket = connect(url, max_size=4 << 20, **options)

    def init(self, command: str) -> dict[str, Any]:
        """Its first frame, for a string; the answer."""
        self.socket.send(
            f'{{"type": "init", "cmd": ["bash", "-c", {json.dumps(command)}], "env": {{}}, "cwd": null, "rows": 24,'
            ' "cols": 80, "login_shell": false}'
        )
        return self.receive()

    def receive(self) -> dict[str, Any]:
        text = self.socket.recv(timeout=10)
        assert isinstance(text, str), "text frames only"
        frame: dict[str, Any] = json.loads(text)
        return frame

    def rest(self) -> tuple[bytes, int]:
        """What is shown until the end, and the exit code."""
        shown = b""
        while (frame := self.receive())["type"] != "exit":
            assert frame["type"] == "stdout"
            shown += base64.b64decode(frame["data"])
        return shown, frame["code"]

    def close_code(self) -> int:
        try:
            while True:
                self.receive()
        except ConnectionClosed as error:
            assert error.rcvd is not None
            return error.rcvd.code


@pytest.fixture
def terminal(rest: Rest, sandbox_id: str) -> Iterator[Terminal]:
    opened = Terminal(rest, sandbox_id)
    yield opened
    opened.socket.close()


def test_a_terminal_is_ready_shows_output_and_tells_the_exit(terminal: Terminal) -> None:
    ready = terminal.init("echo out; echo err >&2; exit 7")
    assert ready["type"] == "ready"
    assert isinstance(ready["pid"], int)
    assert terminal.rest() == (b"out\r\nerr\r\n", 7)
    assert terminal.close_code() == 1000


def test_a_terminal_takes_input_sizes_and_signals(terminal: Terminal) -> None:
    terminal.init(
        "read line; echo got $line; stty size; trap 'echo told; exit 3' TERM; echo set; while :; do sleep 0.05; done"
    )
    terminal.socket.send('{"type": "resize", "rows": 30, "cols": 100}')
    terminal.socket.send('{"type": "stdin", "data": "aGVsbG8K"}')
    shown = b""
    while b"set" not in shown:
        shown += base64.b64decode(terminal.receive()["data"])
    assert b"got hello" in shown and b"30 100" in shown
    terminal.socket.send('{"type": "signal", "sig": "TERM"}')
    shown, code = terminal.rest()
    assert (shown.endswith(b"told\r\n"), code) == (True, 3)


@pytest.mark.parametrize("name", ["TERM", "KILL", "INT", "HUP", "QUIT"])
def test_a_terminal_knows_the_signals_that_it_sends(terminal: Terminal, name: str) -> None:
    assert terminal.init("sleep 600")["type"] == "ready"
    terminal.socket.send(f'{{"type": "signal", "sig": "{name}"}}')
    _, code = terminal.rest()
    assert code == 128 + signal.Signals[f"SIG{name}"].value


def test_leaving_sends_term_and_closes(rest: Rest, sandbox_id: str) -> None:
    """Without `close` and without reading on."""
    terminal = Terminal(rest, sandbox_id)
    terminal.init("echo $$ > /tmp/left; exec sleep 600")
    eventually(lambda: rest.get(f"/sandboxes/{sandbox_id}/files", path="/tmp/left").status == 200, "it runs")
    terminal.socket.send('{"type": "signal", "sig": "TERM"}')
    terminal.socket.close()
    box = Box(rest, sandbox_id)
    eventually(lambda: box.run("kill -0 $(cat /tmp/left)", concurrent=True)["exit_code"] != 0, "it has ended")


def test_its_own_pings_get_their_pong(terminal: Terminal) -> None:
    terminal.init("sleep 600")
    assert terminal.socket.ping().wait(10)


def test_the_key_may_come_as_a_subprotocol(rest: Rest, sandbox_id: str) -> None:
    terminal = Terminal(rest, sandbox_id, subprotocols=[f"api_key.{rest.api_key}"])
    assert terminal.init("exit 0")["type"] == "ready"
    terminal.socket.close()


def test_a_refused_terminal_is_accepted_told_why_and_closed(rest: Rest, sandbox_id: str) -> None:
    for opened, code in (
        (Terminal(rest, "never-seen"), 4404),
        (Terminal(rest, sandbox_id, key="wrong"), 4401),
    ):
        frame = opened.receive()
        assert frame["type"] == "error"
        assert frame["message"]
        assert opened.close_code() == code


def test_a_command_that_cannot_start_is_an_error_frame(terminal: Terminal) -> None:
    terminal.socket.send(
        '{"type": "init", "cmd": ["true"], "env": {}, "cwd": "/no/such/place", "rows": 24, "cols": 80, "login_shell": false}'
    )
    frame = terminal.receive()
    assert (frame["type"], "/no/such/place" in frame["message"]) == ("error", True)


def test_frames_of_a_flood_stay_below_four_mebibytes(terminal: Terminal) -> None:
    terminal.init("head -c 20000000 /dev/zero | tr '\\0' x")
    shown, code = terminal.rest()
    assert (len(shown), code) == (20_000_000, 0)
