"""WS /sandboxes/{id}/exec/pty: terminals, by the frames that the published client sends, and ours."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any
from urllib.parse import urlencode

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from tests.conformance.conftest import NewBox
from tests.support.rest import Box, Rest
from tests.support.service import Service
from tests.support.waiting import Stopwatch, eventually

INIT = {"type": "init", "env": {}, "cwd": None, "rows": 24, "cols": 80, "login_shell": False}


class Pty:
    """One connection. Frames are as on the wire; `shown` collects what the terminal shows."""

    def __init__(
        self, rest: Rest, sandbox_id: str, *, headers: dict[str, str] | None = None, **query: object
    ) -> None:
        url = (
            rest.base_url.replace("http://", "ws://") + f"/sandboxes/{sandbox_id}/exec/pty?{urlencode(query)}"
        )
        given = rest.headers() if headers is None else headers
        self.socket: ClientConnection = connect(
            url, additional_headers=given, max_size=8 << 20, compression=None
        )
        self.shown = b""
        self.ready: dict[str, Any] = {}

    def start(self, *cmd: str, **init: object) -> Pty:
        self.send(**{**INIT, "cmd": list(cmd), **init})
        self.ready = self.receive()
        assert self.ready["type"] == "ready", self.ready
        return self

    def send(self, **frame: object) -> None:
        self.socket.send(json.dumps(frame))

    def type(self, text: str) -> None:
        self.send(type="stdin", data=base64.b64encode(text.encode()).decode())

    def receive(self, timeout_s: float = 60) -> dict[str, Any]:
        frame: dict[str, Any] = json.loads(self.socket.recv(timeout_s))
        if frame["type"] == "stdout":
            assert frame.get("offset", len(self.shown)) >= 0
            self.shown += base64.b64decode(frame["data"])
        return frame

    def until(self, wanted: bytes) -> None:
        while wanted not in self.shown:
            self.receive()

    def exit(self) -> int:
        while True:
            frame = self.receive()
            if frame["type"] == "exit":
                return int(frame["code"])

    def closed(self) -> int:
        """The close code, once everything before has been received."""
        try:
            while True:
                self.receive()
        except ConnectionClosed as error:
            assert error.rcvd is not None
            return error.rcvd.code

    def close(self) -> None:
        self.socket.close()


@pytest.fixture
def pty(box: Box) -> Any:
    with ExitStack() as stack:
        yield lambda *cmd, **init: stack.enter_context(closing(Pty(box.rest, box.id))).start(*cmd, **init)


@pytest.mark.unprivileged
def test_a_command_has_a_terminal(pty: Callable[..., Pty]) -> None:
    terminal = pty("sh", "-c", "test -t 0 && test -t 1 && test -t 2 && tty; exit 5")
    assert (terminal.exit(), terminal.closed()) == (5, 1000)
    assert re.fullmatch(rb"/dev/pts/\d+\r\n", terminal.shown)


def test_it_is_told_which_process_it_is(pty: Callable[..., Pty]) -> None:
    terminal = pty("sh", "-c", "echo pid $$")
    terminal.exit()
    assert terminal.shown == b"pid %d\r\n" % terminal.ready["pid"]


def test_a_list_is_exact_argv(pty: Callable[..., Pty]) -> None:
    terminal = pty("printf", "%s|", "a b", "", "'\"$x", "☃")
    terminal.exit()
    assert terminal.shown.decode() == "a b||'\"$x|☃|"


def test_environment_directory_and_size_arrive(pty: Callable[..., Pty]) -> None:
    terminal = pty("sh", "-c", "echo $A $TERM; pwd; stty size", env={"A": "b"}, cwd="/tmp", rows=40, cols=132)
    terminal.exit()
    assert terminal.shown == b"b xterm-256color\r\n/tmp\r\n40 132\r\n"


@pytest.mark.unprivileged
def test_what_is_typed_is_echoed_and_read(pty: Callable[..., Pty]) -> None:
    terminal = pty("sh", "-c", "read line; echo got $line")
    terminal.type("hello\r")
    terminal.exit()
    assert terminal.shown == b"hello\r\ngot hello\r\n"


@pytest.mark.unprivileged
def test_the_interrupt_key_interrupts(pty: Callable[..., Pty]) -> None:
    terminal = pty("sh", "-c", "trap 'echo caught; exit 9' INT; echo go; while :; do sleep 0.1; done")
    terminal.until(b"go")
    terminal.type("\x03")
    assert terminal.exit() == 9
    assert b"caught" in terminal.shown


@pytest.mark.unprivileged
def test_resizing_signals_the_program(pty: Callable[..., Pty]) -> None:
    terminal = pty("sh", "-c", "trap 'stty size; exit' WINCH; echo go; while :; do sleep 0.1; done")
    terminal.until(b"go")
    terminal.send(type="resize", rows=50, cols=111)
    terminal.exit()
    assert b"50 111\r\n" in terminal.shown


@pytest.mark.parametrize("name", ["TERM", "KILL", "INT", "HUP", "QUIT"])
def test_signals_reach_it(pty: Callable[..., Pty], name: str) -> None:
    import signal

    terminal = pty("sleep", "600")
    terminal.send(type="signal", sig=name)
    assert terminal.exit() == 128 + signal.Signals[f"SIG{name}"]


def test_nothing_is_lost_before_the_exit(pty: Callable[..., Pty]) -> None:
    terminal = pty("sh", "-c", "head -c 5000000 /dev/zero | tr '\\0' x; printf end")
    terminal.exit()
    assert terminal.shown == b"x" * 5_000_000 + b"end"


def test_its_end_does_not_wait_for_what_it_left_running(pty: Callable[..., Pty]) -> None:
    watch = Stopwatch()
    terminal = pty("sh", "-c", "setsid sleep 300 & echo hi")
    assert terminal.exit() == 0
    assert watch.seconds < 60
    assert terminal.shown == b"hi\r\n"


@pytest.mark.unprivileged
def test_closing_ends_everything_in_it(box: Box, pty: Callable[..., Pty]) -> None:
    terminal = pty("sh", "-c", "trap '' HUP TERM; sleep 4321.5 & echo go; sleep 4321.5")
    terminal.until(b"go")
    terminal.send(type="close")
    assert terminal.closed() == 1000
    assert eventually(
        lambda: box.run("pgrep -f 'sleep 4321.5'", concurrent=True)["exit_code"] == 1, "none is left"
    )


def test_a_login_shell_is_the_default_program(box: Box) -> None:
    with closing(Pty(box.rest, box.id)) as terminal:
        terminal.send(type="init", cmd=None)
        terminal.ready = terminal.receive()
        terminal.type("echo $0; exit 4\r")
        assert terminal.exit() == 4


@pytest.mark.unprivileged
def test_a_terminal_outlives_its_connection_and_shows_what_was_missed(box: Box) -> None:
    with closing(Pty(box.rest, box.id)) as first:
        first.start("sh", "-c", "echo one; read x; echo two $x; read y; exit 6")
        first.until(b"one\r\n")
        first.type("a\r")
        first.until(b"two a\r\n")
    pty_id, seen = first.ready["pty_id"], len(first.shown)
    with closing(Pty(box.rest, box.id, pty_id=pty_id, since=seen)) as second:
        ready = second.receive()
        assert (ready["pid"], ready["pty_id"]) == (first.ready["pid"], pty_id)
        second.type("b\r")
        assert second.exit() == 6
        assert second.shown == b"b\r\n"
    with closing(Pty(box.rest, box.id, pty_id=pty_id)) as third:
        assert third.exit() == 6
        assert third.shown == first.shown + b"b\r\n"


def test_a_second_connection_is_refused_unless_it_takes_over(box: Box) -> None:
    with closing(Pty(box.rest, box.id)) as first:
        first.start("sh", "-c", "echo go; read x; echo $x")
        first.until(b"go\r\n")
        pty_id = first.ready["pty_id"]
        with closing(Pty(box.rest, box.id, pty_id=pty_id)) as second:
            assert second.receive()["code"] == "conflict"
            assert second.closed() == 4409
        with closing(Pty(box.rest, box.id, pty_id=pty_id, takeover=1)) as third:
            assert third.receive()["type"] == "ready"
            assert first.closed() == 4410
            third.type("mine\r")
            third.exit()
            assert third.shown == b"go\r\nmine\r\nmine\r\n"


def test_its_id_is_that_of_a_job(box: Box, pty: Callable[..., Pty]) -> None:
    terminal = pty("sh", "-c", "echo shown; exit 3")
    terminal.exit()
    job = box.rest.job(terminal.ready["pty_id"])
    assert (job["exit_code"], job["stdout"]) == (3, "shown\r\n")


def test_a_program_that_does_not_exist_exits_with_127_and_is_told(pty: Callable[..., Pty]) -> None:
    terminal = pty("no-such-program-at-all")
    assert terminal.exit() == 127
    assert terminal.shown == b"orchard: no-such-program-at-all: No such file or directory\r\n"


def test_a_directory_that_does_not_exist_is_told(box: Box) -> None:
    with closing(Pty(box.rest, box.id)) as terminal:
        terminal.send(**{**INIT, "cmd": ["pwd"], "cwd": "/nope"})
        frame = terminal.receive()
        assert (frame["type"], frame["code"]) == ("error", "cwd_not_found")


@pytest.mark.parametrize(
    "frame",
    [
        "no json", "[]", '{"type":"stdin","data":""}', '{"type":"init","cmd":"text"}', '{"type":"init","rows":0}',
        '{"type":"init","more":1}', '{"type":"else"}', "", '{"type":"init","cmd":["a\\u0000b"]}',
    ],
)  # fmt: skip
def test_a_wrong_first_frame_is_refused(box: Box, frame: str) -> None:
    with closing(Pty(box.rest, box.id)) as terminal:
        terminal.socket.send(frame)
        assert terminal.receive()["type"] == "error"
        assert terminal.closed() == 4400


@pytest.mark.parametrize(
    "frame", ["no json", '{"type":"stdin","data":"%%"}', '{"type":"signal","sig":"NOPE"}']
)
def test_a_wrong_frame_ends_the_connection_and_not_the_terminal(box: Box, frame: str) -> None:
    with closing(Pty(box.rest, box.id)) as terminal:
        terminal.start("sh", "-c", "read x; echo $x")
        terminal.socket.send(frame)
        assert terminal.closed() == 4400
    with closing(Pty(box.rest, box.id, pty_id=terminal.ready["pty_id"])) as again:
        again.receive()
        again.type("there\r")
        again.exit()
        assert b"there\r\nthere\r\n" in again.shown


def test_an_unknown_sandbox_closes_with_4404(rest: Rest) -> None:
    with closing(Pty(rest, "no-such-sandbox")) as terminal:
        assert terminal.closed() == 4404


def test_a_wrong_key_closes_with_4401(box: Box) -> None:
    for headers in ({}, {"X-API-Key": "wrong"}):
        with closing(Pty(box.rest, box.id, headers=headers)) as terminal:
            assert terminal.closed() == 4401


def test_the_key_may_come_in_the_query_and_is_in_no_log(own_service: Callable[..., Service]) -> None:
    service = own_service("--log-level", "debug")
    box = service.rest.create("host")
    with closing(Pty(box.rest, box.id, headers={}, api_key=service.api_key)) as terminal:
        terminal.start("true").exit()
    with closing(Pty(box.rest, box.id, headers={}, api_key="another-secret-key")) as terminal:
        assert terminal.closed() == 4401
    assert service.api_key is not None
    text = service.log_path.read_text()
    assert service.api_key not in text
    assert "another-secret-key" not in text


def test_a_terminal_survives_a_restart_of_the_service(own_service: Callable[..., Service]) -> None:
    service = own_service()
    box = service.rest.create("host")
    with closing(Pty(box.rest, box.id)) as first:
        first.start("sh", "-c", "echo before; read x; echo after $x; exit 8")
        first.until(b"before\r\n")
        service.kill()
    service.start()
    with closing(Pty(service.rest, box.id, pty_id=first.ready["pty_id"])) as second:
        assert second.receive()["pid"] == first.ready["pid"]
        second.type("all\r")
        assert second.exit() == 8
        assert second.shown == b"before\r\nall\r\nafter all\r\n"


def test_a_silent_terminal_is_not_given_up(pty: Callable[..., Pty]) -> None:
    """The published client's socket gives up after ten seconds without any frame: pings come between."""
    terminal = pty("sh", "-c", "sleep 12; echo done")
    assert terminal.exit() == 0
    assert terminal.shown == b"done\r\n"


def test_the_end_of_the_sandbox_is_told(new_box: NewBox) -> None:
    box = new_box()
    with closing(Pty(box.rest, box.id)) as terminal:
        terminal.start("sleep", "600")
        box.delete()
        assert terminal.exit() == -1


@pytest.mark.unprivileged
def test_many_at_once(new_box: NewBox) -> None:
    box = new_box()

    def one(number: int) -> bytes:
        with closing(Pty(box.rest, box.id)) as terminal:
            terminal.start("sh", "-c", "read x; echo got $x")
            terminal.type(f"{number}\r")
            terminal.exit()
            return terminal.shown

    with ThreadPoolExecutor(20) as pool:
        shown = list(pool.map(one, range(100)))
    assert shown == [b"%d\r\ngot %d\r\n" % (n, n) for n in range(100)]


def test_a_terminal_that_nobody_comes_back_to_is_ended(own_service: Callable[..., Service]) -> None:
    service = own_service(environment={"ORCHARD_TERMINAL_DETACHED_S": "1"})
    box = service.rest.create("host")
    with closing(Pty(service.rest, box.id).start("sleep", "1000")) as pty:
        left = pty.ready["pty_id"]
    job = service.rest.wait_job(left, 30)
    assert (job["status"], job["error_code"]) == ("failed", "cancelled")
    assert "nobody was connected" in job["error"]


def test_nor_one_that_was_left_before_the_service_was_killed(own_service: Callable[..., Service]) -> None:
    service = own_service(environment={"ORCHARD_TERMINAL_DETACHED_S": "2"})
    box = service.rest.create("host")
    with closing(Pty(service.rest, box.id).start("sleep", "1000")) as pty:
        service.kill()
    service.start()
    assert service.rest.wait_job(pty.ready["pty_id"], 30)["error_code"] == "cancelled"


def test_one_that_is_in_use_is_not(own_service: Callable[..., Service]) -> None:
    service = own_service(environment={"ORCHARD_TERMINAL_DETACHED_S": "0.5"})
    box = service.rest.create("host")
    with closing(Pty(service.rest, box.id).start("sh", "-c", "sleep 2; echo still here")) as pty:
        assert pty.exit() == 0
        assert b"still here" in pty.shown
