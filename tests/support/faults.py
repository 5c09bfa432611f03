"""A proxy that loses answers, cuts connections or answers 503, between a client and a real service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum

import aiohttp
from aiohttp import web

#: Headers of one connection, which the next one has of its own.
_HOPS = ("host", "content-length", "transfer-encoding", "expect")


class Fault(StrEnum):
    """What happens to one request."""

    NONE = "none"
    #: forwarded, its answer lost and the connection cut
    LOST_ANSWER = "lost answer"
    #: forwarded, the answer replaced by 502
    BAD_GATEWAY = "bad gateway"
    #: not forwarded, answered 503 with Retry-After
    OVERLOADED = "overloaded"
    #: not forwarded, the connection cut
    CUT = "cut"


@dataclass
class Proxy:
    """`decide(method, path, n)` names the fault of the n-th request of that method and path (from 0)."""

    decide: Callable[[str, str, int], Fault] = lambda _method, _path, _n: Fault.NONE
    seen: list[tuple[str, str]] = field(default_factory=list)
    base_url: str = ""

    def count(self, method: str, part: str) -> int:
        """Requests of `method` whose path contains `part`."""
        return sum(m == method and part in p for m, p in self.seen)


@asynccontextmanager
async def faulty_proxy(target: str) -> AsyncIterator[Proxy]:
    """A proxy to `target` on a free port of this loop."""
    proxy = Proxy()

    async def handle(request: web.Request) -> web.StreamResponse:
        number = proxy.seen.count((request.method, request.path))
        proxy.seen.append((request.method, request.path))
        fault = proxy.decide(request.method, request.path, number)
        if fault is Fault.OVERLOADED:
            body = {"detail": "busy", "code": "overloaded", "retryable": True, "request_id": "x"}
            return web.json_response(body, status=503, headers={"Retry-After": "0"})
        if fault is Fault.CUT:
            _cut(request)
        body_bytes = await request.read()
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _HOPS}
        url = target + request.path_qs
        async with session.request(request.method, url, data=body_bytes or None, headers=headers) as answer:
            content = await answer.read()
        if fault is Fault.LOST_ANSWER:
            _cut(request)
        if fault is Fault.BAD_GATEWAY:
            return web.Response(status=502, text="bad gateway")
        kept = {
            k: v
            for k, v in answer.headers.items()
            if k.lower() not in ("content-length", "transfer-encoding", "date", "server")
        }
        return web.Response(status=answer.status, body=content, headers=kept)

    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{tail:.*}", handle)
    runner = web.AppRunner(app, shutdown_timeout=1)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        proxy.base_url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[attr-defined]
        try:
            yield proxy
        finally:
            await runner.cleanup()


def _cut(request: web.Request) -> None:
    transport = request.transport
    if transport is not None:
        with suppress(OSError):
            transport.abort()  # type: ignore[attr-defined]
    raise asyncio.CancelledError
