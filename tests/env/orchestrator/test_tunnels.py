"""Targets as operators write them; and agents that do not keep to the protocol."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from orchard.env.agent.links import (
    DATA,
    END,
    HEAD,
    MAX_LINKS,
    OPEN,
    PIECE_BYTES,
    RESET,
    ROOM,
    START,
    WINDOW_BYTES,
    Cutter,
)
from orchard.env.contract import CreateSandbox
from orchard.env.errors import SettingsError
from orchard.env.orchestrator.identity import body_digest
from orchard.env.orchestrator.metrics import Metrics
from orchard.env.orchestrator.settings import ServiceSettings
from orchard.env.orchestrator.tunnels.relay import Load, Relay, Tunnel, TunnelStream
from orchard.env.orchestrator.tunnels.targets import Target, parse_target, parse_targets

# -- targets


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("m=http://proxy", Target("m", "http", "proxy", 80)),
        ("m=http://127.0.0.1:9000/", Target("m", "http", "127.0.0.1", 9000)),
        ("model-1.b=https://api.example", Target("model-1.b", "https", "api.example", 443)),
        ("m=tcp://[::1]:5432", Target("m", "tcp", "::1", 5432)),
        ("m=unix:///run/a=b.sock", Target("m", "unix", path="/run/a=b.sock")),
    ],
)
def test_what_targets_mean(text: str, target: Target) -> None:
    assert parse_target(text) == target


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("model", "NAME=URL"), ("=http://h", "NAME=URL"), ("a b=http://h", "NAME=URL"), ("m=", "begin with"),
        ("m=ftp://h", "begin with"), ("m=proxy:80", "begin with"), ("m=tcp://h", "host and a port"),
        ("m=http://", "host and a port"), ("m=http://h:0", "host and a port"), ("m=http://h:99999", "not a URL"),
        ("m=http://h/v1", "only the host"), ("m=http://h?x=1", "only the host"), ("m=http://u:p@h", "only the host"),
        ("m=unix://x/y", "unix socket"), ("m=unix:", "unix socket"),
    ],
)  # fmt: skip
def test_what_is_no_target_is_refused(text: str, hint: str) -> None:
    with pytest.raises(SettingsError, match=hint):
        parse_target(text)


def test_a_name_means_one_target() -> None:
    with pytest.raises(SettingsError, match="twice"):
        parse_targets(["m=http://a", "m=http://b"])


def test_targets_are_settings_like_others(tmp_path: Path) -> None:
    file = tmp_path / "s.json"
    file.write_text('{"tunnel_targets": ["a=http://x"]}')
    assert ServiceSettings.load(file).tunnel_targets == ["a=http://x"]
    environ = {"ORCHARD_TUNNEL_TARGETS": "a=http://x, b=tcp://y:1"}
    assert ServiceSettings.load(file, environ=environ).tunnel_targets == ["a=http://x", "b=tcp://y:1"]
    with pytest.raises(SettingsError, match="NAME=URL"):
        ServiceSettings(tunnel_targets=["model"])


# -- agents that are not to be trusted


class Agent:
    """The agent's end of a stream, and targets that are sockets of this process."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.tunnel = Tunnel(80, "t", Metrics().tunnel_meter("t"), self.notes.append)
        self.stream = TunnelStream("sb", {80: self.tunnel}.get, self._connect, 5.0, Load(1000))
        self.gate = asyncio.Event()
        self.gate.set()
        self.targets: asyncio.Queue[socket.socket] = asyncio.Queue()
        self._cutter, self._frames = Cutter(), []  # type: ignore[var-annotated]

    async def start(self) -> Agent:
        ours, theirs = socket.socketpair()
        await asyncio.get_running_loop().create_unix_connection(lambda: self.stream, sock=theirs)
        self._reader, self.writer = await asyncio.open_unix_connection(sock=ours)
        assert (await self.frame())[0] == START
        return self

    async def _connect(self, _tunnel: Tunnel, relay: Relay) -> None:
        await self.gate.wait()
        ours, theirs = socket.socketpair()
        ours.settimeout(30)
        self.targets.put_nowait(ours)
        await asyncio.get_running_loop().create_unix_connection(lambda: relay, sock=theirs)

    def send(self, kind: int, number: int = 0, value: int = 0, payload: bytes = b"") -> None:
        self.writer.write(HEAD.pack(kind, number, value) + payload)

    async def frame(self) -> tuple[int, int, int, bytes]:
        while not self._frames:
            data = await asyncio.wait_for(self._reader.read(1 << 16), 30)
            assert data, "the service closed the connection"
            self._frames += self._cutter.feed(data)
        return self._frames.pop(0)

    async def lost(self) -> None:
        await asyncio.wait_for(self.stream.lost.wait(), 30)
        assert self.tunnel.open_connections == 0
        self.writer.close()


@pytest.mark.parametrize(
    "frames",
    [
        [(99, 0, 0)],
        [(START, 0, 0)],
        [(OPEN, 1, 80), (OPEN, 1, 80)],
        [(OPEN, number, 80) for number in range(MAX_LINKS + 1)],
        [(OPEN, 1, 80), (ROOM, 1, 1)],
        [(OPEN, 1, 80), (END, 1, 0), (DATA, 1, 1)],
        [(OPEN, 1, 80), *[(DATA, 1, PIECE_BYTES)] * (WINDOW_BYTES // PIECE_BYTES), (DATA, 1, 1)],
        [(DATA, 1, PIECE_BYTES + 1)],
    ],
    ids=["unknown", "start", "taken", "too many", "room", "after the end", "beyond the window", "too large"],
)
async def test_an_agent_that_breaks_the_protocol_loses_its_tunnels(
    frames: list[tuple[int, int, int]],
) -> None:
    agent = await Agent().start()
    agent.gate.clear()
    for kind, number, value in frames:
        agent.send(kind, number, value, bytes(value) if kind == DATA else b"")
    await agent.lost()


async def test_a_port_that_is_no_tunnel_leads_nowhere() -> None:
    agent = await Agent().start()
    agent.send(OPEN, 1, 81)
    assert (await agent.frame())[:2] == (RESET, 1)
    assert agent.targets.empty()
    agent.stream.close()
    await agent.lost()


async def test_there_are_only_so_many_connections_of_all_sandboxes() -> None:
    agent = await Agent().start()
    agent.stream.load.limit = 1
    agent.send(OPEN, 1, 80)
    agent.send(OPEN, 2, 80)
    assert (await agent.frame())[:2] == (RESET, 2)
    assert "all sandboxes" in (agent.tunnel.last_error or "")
    agent.send(RESET, 1)
    agent.send(OPEN, 3, 80)
    agent.send(OPEN, 4, 80)
    assert (await agent.frame())[:2] == (RESET, 4), "the place of the first is free again"
    agent.stream.close()
    await agent.lost()


async def test_what_comes_before_the_target_is_there_is_kept_for_it() -> None:
    agent = await Agent().start()
    agent.gate.clear()
    agent.send(OPEN, 1, 80)
    agent.send(DATA, 1, 5, b"early")
    agent.send(END, 1)
    agent.send(OPEN, 2, 81)
    assert (await agent.frame())[:2] == (RESET, 2), "all of it has been read"
    agent.gate.set()
    target = await agent.targets.get()
    assert await asyncio.to_thread(target.recv, 100) == b"early"
    assert await asyncio.to_thread(target.recv, 100) == b""
    agent.stream.close()
    await agent.lost()


async def test_an_agent_that_gives_no_room_is_sent_no_more_than_a_window() -> None:
    agent = await Agent().start()
    agent.send(OPEN, 1, 80)
    target = await agent.targets.get()
    agent.send(OPEN, 2, 80)
    other = await agent.targets.get()
    sender = asyncio.create_task(asyncio.to_thread(target.sendall, bytes(2 * WINDOW_BYTES)))
    seen = 0
    while seen < WINDOW_BYTES:
        seen += (await agent.frame())[2]
    assert seen == WINDOW_BYTES
    other.sendall(b"x")
    assert await agent.frame() == (DATA, 2, 1, b"x"), "nothing more of the first comes before it"
    agent.send(ROOM, 1, WINDOW_BYTES)
    while seen < 2 * WINDOW_BYTES:
        seen += (await agent.frame())[2]
    await asyncio.wait_for(sender, 30)
    agent.stream.close()
    await agent.lost()


async def test_the_same_failure_is_noted_once() -> None:
    agent = Agent()
    for _ in range(3):
        agent.tunnel.failed("refused")
    agent.tunnel.failed("broken")
    assert agent.tunnel.failed_connections == 4
    assert agent.notes == ["tunnel on port 80 to t: refused", "tunnel on port 80 to t: broken"]


def test_creations_without_tunnels_mean_what_they_did_before() -> None:
    """A record of an earlier version holds this digest: a repeated creation must find it."""
    digest = "23809e608433c088f105d6be60b0775d8adef08bb7e56d19814bb13ec62255e7"
    assert body_digest(CreateSandbox(image="host", cpu="2", labels={"a": "b"})) == digest
