"""`orchard shell`, in a real terminal and without one."""

from __future__ import annotations

import os
import re
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.cli.conftest import Cli


class Window:
    """A terminal in which `orchard shell` runs."""

    def __init__(self, *arguments: str, env: dict[str, str], rows: int = 30, cols: int = 90) -> None:
        self._ours, theirs = os.openpty()
        self.resize(rows, cols)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "orchard", "shell", *arguments], stdin=theirs, stdout=theirs, stderr=theirs,
            env={**env, "TERM": "xterm"}, start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        self.shown = b""

    def resize(self, rows: int, cols: int) -> None:
        import fcntl
        import termios

        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def until(self, wanted: str, within_s: float = 20) -> str:
        deadline = time.monotonic() + within_s
        while wanted.encode() not in self.shown:
            assert time.monotonic() < deadline, self.shown
            if select.select([self._ours], [], [], 0.2)[0]:
                try:
                    self.shown += os.read(self._ours, 65536)
                except OSError:
                    break
        assert wanted.encode() in self.shown, self.shown
        return self.shown.decode()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._ours)


@pytest.fixture
def window(service_environment: dict[str, str], sandbox_id: str) -> Iterator[Window]:
    opened = Window(sandbox_id, "--", "bash", "--norc", "--noprofile", env=service_environment)
    opened.until("bash-")
    yield opened
    opened.close()


def test_a_shell_runs_in_this_terminal_and_passes_its_code_on(window: Window) -> None:
    window.type("stty size; echo got:$((40+2)); exit 7\r")
    window.until("got:42")
    assert "30 90" in window.until("30 90")
    assert window.process.wait(60) == 7


def test_the_interrupt_key_goes_to_the_sandbox(window: Window) -> None:
    window.type("sh -c 'echo on:$((1+1)); exec sleep 600'\r")
    window.until("on:2")
    window.shown = b""
    window.type("\x03")
    window.until("bash-")
    window.type("echo after:$?; exit\r")
    window.until("after:130")


def test_the_size_follows(window: Window) -> None:
    window.type("echo ready:$((1+1))\r")
    window.until("ready:2")
    window.resize(44, 111)
    os.kill(window.process.pid, signal.SIGWINCH)
    window.type("while [ \"$(stty size)\" != '44 111' ]; do sleep 0.1; done; echo resized:$((1+2))\r")
    window.until("resized:3")


def test_a_lost_terminal_can_be_attached_again(
    window: Window, service_environment: dict[str, str], sandbox_id: str
) -> None:
    window.type("A=kept; echo first:$((1+1))\r")
    window.until("first:2")
    window.process.send_signal(signal.SIGTERM)
    assert window.process.wait(60) == 128 + signal.SIGTERM, window.until("")
    pty_id = re.search(r"--attach (job-\w+)", window.until("--attach job-"))
    assert pty_id is not None
    again = Window(sandbox_id, "--attach", pty_id[1], env=service_environment)
    try:
        again.until("first:2")
        again.type("echo $A:again; exit 3\r")
        again.until("kept:again")
        assert again.process.wait(60) == 3
    finally:
        again.close()


def test_without_a_terminal_it_takes_its_input_from_a_pipe(cli: Cli, sandbox_id: str) -> None:
    done = cli("shell", sandbox_id, "--", "sh", "-c", "read x; echo got $x; exit 4", text="piped\n")
    assert done.returncode == 4
    assert "got piped" in done.stdout


def test_the_end_of_its_input_ends_a_login_shell_too(cli: Cli, sandbox_id: str) -> None:
    assert cli("shell", sandbox_id, text="").returncode == 0
    done = cli("shell", sandbox_id, text="echo got:$((1+1))\npython3\n6*7\n")
    assert done.returncode == 0
    assert "got:2" in done.stdout
    assert "42" in done.stdout


def test_a_terminal_that_knows_no_size_will_do(service_environment: dict[str, str], sandbox_id: str) -> None:
    opened = Window(sandbox_id, "--", "stty", "size", env=service_environment, rows=0, cols=0)
    try:
        opened.until("24 80")
    finally:
        opened.close()


def test_an_unknown_sandbox_is_an_error(cli: Cli) -> None:
    done = cli("shell", "no-such-sandbox")
    assert done.returncode == 1
    assert "no-such-sandbox" in done.stderr
