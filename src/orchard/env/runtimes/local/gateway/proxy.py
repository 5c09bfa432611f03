"""Carries connections of sandboxes to the names that they may reach, both ways, piece by piece."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import struct
import time

from orchard.env.runtimes.local.gateway.denials import Denials, Refusal
from orchard.env.runtimes.local.gateway.inspection import Inspection, Refused
from orchard.env.runtimes.local.gateway.listening import BACKLOG
from orchard.env.runtimes.local.gateway.policies import Policy
from orchard.env.runtimes.local.gateway.upstream import Forbidden, Unreachable, Upstream

#: Of one sandbox; and when half of what the process can hold is taken, so that a few cannot starve the others.
MAX_CONNECTIONS = 1024
FEW_CONNECTIONS = 64
_FILES_EACH = 2
_PIECE_BYTES = 64 << 10
_GOODBYE_S = 2.0
_ORIGINAL_DST = 80
_RESET = struct.pack("ii", 1, 0)


class Proxy:
    """For the sandboxes in `policies` (by address)."""

    def __init__(self, policies: dict[str, Policy], denials: Denials, upstream: Upstream) -> None:
        self._policies = policies
        self._denials = denials
        self._upstream = upstream
        self._open = 0
        self._plenty = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // _FILES_EACH // 2

    async def start(self, tcp: socket.socket) -> None:
        await asyncio.start_server(self._serve, sock=tcp, limit=_PIECE_BYTES, backlog=BACKLOG)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if await self._connection(reader, writer):
                writer.close()
        except (OSError, RuntimeError, asyncio.CancelledError):
            # Cancelled: the list does not allow it any more, or the sandbox is gone.
            pass
        finally:
            _cut(writer)

    def _limit(self) -> int:
        return MAX_CONNECTIONS if self._open < self._plenty else FEW_CONNECTIONS

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Whether all was said, both ways, that there was to say."""
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        destination, port = _original_destination(sock)
        source = writer.get_extra_info("peername")[0]
        policy = self._policies.get(source)
        if policy is None:
            return False
        name = policy.name_of(destination)

        def refuse(reason: str, address: str = destination) -> None:
            refusal = Refusal("tcp", reason, address, name, port)
            self._denials.refused(source, refusal, time.monotonic())

        if name is None:
            refuse("the address stands for no name on the list; look the name up again")
        elif not policy.allows(name, port):
            refuse("the list does not have this port of the name")
        elif len(policy.connections) >= (limit := self._limit()):
            refuse(f"{limit} connections to names at once are the most")
        else:
            task = asyncio.current_task()
            policy.connections[task] = (name, port)
            self._open += 1
            try:
                await self._carry(reader, writer, name, port)
                return True
            except Refused as refused:
                refuse(refused.reason)
                return await _say_goodbye(reader, writer, refused.goodbye)
            except Forbidden as error:
                refuse(str(error), error.address)
            except Unreachable:
                pass  # not refused, but not there: the client sees its connection end
            finally:
                del policy.connections[task]
                self._open -= 1
        return False

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, name: str, port: int
    ) -> None:
        up_reader, up_writer = await self._upstream.connect(name, port)
        up_writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        inspection = Inspection(name)
        ways = [
            asyncio.ensure_future(_out(reader, up_writer, inspection)),
            asyncio.ensure_future(_back(up_reader, writer, up_writer, inspection)),
        ]
        try:
            # The first failure ends both ways; an end of one of them does not.
            await asyncio.gather(*ways)
            up_writer.close()
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            _cut(up_writer)


async def _out(reader: asyncio.StreamReader, server: asyncio.StreamWriter, inspection: Inspection) -> None:
    while data := await reader.read(_PIECE_BYTES):
        if passed := inspection.client_said(data):
            server.write(passed)
            await server.drain()
    if rest := inspection.client_ended():
        server.write(rest)
    await _end(server)


async def _back(
    reader: asyncio.StreamReader,
    client: asyncio.StreamWriter,
    server: asyncio.StreamWriter,
    inspection: Inspection,
) -> None:
    while data := await reader.read(_PIECE_BYTES):
        if released := inspection.server_said(data):
            server.write(released)
        client.write(data)
        await client.drain()
    await _end(client)


async def _end(writer: asyncio.StreamWriter) -> None:
    """Say no more this way, once all is sent."""
    writer.write_eof()
    while writer.transport.get_write_buffer_size():
        # Only an empty buffer is an end: what is left would be lost with the connection.
        writer.transport.set_write_buffer_limits(high=0)
        await writer.drain()


async def _say_goodbye(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, goodbye: bytes) -> bool:
    """Let the client read why, before the connection ends; whether it did."""
    if not goodbye:
        return False
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(_GOODBYE_S):
            writer.write(goodbye)
            writer.write_eof()
            while await reader.read(_PIECE_BYTES):
                pass
            return True
    return False


def _cut(writer: asyncio.StreamWriter) -> None:
    """Reset it, unless it is closing as usual: the other side must not take what it has for all there was."""
    transport = writer.transport
    if transport.is_closing():
        return
    with contextlib.suppress(OSError, AttributeError):
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    transport.abort()


def _original_destination(sock: socket.socket) -> tuple[str, int]:
    port, address = struct.unpack_from("!2xH4s", sock.getsockopt(socket.SOL_IP, _ORIGINAL_DST, 16))
    return socket.inet_ntoa(address), port
