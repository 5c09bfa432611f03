"""A real agent in a live sandbox, asked by its own protocol: whatever comes, it answers with `ok` or a typed error,
goes on serving, and keeps nothing open."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchard.env.agent.wire import FrameReader
from orchard.env.errors import BY_CODE
from tests.fuzz.frames import packed
from tests.fuzz.profile import examples
from tests.support.rest import Box, Rest
from tests.support.service import Service

ANSWER_WITHIN_S = 10.0


class Peer:
    """One connection to the agent of a sandbox."""

    def __init__(self, state_dir: Path, sandbox_id: str) -> None:
        folder = state_dir / "sandboxes" / sandbox_id
        self.token: str = json.loads((folder / "sandbox.json").read_text())["token"]
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(ANSWER_WITHIN_S)
        # The path itself may be longer than an address may be.
        fd = os.open(folder, os.O_PATH)
        try:
            self.socket.connect(f"/proc/self/fd/{fd}/agent.sock")
        finally:
            os.close(fd)
        self._reader = FrameReader()
        self._answers: dict[Any, dict[str, Any]] = {}
        self._number = 0

    def send(self, payload: bytes = b"", /, **header: Any) -> int:
        """Send a request; its number."""
        self._number += 1
        self.socket.sendall(packed({**header, "id": self._number}, payload))
        return self._number

    def answer(self, number: int) -> dict[str, Any]:
        while number not in self._answers:
            data = self.socket.recv(1 << 16)
            assert data, "the agent hung up"
            self._answers.update((header["id"], header) for header, _ in self._reader.feed(data))
        return self._answers.pop(number)

    def has_answered(self, number: int) -> bool:
        return number in self._answers

    def ask(self, op: str, payload: bytes = b"", /, **fields: Any) -> dict[str, Any]:
        return self.answer(self.send(payload, op=op, **fields))

    def hung_up(self) -> bool:
        """Once everything that it still sends has come."""
        try:
            while self.socket.recv(1 << 16):
                pass
        except ConnectionResetError:
            pass
        return True


@pytest.fixture(scope="module")
def box(rest: Rest) -> Iterator[Box]:
    with rest.sandbox("host") as shared:
        yield shared
        assert shared.alive()


@pytest.fixture(scope="module")
def peer(service: Service, box: Box) -> Iterator[Peer]:
    opened = Peer(service.state_dir, box.id)
    assert opened.ask("hello", token=opened.token)["ok"]
    for name, command in (("finished", "echo out"), ("again", "exit 3")):
        opened.ask("exec", job_id=name, command=command, wait=True)
    yield opened
    opened.socket.close()


#: Those that may wait for something to happen, for as long as they are told to.
WAITING = {"exec", "job", "output", "watch_changes", "cancel", "stdin"}
OPERATIONS = sorted(
    {
        "ping",
        "jobs",
        "signal",
        "resize",
        "sessions",
        "end_session",
        "read",
        "write",
        "abort",
        "list",
        "stat",
        "mkdir",
        "symlink",
        "attributes",
        "move",
        "remove",
        "log",
        "forget",
        "statvfs",
        "watch",
        "unwatch",
        "no-such-operation",
        *WAITING,
    }
)
TEXTS = st.sampled_from(
    ["", "/", "/tmp/fuzz", "/tmp/fuzz/a", "relative", "\0", "\ud800", "a" * 5000, "/proc/1/fd/0", "finished"]
)
NUMBERS = st.sampled_from(
    [0, 1, -1, 2**31, 2**63, 2**64, 2**70, -(2**70), 0.5, 1e300, float("inf"), float("nan")]
)
ANYTHING = st.recursive(
    st.none() | st.booleans() | TEXTS | NUMBERS | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)
#: The names of all fields, with values that are mostly right, so that more than the first check is reached.
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "job_id": st.sampled_from(["finished", "again", "unknown"]),
    "command": st.sampled_from(["true", ["true"], []]),
    "path": TEXTS,
    "root": st.sampled_from(["/", "/tmp", "/tmp/fuzz"]),
    "source": TEXTS,
    "target": TEXTS,
    "after": TEXTS,
    "upload": st.sampled_from(["u", "v"]),
    "name": TEXTS,
    "identity": TEXTS,
    "cwd": TEXTS,
    "user": TEXTS,
    "session": TEXTS,
    "job_ids": st.lists(TEXTS, max_size=2),
    "env": st.dictionaries(TEXTS, TEXTS, max_size=2),
    **dict.fromkeys(
        [
            "offset",
            "limit",
            "mode",
            "modified_ns",
            "signal",
            "rows",
            "cols",
            "watch",
            "stdout_offset",
            "stderr_offset",
            "timeout_s",
            "grace_s",
            "max_output_bytes",
            "max_spool_bytes",
            "stdin_size",
        ],
        NUMBERS,
    ),
    **dict.fromkeys(
        [
            "wait",
            "eof",
            "last",
            "raw",
            "recursive",
            "parents",
            "overwrite",
            "follow",
            "background",
            "concurrent",
            "internal",
            "login_shell",
            "stdin_open",
        ],
        st.booleans(),
    ),
    "pty": st.lists(NUMBERS, max_size=3),
    "reason": TEXTS,
}
#: Removing or replacing what the image is made of would only show that a sandbox can be broken by its owner.
HARMLESS = {"remove": ("path",), "move": ("source", "target"), "write": ("path",), "symlink": ("path",)}


@st.composite
def requests(draw: st.DrawFn, op: str) -> dict[str, Any]:
    names = draw(st.lists(st.sampled_from(sorted(FIELDS)), unique=True, max_size=6))
    wanted = (
        {"path", "job_id", "command", "watch", "source", "target", "upload", "name"}
        if draw(st.booleans())
        else set()
    )
    header = {}
    for name in sorted({*names, *wanted}):
        header[name] = draw(FIELDS[name] if draw(st.integers(0, 4)) else ANYTHING)
    for name in HARMLESS.get(op, ()):
        if isinstance(header.get(name), str):
            header[name] = "/tmp/fuzz/" + header[name].lstrip("/").replace("..", "")
    return {**header, "op": op}


@pytest.mark.parametrize("op", OPERATIONS)
def test_any_request_is_answered_or_waits_while_others_are_served(peer: Peer, op: str) -> None:
    @examples(30)
    @given(header=requests(op), payload=st.binary(max_size=10))
    def attempt(header: dict[str, Any], payload: bytes) -> None:
        number = peer.send(payload, **header)
        assert peer.ask("ping")["ok"]
        if op in WAITING and not peer.has_answered(number):
            return
        answer = peer.answer(number)
        assert answer.get("ok") is True or answer["error"]["code"] in BY_CODE, answer

    attempt()


@pytest.mark.parametrize(
    "request_",
    [
        {"op": "exec", "job_id": "empty-pty", "command": "true", "pty": []},
        {"op": "exec", "job_id": "list-env", "command": "true", "env": [1]},
        {"op": "exec", "job_id": "huge-pty", "command": "true", "pty": [70_000, 1], "wait": True},
        {"op": "read", "path": "/etc/passwd", "offset": 2**70},
        {"op": "attributes", "path": "/tmp", "modified_ns": 2**80},
        {"op": ["exec"]},
        {"op": "hello", "configure": [1]},
    ],
    ids=lambda request_: "-".join(str(value)[:12] for value in list(request_.values())[:2]),
)
def test_what_the_agent_did_not_foresee_is_answered_too(peer: Peer, request_: dict[str, Any]) -> None:
    """IndexError, AttributeError, struct.error, OverflowError: a request without an answer is waited for for ever."""
    answer = peer.answer(peer.send(**{**request_, "token": peer.token}))
    assert "ok" in answer or answer["error"]["code"] in BY_CODE


@examples(40)
@given(header=ANYTHING)
def test_a_header_of_any_shape_is_refused_or_answered(service: Service, box: Box, header: Any) -> None:
    """Also before the token was told, where nothing but `hello` is understood."""
    stranger = Peer(service.state_dir, box.id)
    stranger.socket.sendall(packed(header))
    assert stranger.hung_up()
    stranger.socket.close()


@examples(40)
@given(data=st.binary(min_size=8, max_size=200))
def test_bytes_of_a_stranger_change_nothing(service: Service, box: Box, data: bytes) -> None:
    stranger = Peer(service.state_dir, box.id)
    stranger.socket.sendall(data)
    stranger.socket.shutdown(socket.SHUT_WR)
    assert stranger.hung_up()
    stranger.socket.close()


def test_nothing_stays_open(service: Service, box: Box, peer: Peer) -> None:
    peer.ask("ping")
    before = _descriptors(box, service)
    for number in range(30):
        for op, fields in (
            ("read", {"path": "/tmp", "offset": "x"}),
            ("list", {"path": "/tmp", "limit": "x"}),
            (
                "write",
                {"path": "/tmp/w", "upload": f"u{number}", "offset": 1, "last": True, "modified_ns": "x"},
            ),
            ("attributes", {"path": "/tmp", "mode": "x"}),
            ("symlink", {"path": "/tmp/l", "target": "\0"}),
            ("mkdir", {"path": f"/tmp/d{number}", "mode": "x"}),
            ("watch", {"path": "/tmp", "recursive": {"x": 1}}),
            ("exec", {"job_id": f"p{number}", "command": "true", "pty": [2**40, "x"], "wait": True}),
            ("exec", {"job_id": f"s{number}", "command": "true", "session": "", "env": [], "wait": True}),
            ("abort", {"upload": f"u{number}"}),
        ):
            peer.ask(op, b"x", **fields)
    assert _descriptors(box, service) <= before + 35, "32 watches may be open, and little else"


def _descriptors(box: Box, service: Service) -> int:
    """Of the agent, as the machine sees it."""
    pid = next(
        int(path.parent.name) for path in Path("/proc").glob("[0-9]*/cgroup") if _agent_of(path, box.id)
    )
    return len([*Path(f"/proc/{pid}/fd").iterdir()])


def _agent_of(cgroup: Path, sandbox_id: str) -> bool:
    """Whether it is the first process of that sandbox."""
    try:
        ids = re.search(r"^NSpid:.*$", (cgroup.parent / "status").read_text(), re.MULTILINE)
        return sandbox_id in cgroup.read_text() and ids is not None and ids[0].split()[-1] == "1"
    except OSError:
        return False  # it has just ended


@pytest.mark.parametrize("seconds", [30 * 24 * 3600, 364 * 24 * 3600])
def test_a_timeout_longer_than_the_kernel_waits_is_kept(rest: Rest, seconds: int) -> None:
    with rest.sandbox("host", ttl_seconds=365 * 24 * 3600) as box:
        assert box.run("true", timeout_seconds=seconds)["exit_code"] == 0
        job = box.running("cat", stdin_open=True, timeout_seconds=seconds)
        assert box.alive()
        assert rest.job(job)["status"] == "running"
