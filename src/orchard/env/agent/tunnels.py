"""Tunnels: ports of the sandbox's loopback whose connections the service carries on to where the operator allows.

How they are carried is told in `orchard.env.agent.links`.
"""

from __future__ import annotations

import errno
import os
import socket
from collections import deque

from orchard.env.agent.connection import RECEIVED
from orchard.env.agent.job import AgentError
from orchard.env.agent.links import (
    DATA,
    END,
    FULL,
    HEAD,
    MAX_LINKS,
    OPEN,
    ROOM,
    START,
    WINDOW_BYTES,
    Cutter,
    Link,
    TunnelError,
    abandon,
)
from orchard.env.agent.loop import READ, WRITE

TYPE_CHECKING = False  # importing typing would cost every sandbox most of a megabyte
if TYPE_CHECKING:
    from collections.abc import Callable

    from orchard.env.agent.loop import Loop

#: How long a connection is held that came while no service was there, before it is reset.
HOLD_S = 60.0
#: With more than this unsent to the service, links are not read from.
_UNSENT_BYTES = 1 << 20
_ACCEPTED_TOGETHER = 64
_BACKLOG = 1024
_NO_FILES_PAUSE_S = 0.1
_PICKS = 20


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
