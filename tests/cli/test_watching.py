"""`ps --watch`: lines in a pipe, JSON lines, a live table on a terminal."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchard.env.client import SandboxClient
from tests.cli.conftest import Cli
from tests.support.rest import new_id
from tests.support.service import Service
from tests.support.waiting import eventually

pytestmark = pytest.mark.xdist_group("cli")
COMMAND = [sys.executable, "-m", "orchard", "ps", "--watch"]


@pytest.fixture
def client(served: Service) -> Iterator[SandboxClient]:
    with SandboxClient(served.base_url, served.api_key) as open_client:
        yield open_client


@contextlib.contextmanager
def watching(output: Path, environment: dict[str, str], *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    with output.open("wb") as out:
        process = subprocess.Popen([*COMMAND, *arguments], stdout=out, env=environment)
    try:
        eventually(lambda: "open" in output.read_text(), "it has begun")
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_pipe_gets_a_line_for_each_event(
    client: SandboxClient, service_environment: dict[str, str], tmp_path: Path
) -> None:
    output, label = tmp_path / "out", new_id("watch")
    with watching(output, service_environment, "--label", f"run={label}"):
        sandbox = client.create("host", labels={"run": label})
        sandbox.delete()
        eventually(lambda: "ended" in output.read_text(), "the end is told")
    lines = [line.split(" ", 2) for line in output.read_text().splitlines()]
    assert [line[1] for line in lines] == ["open", "created", "starting", "ready", "ended"]
    assert lines[1][2] == f"{sandbox.sandbox_id} host"
    assert lines[-1][2] == f"{sandbox.sandbox_id} host (deleted) deleted on request"


def test_with_json_each_line_is_an_event(
    client: SandboxClient, service_environment: dict[str, str], tmp_path: Path
) -> None:
    output, label = tmp_path / "out", new_id("watch")
    with watching(output, service_environment, "--json", "--label", f"run={label}"):
        client.create("host", labels={"run": label}).delete()
        eventually(lambda: "ended" in output.read_text(), "the end is told")
    events = [json.loads(line) for line in output.read_text().splitlines()]
    assert [event["type"] for event in events] == ["open", "created", "starting", "ready", "ended"]


def test_ctrl_c_ends_it_without_a_traceback(service_environment: dict[str, str], tmp_path: Path) -> None:
    with watching(tmp_path / "out", service_environment) as process:
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130


def test_a_terminal_gets_a_table_that_follows(
    client: SandboxClient, service_environment: dict[str, str]
) -> None:
    label = new_id("watch")
    before = client.create("host", labels={"run": label})
    master, slave = pty.openpty()
    environment = {**service_environment, "TERM": "xterm", "COLUMNS": "200", "LINES": "40"}
    process = subprocess.Popen([*COMMAND, "--label", f"run={label}"], stdout=slave, env=environment)
    os.close(slave)
    os.set_blocking(master, False)
    shown = b""

    def sees(text: str) -> bool:
        nonlocal shown
        with contextlib.suppress(BlockingIOError):
            shown += os.read(master, 65536)
        return text.encode() in shown

    def drawn_without(text: str) -> bool:
        nonlocal shown
        shown = b""
        return sees("SANDBOX") and text.encode() not in shown

    try:
        eventually(lambda: sees(before.sandbox_id), "what was there is shown")
        after = client.create("host", labels={"run": label})
        eventually(lambda: sees(after.sandbox_id), "what comes is shown")
        after.delete()
        before.delete()
        eventually(lambda: drawn_without(before.sandbox_id), "what ended is gone")
    finally:
        process.kill()
        process.wait()
        os.close(master)


def test_options_that_mean_nothing_to_it_are_refused(cli: Cli) -> None:
    done = cli("ps", "--watch", "--quiet")
    assert done.returncode == 2
    assert "--watch" in done.stderr
