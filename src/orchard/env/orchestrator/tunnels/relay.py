"""The service's end of a sandbox's tunnels: frames of the agent on one side, connections to targets on the other.

Memory is bounded everywhere: from a target no more is read than the agent has room for, and the agent sends no more
than a target has taken. What an agent sends is not trusted: one that breaks the protocol loses its tunnels.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import cast

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
from orchard.env.orchestrator.metrics import TunnelMeter

_log = logging.getLogger(__name__)
#: With more than this unsent to an agent, targets are not read from.
_UNSENT_BYTES = 1 << 20
#: TLS cannot be ended in one direction: how long a target may still answer a client that has ended its own.
_TLS_DRAIN_S = 600.0
_NOTE_AGAIN_S = 60.0
#: Filled and passed on within one step of the event loop.
_RECEIVED = memoryview(bytearray(PIECE_BYTES))


@dataclass(slots=True, eq=False)
class Tunnel:
    """One port of one sandbox, and what came through it. note: writes a line into the sandbox's log."""

    listen_port: int
    target: str
    meter: TunnelMeter
    note: Callable[[str], None]
    open_connections: int = 0
    total_connections: int = 0
    failed_connections: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    last_error: str | None = None
    last_error_at: float | None = None
    #: When a reason was last noted, by the clock that does not step.
    noted_mono: float = 0.0

    def failed(self, why: str) -> None:
        """A connection was refused or broke; the same reason is noted once in a while."""
        now = time.monotonic()
        if why != self.last_error or now - self.noted_mono > _NOTE_AGAIN_S:
            self.note(f"tunnel on port {self.listen_port} to {self.target}: {why}")
            self.noted_mono = now
            self.last_error_at = time.time()
        self.last_error = why
        self.failed_connections += 1
        self.meter.failures.inc()


@dataclass(slots=True)
class Load:
    """Connections of all sandboxes together: each takes a descriptor of the service."""

    limit: int
    open: int = 0


Connect = Callable[[Tunnel, "Relay"], Awaitable[None]]


class Relay(asyncio.BufferedProtocol):
    """One connection: the protocol of its target's end."""

    def __init__(self, stream: TunnelStream, number: int, tunnel: Tunnel) -> None:
        self._stream = stream
        self._number = number
        self.tunnel = tunnel
        self.connecting: asyncio.Task[None] | None = None
        self._transport: asyncio.Transport | None = None
        self._early = bytearray()
        self._credit = WINDOW_BYTES
        # Of what came from the agent: all that it was not given room for again, and what the target has taken of it.
        self._held = 0
        self._taken = 0
        self._choked = False
        self._client_ended = False
        self._target_ended = False
        self._lost = False
        self._drain: asyncio.TimerHandle | None = None
        self.over = False

    # --------------------------------------------------------------------------------- from the target's end

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not checked by isinstance: uvloop's transports are none of asyncio's classes.
        self._transport = cast(asyncio.Transport, transport)
        if self.over:
            self._transport.abort()
            return
        if self._early:
            early, self._early = bytes(self._early), bytearray()
            self._pass_on(early)
        if self._client_ended:
            self._end_writing()

    def get_buffer(self, _size_hint: int) -> memoryview:
        return _RECEIVED[: max(1, min(PIECE_BYTES, self._credit))]

    def buffer_updated(self, size: int) -> None:
        if self.over:
            return
        self._credit -= size
        self.tunnel.received_bytes += size
        self.tunnel.meter.received.inc(size)
        self._stream.send(DATA, self._number, size, _RECEIVED[:size])
        self.read_or_not()

    def read_or_not(self) -> None:
        """Read on from the target if the agent has room for it."""
        transport = self._transport
        if transport is None or transport.is_closing() or self._target_ended:
            return
        if self._stream.full:
            self._stream.stalled.add(self)
        if self._credit <= 0 or self._stream.full:
            transport.pause_reading()
        else:
            transport.resume_reading()

    def eof_received(self) -> bool:
        self._target_has_ended()
        # Of TLS there is no half: its connection ends with this.
        return not self._tls

    def pause_writing(self) -> None:
        self._choked = True

    def resume_writing(self) -> None:
        self._choked = False
        self._give_room()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._lost = True
        if error is not None:
            self.fail(f"the target broke the connection: {error}")
        else:
            self._target_has_ended()

    def _target_has_ended(self) -> None:
        if not self._target_ended and not self.over:
            self._target_ended = True
            self._stream.send(END, self._number)
            self._end_if_over()

    # ---------------------------------------------------------------------------------- from the agent's end

    def give(self, data: bytes) -> None:
        """Bytes of the client. Raises `TunnelError` where there are more than it had room for."""
        self._held += len(data)
        if self._client_ended or self._held > WINDOW_BYTES:
            raise TunnelError("more than there is room for")
        self.tunnel.sent_bytes += len(data)
        self.tunnel.meter.sent.inc(len(data))
        if self._transport is None and not self._lost:
            self._early += data
        elif self._transport is None or self._transport.is_closing():
            self._reset()  # as a socket does when its other end is closed and more is written
        else:
            self._pass_on(data)

    def _pass_on(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data)
        self._taken += len(data)
        self._give_room()

    def _give_room(self) -> None:
        if self._taken >= WINDOW_BYTES // 2 and not self._choked and not self.over:
            self._stream.send(ROOM, self._number, self._taken)
            self._held -= self._taken
            self._taken = 0

    def room(self, size: int) -> None:
        """The agent can take so many bytes more."""
        self._credit += size
        if self._credit > WINDOW_BYTES:
            raise TunnelError("more room than there was at first")
        self.read_or_not()

    def end(self) -> None:
        """Nothing more comes from the client."""
        self._client_ended = True
        if self._transport is not None and not self._transport.is_closing():
            self._end_writing()
        self._end_if_over()

    def _end_writing(self) -> None:
        assert self._transport is not None
        if self._transport.can_write_eof():
            self._transport.write_eof()
        elif not self._target_ended:
            self._drain = asyncio.get_running_loop().call_later(_TLS_DRAIN_S, self._transport.close)

    # ------------------------------------------------------------------------------------------------- ends

    @property
    def _tls(self) -> bool:
        return self._transport is not None and self._transport.get_extra_info("sslcontext") is not None

    def _end_if_over(self) -> None:
        if self._client_ended and self._target_ended and not self.over:
            self._finish()
            if self._transport is not None:
                self._transport.close()

    def fail(self, why: str) -> None:
        """It cannot go on: the client is told by a reset, the operator and the user by `why`."""
        if not self.over:
            self.tunnel.failed(why)
            self._reset()

    def _reset(self) -> None:
        self._stream.send(RESET, self._number)
        self.drop()

    def drop(self) -> None:
        """Break off, without a word to the agent."""
        if self.over:
            return
        self._finish()
        if self._transport is not None:
            self._transport.abort()

    def _finish(self) -> None:
        self.over = True
        self._early.clear()
        if self.connecting is not None:
            self.connecting.cancel()
        if self._drain is not None:
            self._drain.cancel()
        self._stream.forget(self._number, self)
        self._stream.load.open -= 1
        self.tunnel.open_connections -= 1
        self.tunnel.meter.open.dec()


class TunnelStream(asyncio.Protocol):
    """The connection to one agent. lookup: the tunnel on a port. connect: connects a relay to its target.

    `lost` is set when the connection has ended.
    """

    def __init__(self, sandbox_id: str, lookup: Callable[[int], Tunnel | None], connect: Connect,
                 timeout_s: float, load: Load) -> None:  # fmt: skip
        self._sandbox_id = sandbox_id
        self._lookup = lookup
        self._connect = connect
        self._timeout_s = timeout_s
        self.load = load
        self._cutter = Cutter()
        self._transport: asyncio.Transport | None = None
        self._relays: dict[int, Relay] = {}
        self.full = False
        self.stalled: set[Relay] = set()
        self.lost = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=_UNSENT_BYTES)
        self.send(START)

    def data_received(self, data: bytes) -> None:
        try:
            for kind, number, value, payload in self._cutter.feed(data):
                self._received(kind, number, value, payload)
        except TunnelError as error:
            _log.warning(
                "an agent broke the tunnels' protocol, they are closed: %s",
                error,
                extra={"sandbox_id": self._sandbox_id},
            )
            self.close()

    def _received(self, kind: int, number: int, value: int, payload: bytes) -> None:
        relay = self._relays.get(number)
        if kind == OPEN:
            self._open(number, value)
        elif kind == FULL:
            tunnel = self._lookup(value)
            if tunnel is not None:
                tunnel.failed(f"refused: {MAX_LINKS} connections of the sandbox are open")
        elif kind == START:
            raise TunnelError("an agent does not start")
        elif relay is None:
            return
        elif kind == DATA:
            relay.give(payload)
        elif kind == ROOM:
            relay.room(value)
        elif kind == END:
            relay.end()
        elif kind == RESET:
            relay.drop()

    def _open(self, number: int, port: int) -> None:
        if number in self._relays or len(self._relays) >= MAX_LINKS:
            raise TunnelError("a number that is taken, or too many connections")
        tunnel = self._lookup(port)
        if tunnel is None:
            self.send(RESET, number)
            return
        if self.load.open >= self.load.limit:
            tunnel.failed(f"refused: the service carries {self.load.limit} connections of all sandboxes")
            self.send(RESET, number)
            return
        self.load.open += 1
        tunnel.total_connections += 1
        tunnel.open_connections += 1
        tunnel.meter.connections.inc()
        tunnel.meter.open.inc()
        relay = self._relays[number] = Relay(self, number, tunnel)
        relay.connecting = asyncio.get_running_loop().create_task(self._connect_relay(relay))

    async def _connect_relay(self, relay: Relay) -> None:
        why = ""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._connect(relay.tunnel, relay)
        except TimeoutError:
            why = f"no connection to the target within {self._timeout_s:g} s"
        except ssl.SSLError as error:
            why = f"the target's TLS cannot be used: {error.reason or error}; see SSL_CERT_FILE for its authority"
        except OSError as error:
            why = f"no connection to the target: {error}"
        except UnicodeError:
            why = "no connection to the target: its host is not a valid name"
        finally:
            relay.connecting = None
        if why:
            relay.fail(why)

    def send(self, kind: int, number: int = 0, value: int = 0, payload: bytes | memoryview = b"") -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join((HEAD.pack(kind, number, value), payload)))

    def pause_writing(self) -> None:
        self.full = True

    def resume_writing(self) -> None:
        self.full = False
        stalled, self.stalled = self.stalled, set()
        for relay in stalled:
            relay.read_or_not()

    def forget(self, number: int, relay: Relay) -> None:
        self.stalled.discard(relay)
        self._relays.pop(number, None)

    def drop_tunnel(self, tunnel: Tunnel) -> None:
        """Break its connections."""
        for relay in [relay for relay in self._relays.values() if relay.tunnel is tunnel]:
            relay.drop()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_lost(self, _error: Exception | None) -> None:
        self._transport = None
        for relay in list(self._relays.values()):
            relay.drop()
        self.lost.set()
