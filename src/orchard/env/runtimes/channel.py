"""The orchestrator's end of the agent protocol, over asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

from orchard.env.agent.wire import FrameReader, WireError, frame
from orchard.env.errors import AgentUnreachable
from orchard.env.runtimes.answers import checked


class AgentProtocolChannel(asyncio.Protocol):
    """One connection to an agent: any number of requests at once, answered in any order.

    `on_lost` is called once when the connection ends for any reason but `close`.
    """

    def __init__(self, sandbox_id: str, on_lost: Callable[[], None] | None = None) -> None:
        self._sandbox_id = sandbox_id
        self._on_lost = on_lost
        self._reader = FrameReader()
        self._pending: dict[int, asyncio.Future[tuple[dict[str, Any], bytes]]] = {}
        self._next_id = 0
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._writable = asyncio.Event()
        self._writable.set()
        self._closing = False

    @property
    def closed(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    async def call(self, op: str, payload: bytes = b"", /, **args: Any) -> tuple[dict[str, Any], bytes]:
        """One request and its answer; see `orchard.env.runtimes.base.AgentChannel`."""
        transport = self._transport
        if transport is None or transport.is_closing():
            raise self._unreachable()
        if not self._writable.is_set():
            await self._writable.wait()
        self._next_id += 1
        request_id = self._next_id
        future: asyncio.Future[tuple[dict[str, Any], bytes]] = self._loop.create_future()
        self._pending[request_id] = future
        args["id"] = request_id
        args["op"] = op
        transport.write(frame(args, payload))
        try:
            header, answered = await future
        finally:
            # An answer that comes after its caller was cancelled is dropped in `data_received`.
            self._pending.pop(request_id, None)
        return checked(op, header, answered, args), answered

    def hand_over(self, protocol: asyncio.Protocol) -> None:
        """Let `protocol` have the connection. To be called before the agent sends anything but answers."""
        transport = self._transport
        if transport is None or transport.is_closing():
            raise self._unreachable()
        self._closing, self._transport = True, None
        transport.set_protocol(protocol)
        protocol.connection_made(transport)

    async def close(self) -> None:
        self._closing = True
        if self._transport is not None:
            self._transport.abort()

    # ------------------------------------------------------------------------------------ asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not checked by isinstance: uvloop's transports are none of asyncio's classes.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            frames = self._reader.feed(data)
        except WireError:
            if self._transport is not None:
                self._transport.abort()
            return
        for header, payload in frames:
            number = header.get("id")
            future = self._pending.get(number) if type(number) is int else None
            if future is not None and not future.done():
                future.set_result((header, payload))

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._writable.set()
        pending, self._pending = self._pending, {}
        for future in pending.values():
            if not future.done():
                future.set_exception(self._unreachable())
        if self._on_lost is not None and not self._closing:
            self._on_lost()

    def _unreachable(self) -> AgentUnreachable:
        return AgentUnreachable(
            f"the connection to the agent of sandbox {self._sandbox_id} is gone; look at the sandbox"
        )
