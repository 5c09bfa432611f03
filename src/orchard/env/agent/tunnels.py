"""Tunnels: ports of the sandbox's loopback whose connections the service carries on to where the operator allows.

Their bytes have a connection to the service of their own (`hello` with `use: "tunnels"`), so that no command waits
behind them. On it both ends send frames: kind (one byte), number of a link and a value (unsigned 32-bit big-endian
each), and after DATA as many bytes as the value says. A link is one connection that user code made to a port.

    START                    service → agent   first of all: the agent may send from here on
    OPEN   number, port      agent → service   a new link; its number is free again when it has ended
    DATA   number, size      both              at most PIECE_BYTES, and no more than the other end has ROOM for
    ROOM   number, bytes     both              so many were passed on: as many more may come
    END    number            both              nothing more comes from this end; the other direction goes on
    RESET  number            both              the link is broken; nothing follows in either direction
    FULL   0, port           agent → service   a connection was refused: there are MAX_LINKS

Each direction of a link begins with ROOM for WINDOW_BYTES, so that a reader that does not read holds up its own link
alone, with no more than that in memory. Frames of links that are not known (any more) are ignored.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
from collections import deque

from orchard.env.agent.connection import RECEIVED
from orchard.env.agent.job import AgentError
from orchard.env.agent.loop import READ, WRITE

TYPE_CHECKING = False  # importing typing would cost every sandbox most of a megabyte
if TYPE_CHECKING:
    from collections.abc import Callable

    from orchard.env.agent.loop import Loop, Timer

START, OPEN, DATA, ROOM, END, RESET, FULL = range(7)
HEAD = struct.Struct(">BII")
PIECE_BYTES = 64 << 10
WINDOW_BYTES = 128 << 10
MAX_LINKS = 512
#: How long a connection is held that came while no service was there, before it is reset.
HOLD_S = 30.0
#: With more than this unsent to the service, links are not read from.
_UNSENT_BYTES = 1 << 20
_ACCEPTED_TOGETHER = 64
_BACKLOG = 1024
_NO_FILES_PAUSE_S = 0.1
_PICKS = 20
_LINGER_NOT = struct.pack("ii", 1, 0)


class TunnelError(Exception):
    """The other end broke the protocol: the connection is closed."""


class Cutter:
    """Cuts a byte stream into frames: kind, number, value, payload."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes | memoryview) -> list[tuple[int, int, int, bytes]]:
        """Frames completed by `data`, in order. Raises `TunnelError` for what is no frame."""
        rest = self._rest
        rest += data
        frames = []
        at, end = 0, len(rest)
        with memoryview(rest) as view:
            while end - at >= HEAD.size:
                kind, number, value = HEAD.unpack_from(view, at)
                begin = at + HEAD.size
                if kind != DATA:
                    if kind > FULL:
                        raise TunnelError(f"there is no kind {kind}")
                    frames.append((kind, number, value, b""))
                    at = begin
                    continue
                if value > PIECE_BYTES:
                    raise TunnelError(f"{value} bytes in one piece")
                if end < begin + value:
                    break
                at = begin + value
                frames.append((kind, number, value, bytes(view[begin:at])))
        del rest[:at]
        return frames


class Link:
    """One connection of the sandbox's own code, and what is on its way through it."""

    __slots__ = (
        "_sock", "_tunnels", "_unsent", "_watched", "announced", "client_ended", "credit", "number",
        "passed_on", "port", "service_ended", "stalled", "timer",
    )  # fmt: skip

    def __init__(self, tunnels: Tunnels, number: int, port: int, sock: socket.socket) -> None:
        self._tunnels = tunnels
        self._sock = sock
        self._unsent = bytearray()
        self._watched = 0
        self.number = number
        self.port = port
        self.timer: Timer | None = None
        self.announced = False
        self.stalled = False
        self.credit = WINDOW_BYTES
        self.passed_on = 0
        self.client_ended = False
        self.service_ended = False

    def watch(self) -> None:
        """Wait for what can be dealt with now, and for nothing else: a closed socket is always ready."""
        wanted = WRITE if self._unsent else 0
        if self.announced and not self.client_ended and self.credit and not self.stalled:
            wanted |= READ
        if wanted == self._watched:
            return
        self._watched = wanted
        if wanted:
            self._tunnels.loop.watch(self._sock.fileno(), wanted, self._ready)
        else:
            self._tunnels.loop.unwatch(self._sock.fileno())

    def _ready(self, events: int) -> None:
        if events & select.EPOLLERR:
            self.broken()
            return
        if self._unsent:
            self._flush()
        if self._watched & select.EPOLLIN and events & READ:
            self._receive()

    def _receive(self) -> None:
        if self._tunnels.crowded(self):
            self.stalled = True
            self.watch()
            return
        try:
            count = self._sock.recv_into(RECEIVED, min(PIECE_BYTES, self.credit))
        except BlockingIOError:
            return
        except OSError:
            self.broken()
            return
        if count:
            self.credit -= count
            self._tunnels.send(DATA, self.number, count, RECEIVED[:count])
            if self.credit:
                return
        else:
            self.client_ended = True
            self._tunnels.send(END, self.number)
            self._end_if_over()
        self.watch()

    def give(self, data: bytes) -> None:
        """Bytes from the service. Raises `TunnelError` where there are more than it has room for."""
        waiting = len(self._unsent)
        if self.service_ended or waiting + self.passed_on + len(data) > WINDOW_BYTES:
            raise TunnelError("more than there is room for")
        self._unsent += data
        if not waiting:
            self._flush()

    def end(self) -> None:
        """Nothing more comes from the service."""
        self.service_ended = True
        if not self._unsent:
            self._flush()

    def _flush(self) -> None:
        try:
            while self._unsent:
                sent = self._sock.send(self._unsent)
                self.passed_on += sent
                del self._unsent[:sent]
            if self.service_ended:
                self._sock.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            pass
        except OSError:
            self.broken()
            return
        if self.passed_on >= WINDOW_BYTES // 2 and not self.service_ended:
            self._tunnels.send(ROOM, self.number, self.passed_on)
            self.passed_on = 0
        self._end_if_over()
        self.watch()

    def _end_if_over(self) -> None:
        if self.client_ended and self.service_ended and not self._unsent:
            self.close()

    def broken(self) -> None:
        """The client is gone, or was kept waiting for too long."""
        if self.announced:
            self._tunnels.send(RESET, self.number)
        self.reset()

    def reset(self) -> None:
        """Close it so that the client sees an error and not an end."""
        if self.number in self._tunnels.links:
            abandon(self._sock, self.close)

    def close(self) -> None:
        if self._tunnels.links.pop(self.number, None) is not None:
            if self.timer is not None:
                self.timer.cancel()
            if self._watched:
                self._watched = 0
                self._tunnels.loop.unwatch(self._sock.fileno())
            self._unsent.clear()
            self._sock.close()
            self.stalled = True
            self.client_ended = True


def abandon(sock: socket.socket, close: Callable[[], None]) -> None:
    """Close a socket so that its other end is told of an error."""
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)
    except OSError:
        pass
    close()


class Peer:
    """The service's end of all links."""

    def __init__(self, tunnels: Tunnels, sock: socket.socket) -> None:
        self._tunnels = tunnels
        self._sock = sock
        self._cutter = Cutter()
        self._unsent: deque[memoryview] = deque()
        self.unsent_bytes = 0
        self.stalled: list[Link] = []
        self.started = False
        self.closed = False
        tunnels.loop.watch(sock.fileno(), READ, self._ready)

    def _ready(self, events: int) -> None:
        if self._unsent:
            self._flush()
        if events & READ and not self.closed:
            self._receive()

    def _receive(self) -> None:
        try:
            count = self._sock.recv_into(RECEIVED)
        except BlockingIOError:
            return
        except OSError:
            count = 0
        if not count:
            self.close()
            return
        try:
            for kind, number, value, payload in self._cutter.feed(RECEIVED[:count]):
                if not self.closed:
                    self._tunnels.received(self, kind, number, value, payload)
        except TunnelError as error:
            self._tunnels.log(f"the connection of the tunnels is closed: {error}")
            self.close()

    def send(self, data: bytes) -> None:
        if not self._unsent:
            try:
                sent = self._sock.send(data)
            except BlockingIOError:
                sent = 0
            except OSError:
                # Its end is seen, and dealt with, when it is read from: not in the middle of what happens here.
                return
            if sent == len(data):
                return
            self._tunnels.loop.watch(self._sock.fileno(), READ | WRITE, self._ready)
        else:
            sent = 0
        self._unsent.append(memoryview(data)[sent:])
        self.unsent_bytes += len(data) - sent

    def _flush(self) -> None:
        try:
            while self._unsent:
                sent = self._sock.send(self._unsent[0])
                self.unsent_bytes -= sent
                if sent < len(self._unsent[0]):
                    self._unsent[0] = self._unsent[0][sent:]
                else:
                    self._unsent.popleft()
            self._tunnels.loop.watch(self._sock.fileno(), READ, self._ready)
        except BlockingIOError:
            pass
        except OSError:
            self.close()
            return
        if self.stalled and self.unsent_bytes <= _UNSENT_BYTES // 2:
            stalled, self.stalled = self.stalled, []
            for link in stalled:
                link.stalled = link.number not in self._tunnels.links
                link.watch()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._tunnels.loop.unwatch(self._sock.fileno())
            self._sock.close()
            self._tunnels.lost(self)


class Tunnels:
    """The ports that are listened on, their links, and the service that carries them on."""

    def __init__(self, loop: Loop, log: Callable[[str], None]) -> None:
        self.loop = loop
        self.log = log
        self.links: dict[int, Link] = {}
        self._listeners: dict[int, list[socket.socket]] = {}
        self._peer: Peer | None = None
        self._last_number = 0

    # ------------------------------------------------------------------------------------------------ ports

    def ports(self) -> set[int]:
        return set(self._listeners)

    def listen(self, ports: list[int]) -> list[int]:
        """Listen on all of `ports` (0: a free one each), or raise `AgentError` and leave all as it was; the ports."""
        made: list[int] = []
        found = []
        try:
            for port in ports:
                if not 0 <= port <= 65535:
                    raise AgentError("invalid_request", f"there is no port {port}")
                if not port or port not in self._listeners:
                    port, listeners = _listen(port)
                    self._listeners[port] = listeners
                    made.append(port)
                found.append(port)
        except (AgentError, OSError):
            for port in made:
                self.close(port)
            raise
        for port in made:
            for listener in self._listeners[port]:
                self._watch(port, listener)
        return found

    def close(self, port: int) -> bool:
        """Listen no more, and reset what came in by this port. False when it was none of ours."""
        listeners = self._listeners.pop(port, None)
        for listener in listeners or ():
            self.loop.unwatch(listener.fileno())
            listener.close()
        for link in [link for link in self.links.values() if link.port == port]:
            link.broken()
        return listeners is not None

    def _watch(self, port: int, listener: socket.socket) -> None:
        if listener in self._listeners.get(port, ()):
            self.loop.watch(listener.fileno(), READ, lambda _events: self._accept(port, listener))

    def _accept(self, port: int, listener: socket.socket) -> None:
        for _ in range(_ACCEPTED_TOGETHER):
            try:
                sock, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self.log(f"tunnel on port {port}: a connection has to wait: {error}")
                    self.loop.unwatch(listener.fileno())
                    self.loop.after(_NO_FILES_PAUSE_S, lambda: self._watch(port, listener))
                    return
                continue  # it was gone before it was accepted
            if len(self.links) >= MAX_LINKS:
                abandon(sock, sock.close)
                self.send(FULL, 0, port)
            else:
                self._take(port, sock)

    def _take(self, port: int, sock: socket.socket) -> None:
        sock.setblocking(False)
        while True:
            self._last_number = (self._last_number + 1) & 0xFFFFFFFF
            if self._last_number not in self.links:
                break
        link = self.links[self._last_number] = Link(self, self._last_number, port, sock)
        if self._peer is not None and self._peer.started:
            self._announce(link)
        else:
            link.timer = self.loop.after(HOLD_S, link.broken)

    def _announce(self, link: Link) -> None:
        if link.timer is not None:
            link.timer.cancel()
            link.timer = None
        link.announced = True
        self.send(OPEN, link.number, link.port)
        link.watch()

    # ------------------------------------------------------------------------------------------ the service

    def attach(self, sock: socket.socket) -> None:
        """The service's end from here on; one that was there before is closed."""
        if self._peer is not None:
            self._peer.close()
        self._peer = Peer(self, sock)

    def lost(self, peer: Peer) -> None:
        """What it carried is broken; connections that come are held for the next."""
        if self._peer is peer:
            self._peer = None
            for link in [link for link in self.links.values() if link.announced]:
                link.reset()

    def crowded(self, link: Link) -> bool:
        """Whether `link` has to wait until the service has read what was sent to it; it is told when it has."""
        peer = self._peer
        if peer is None or peer.unsent_bytes <= _UNSENT_BYTES:
            return False
        peer.stalled.append(link)
        return True

    def send(self, kind: int, number: int, value: int = 0, payload: bytes | memoryview = b"") -> None:
        if self._peer is not None and self._peer.started:
            self._peer.send(b"".join((HEAD.pack(kind, number, value), payload)))

    def received(self, peer: Peer, kind: int, number: int, value: int, payload: bytes) -> None:
        """One frame of the service. Raises `TunnelError` for what it must not send."""
        if kind == START:
            peer.started = True
            for held in [link for link in self.links.values() if not link.announced]:
                self._announce(held)
            return
        if kind in (OPEN, FULL):
            raise TunnelError(f"kind {kind} is for the service")
        link = self.links.get(number)
        if link is None:
            return
        if kind == DATA:
            link.give(payload)
        elif kind == ROOM:
            link.credit += value
            if link.credit > WINDOW_BYTES:
                raise TunnelError("more room than there was at first")
            link.watch()
        elif kind == END:
            link.end()
        else:
            link.reset()


def _listen(port: int) -> tuple[int, list[socket.socket]]:
    """Sockets on this port of 127.0.0.1, and of ::1 where there is one."""
    for _ in range(_PICKS):
        first = _bound(socket.AF_INET, "127.0.0.1", port)
        picked = first.getsockname()[1]
        try:
            second = _bound(socket.AF_INET6, "::1", picked)
        except AgentError as error:
            if error.code != "port_in_use":
                return picked, [first]
            first.close()
            if port:
                raise
            continue
        except OSError:
            return picked, [first]  # no IPv6 here
        return picked, [first, second]
    raise AgentError("port_in_use", "no port is free in the sandbox; name one as listen_port")


def _bound(family: int, address: str, port: int) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        # A port that was closed a moment ago can be taken again; one that is listened on cannot.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # What is accepted has it from here: small answers must not wait for each other.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind((address, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            detail = f"port {port} is in use inside the sandbox; choose another listen_port, or none for a free one"
            raise AgentError("port_in_use", detail) from None
        if error.errno in (errno.EACCES, errno.EPERM):
            detail = (
                f"the agent may not listen on port {port} ({os.strerror(error.errno)}); use 1024 to 65535"
            )
            raise AgentError("port_not_allowed", detail) from None
        raise
    return listener
