"""Links: the connections that user code makes to tunnels, and the frames that carry them to the service and back.

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

import select
import socket
import struct

from orchard.env.agent.connection import RECEIVED
from orchard.env.agent.loop import READ, WRITE

TYPE_CHECKING = False  # importing typing would cost every sandbox most of a megabyte
if TYPE_CHECKING:
    from collections.abc import Callable

    from orchard.env.agent.loop import Timer
    from orchard.env.agent.tunnels import Tunnels

START, OPEN, DATA, ROOM, END, RESET, FULL = range(7)
HEAD = struct.Struct(">BII")
PIECE_BYTES = 64 << 10
WINDOW_BYTES = 128 << 10
MAX_LINKS = 512
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
