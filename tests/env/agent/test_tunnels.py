"""The agent's end of tunnels: real sockets, and a service that need not be one."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchard.env.agent import tunnels as module
from orchard.env.agent.job import AgentError
from orchard.env.agent.links import (
    DATA,
    END,
    FULL,
    HEAD,
    MAX_LINKS,
    OPEN,
    PIECE_BYTES,
    RESET,
    ROOM,
    START,
    WINDOW_BYTES,
    Cutter,
    TunnelError,
)
from orchard.env.agent.loop import READ, Loop
from orchard.env.agent.tunnels import Tunnels

WAIT_S = 30.0

Frame = tuple[int, int, int, bytes]
plain_frames = st.tuples(
    st.sampled_from([START, OPEN, ROOM, END, RESET, FULL]),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
).map(lambda head: (*head, b""))
data_frames = st.tuples(st.integers(0, 2**32 - 1), st.binary(max_size=50)).map(
    lambda pair: (DATA, pair[0], len(pair[1]), pair[1])
)


def packed(kind: int, number: int = 0, value: int = 0, payload: bytes = b"") -> bytes:
    return HEAD.pack(kind, number, value) + payload


@given(st.lists(plain_frames | data_frames, max_size=6), st.data())
def test_frames_survive_any_cutting(frames: list[Frame], data: st.DataObject) -> None:
    stream = b"".join(packed(*frame) for frame in frames)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    cutter, found = Cutter(), []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += cutter.feed(stream[start:end])
    assert found == frames


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_frames_or_refused(data: bytes) -> None:
    try:
        for kind, _, value, payload in Cutter().feed(data):
            assert kind <= FULL
            assert len(payload) == (value if kind == DATA else 0)
    except TunnelError:
        pass


class Running:
    """Tunnels on a loop of their own; `call` runs something in its thread."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.loop = Loop(on_child=lambda: None, on_error=lambda error: self.lines.append(repr(error)))
        self.tunnels = Tunnels(self.loop, self.lines.append)
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._calls: list[object] = []
        self._ended = False
        self.loop.watch(self._read, READ, self._run_calls)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended:
            self.loop.turn(0.02)

    def _run_calls(self, _events: int) -> None:
        os.read(self._read, 4096)
        while self._calls:
            self._calls.pop(0)()  # type: ignore[operator]

    def call(self, function):  # type: ignore[no-untyped-def]
        done, results = threading.Event(), []

        def run() -> None:
            try:
                results.append((function(), None))
            except BaseException as error:
                results.append((None, error))
            done.set()

        self._calls.append(run)
        os.write(self._write, b"1")
        assert done.wait(WAIT_S)
        result, error = results[0]
        if error is not None:
            raise error
        return result

    def listen(self, *ports: int) -> list[int]:
        return self.call(lambda: self.tunnels.listen(list(ports)))

    def end(self) -> None:
        self.call(lambda: [self.tunnels.close(port) for port in self.tunnels.ports()])
        self._ended = True
        self._thread.join()
        self.loop.close()
        os.close(self._read)
        os.close(self._write)


@pytest.fixture
def agent() -> Iterator[Running]:
    running = Running()
    yield running
    running.end()


class Service:
    """The other end: sends any bytes, receives frames."""

    def __init__(self, agent: Running, *, start: bool = True) -> None:
        self.sock, theirs = socket.socketpair()
        self.sock.settimeout(WAIT_S)
        self._cutter, self._frames = Cutter(), []  # type: ignore[var-annotated]
        agent.call(lambda: (theirs.setblocking(False), agent.tunnels.attach(theirs)))
        if start:
            self.send(START)

    def send(self, kind: int, number: int = 0, value: int = 0, payload: bytes = b"") -> None:
        self.sock.sendall(packed(kind, number, value, payload))

    def frame(self) -> Frame:
        while not self._frames:
            data = self.sock.recv(1 << 18)
            assert data, "the agent closed the connection"
            self._frames += self._cutter.feed(data)
        return self._frames.pop(0)

    def data(self, size: int) -> int:
        """Bytes of DATA frames until there are at least `size`."""
        seen = 0
        while seen < size:
            kind, _, value, _ = self.frame()
            assert kind == DATA
            seen += value
        return seen

    def closed(self) -> bool:
        """Waits for the end of the connection."""
        try:
            while self.sock.recv(1 << 16):
                pass
        except ConnectionResetError:
            pass
        return True


def client_of(port: int) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", port), WAIT_S)
    client.settimeout(WAIT_S)
    return client


def is_reset(client: socket.socket) -> bool:
    with pytest.raises(ConnectionResetError):
        while client.recv(1 << 16):
            pass
    return True


def opened(agent: Running, service: Service) -> tuple[socket.socket, int]:
    """A client's end of a new link, and its number."""
    (port,) = agent.listen(0)
    client = client_of(port)
    kind, number, value, _ = service.frame()
    assert (kind, value) == (OPEN, port)
    return client, number


def test_bytes_and_ends_of_both_sides(agent: Running) -> None:
    service = Service(agent)
    client, number = opened(agent, service)
    client.sendall(b"up")
    assert service.frame() == (DATA, number, 2, b"up")
    service.send(DATA, number, 4, b"down")
    service.send(END, number)
    assert client.recv(100) == b"down"
    assert client.recv(100) == b""
    client.sendall(b"more")
    assert service.frame() == (DATA, number, 4, b"more")
    client.close()
    assert service.frame()[:2] == (END, number)


def test_no_more_is_read_from_a_client_than_there_is_room_for(agent: Running) -> None:
    service = Service(agent)
    client, number = opened(agent, service)
    other, other_number = opened(agent, service)
    sender = threading.Thread(target=client.sendall, args=(bytes(3 * WINDOW_BYTES),))
    sender.start()
    assert service.data(WINDOW_BYTES) == WINDOW_BYTES
    other.sendall(b"x")
    assert service.frame() == (DATA, other_number, 1, b"x"), "nothing more of the first comes before it"
    service.send(ROOM, number, 1000)
    assert service.data(1000) == 1000
    for room in (WINDOW_BYTES, WINDOW_BYTES - 1000):
        service.send(ROOM, number, room)
        service.data(room)
    sender.join(WAIT_S)
    assert not sender.is_alive()


def test_room_is_given_for_what_the_client_has_taken(agent: Running) -> None:
    service = Service(agent)
    client, number = opened(agent, service)
    service.send(DATA, number, PIECE_BYTES, bytes(PIECE_BYTES))
    assert service.frame() == (ROOM, number, PIECE_BYTES, b"")
    client.close()


def test_a_reset_of_the_service_is_one_for_the_client(agent: Running) -> None:
    service = Service(agent)
    client, number = opened(agent, service)
    service.send(RESET, number)
    assert is_reset(client)


def test_a_client_that_is_gone_is_told_as_reset(agent: Running) -> None:
    service = Service(agent)
    client, number = opened(agent, service)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    client.close()
    assert service.frame()[:2] == (RESET, number)


@pytest.mark.parametrize(
    "hostile",
    [
        packed(99),
        packed(DATA, 1, PIECE_BYTES + 1),
        packed(OPEN, 7, 80),
        b"".join(packed(DATA, 1, 1, b"x") for _ in range(2)) + packed(END, 1) + packed(DATA, 1, 1, b"x"),
        packed(ROOM, 1, 1),
        packed(ROOM, 1, 2**32 - 1),
        b'{"op": "hello"}',
    ],
    ids=[
        "unknown kind",
        "too large",
        "not the service's",
        "after the end",
        "room that is not owed",
        "all room",
        "JSON",
    ],
)
def test_a_service_that_breaks_the_protocol_loses_its_connection_alone(
    agent: Running, hostile: bytes
) -> None:
    service = Service(agent)
    client, number = opened(agent, service)
    assert number == 1
    service.sock.sendall(hostile)
    assert service.closed()
    with contextlib.suppress(ConnectionError):
        client.sendall(b"x")
        while client.recv(1 << 16):
            pass
    again = Service(agent)
    _, number = opened(agent, again)
    assert number == 2


def test_more_than_the_window_is_refused(agent: Running) -> None:
    """The client does not read: what its socket takes is passed on, the rest must stay within the window."""
    service = Service(agent)
    _client, number = opened(agent, service)
    block = packed(DATA, number, PIECE_BYTES, bytes(PIECE_BYTES))
    with pytest.raises(OSError):
        for _ in range(1000):  # 64 MB: more than any socket takes
            service.sock.sendall(block)
    assert any("room" in line for line in agent.lines)


def test_frames_of_unknown_links_are_ignored(agent: Running) -> None:
    service = Service(agent)
    for kind in (DATA, ROOM, END, RESET):
        service.send(kind, 4242)
    _, number = opened(agent, service)
    assert number == 1


def test_links_wait_for_the_service_and_for_its_start(agent: Running) -> None:
    (port,) = agent.listen(0)
    client = client_of(port)
    client.sendall(b"early")
    service = Service(agent, start=False)
    agent.call(lambda: None)
    service.sock.setblocking(False)
    with pytest.raises(BlockingIOError):
        service.sock.recv(1)
    service.sock.settimeout(WAIT_S)
    service.send(START)
    assert service.frame()[0] == OPEN
    assert service.frame()[3] == b"early"


def test_a_link_that_waits_too_long_is_reset(agent: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HOLD_S", 0.05)
    (port,) = agent.listen(0)
    assert is_reset(client_of(port))


def test_the_end_of_the_service_breaks_what_it_carried_and_nothing_else(agent: Running) -> None:
    service = Service(agent)
    client, _ = opened(agent, service)
    service.sock.close()
    assert is_reset(client)
    (port,) = agent.tunnels.ports()
    waiting = client_of(port)
    waiting.sendall(b"x")
    assert Service(agent).frame()[0] == OPEN


def test_a_second_service_takes_over(agent: Running) -> None:
    first = Service(agent)
    client, _ = opened(agent, first)
    second = Service(agent)
    assert first.closed()
    assert is_reset(client)
    opened(agent, second)


def test_there_are_only_so_many_links(agent: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LINKS", 3)
    assert MAX_LINKS > 3
    service = Service(agent)
    (port,) = agent.listen(0)
    clients = [client_of(port) for _ in range(3)]
    with pytest.raises(ConnectionResetError):
        client_of(port).recv(1)
    assert [service.frame()[0] for _ in range(4)] == [OPEN] * 3 + [FULL]
    assert len(clients) == 3


def test_a_port_in_use_leaves_all_as_it_was(agent: Running) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        with pytest.raises(AgentError) as caught:
            agent.listen(0, number)
    assert caught.value.code == "port_in_use"
    assert str(number) in caught.value.detail
    assert agent.tunnels.ports() == set()


@pytest.mark.parametrize("port", [-1, 65536])
def test_what_is_no_port_is_refused(agent: Running, port: int) -> None:
    with pytest.raises(AgentError) as caught:
        agent.listen(port)
    assert caught.value.code == "invalid_request"


def test_an_agent_without_the_right_says_so(agent: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the refusal of the system is played: this process may listen anywhere."""

    class Refusing(socket.socket):
        def bind(self, _address: object) -> None:
            raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(module.socket, "socket", Refusing)
    with pytest.raises(AgentError) as caught:
        agent.listen(80)
    assert (caught.value.code, "1024" in caught.value.detail) == ("port_not_allowed", True)


def test_a_closed_port_can_be_listened_on_again(agent: Running) -> None:
    service = Service(agent)
    client, number = opened(agent, service)
    (port,) = agent.tunnels.ports()
    assert agent.call(lambda: agent.tunnels.close(port)) is True
    assert service.frame()[:2] == (RESET, number)
    assert is_reset(client)
    assert agent.call(lambda: agent.tunnels.close(port)) is False
    assert agent.listen(port) == [port]
