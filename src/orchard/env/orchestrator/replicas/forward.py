"""Requests passed on to the service that holds a seat: bodies both ways as they come, and WebSockets.

When that service dies, the request waits until another one has taken the seat. It is then sent again if nothing of the
answer is out and a repeat does nothing twice: reads, deletions, and commands, which get a job id on the way if they
have none. For the rest it is told that nobody knows whether it was done.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
from starlette.types import Message, Receive, Scope, Send
from yarl import URL

from orchard.env.errors import InfrastructureError, OrchardError
from orchard.env.orchestrator.replicas.lines import Lines, Waiting
from orchard.env.orchestrator.replicas.sockets import CLIENT_HEADER, COME_AGAIN, STOPPING_HEADER
from orchard.env.orchestrator.routes.base import MAX_FILE_BODY_BYTES, read_body

#: Of one connection, not of what goes over it.
_HOP = frozenset(
    (b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"te", b"trailer", b"expect",
     b"proxy-connection", b"proxy-authorization", b"proxy-authenticate", CLIENT_HEADER)
)  # fmt: skip
_SOCKET_HEADERS = frozenset(
    (b"sec-websocket-key", b"sec-websocket-version", b"sec-websocket-extensions", b"sec-websocket-protocol")
)
_REPEATABLE_METHODS = frozenset(("GET", "HEAD", "DELETE", "PATCH", "OPTIONS"))
_REPEATABLE_POSTS = ("/exec", "/heartbeat", "/files", "/sandboxes")


class _Unsent(Exception):
    """Nobody was there to take the request."""


class _Broken(Exception):
    """The connection broke, or the service was stopping, before anything of the answer was out."""


class CutOff(InfrastructureError):
    """Half an answer is out: only breaking the connection tells that it is not whole."""


class Forwarder:
    """The application of a seat, wherever that is held."""

    def __init__(self, lines: Lines, number: int) -> None:
        self._lines = lines
        self._number = number

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self._pass_socket(scope, receive, send)
            return
        request = _Request(scope, receive)
        await request.read()
        wait: Waiting | None = None
        while True:
            app = self._lines.apps().get(self._number)
            if app is not None:
                await app(request.scope, request.receive, send)
                return
            try:
                await self._once(request, send)
                return
            except _Broken as broken:
                if not request.repeatable:
                    raise _unknown_outcome() from broken
                wait = Waiting(self._lines, self._number)
            except _Unsent:
                wait = wait or Waiting(self._lines, self._number)
            if not await wait.again():
                # Nothing is recorded there any more: any service can say so.
                await next(iter(self._lines.apps().values()))(request.scope, request.receive, send)
                return

    async def _once(self, request: _Request, send: Send) -> None:
        exchange = asyncio.ensure_future(self._exchange(request, send))
        gone = asyncio.ensure_future(request.until_gone())
        try:
            await asyncio.wait({exchange, gone}, return_when=asyncio.FIRST_COMPLETED)
            if exchange.done():
                exchange.result()
        finally:
            # When the client has gone, so has its request: the connection to the other service is closed.
            for task in (exchange, gone):
                task.cancel()
            await asyncio.wait({exchange, gone})

    async def _exchange(self, request: _Request, send: Send) -> None:
        started = False
        try:
            async with self._lines.session(self._number).request(
                request.scope["method"],
                _url(request.scope),
                headers=_headers(request.scope, _HOP),
                data=request.data(),
                allow_redirects=False,
            ) as answer:
                if STOPPING_HEADER.decode() in answer.headers and request.repeatable:
                    raise _Broken
                headers = [
                    (name.lower(), value) for name, value in answer.raw_headers if name.lower() not in _HOP
                ]
                started = True
                await send({"type": "http.response.start", "status": answer.status, "headers": headers})
                async for piece in answer.content.iter_any():
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except aiohttp.ClientConnectorError as error:
            raise _Unsent from error
        except (aiohttp.ClientError, OSError) as error:
            if started:
                raise CutOff("the service that gave an answer is gone") from error
            raise _Broken from error

    # --------------------------------------------------------------------------------------- WebSockets

    async def _pass_socket(self, scope: Scope, receive: Receive, send: Send) -> None:
        wait = Waiting(self._lines, self._number)
        while True:
            app = self._lines.apps().get(self._number)
            if app is not None:
                await app(scope, receive, send)
                return
            try:
                there = await self._lines.session(self._number).ws_connect(
                    _url(scope),
                    headers=_headers(scope, _HOP | _SOCKET_HEADERS),
                    protocols=scope["subprotocols"],
                    max_msg_size=0,
                )
                break
            except aiohttp.WSServerHandshakeError:
                await send({"type": "websocket.close", "code": 1011})
                return
            except (aiohttp.ClientError, OSError):
                # Nothing was said yet: trying again is always fine.
                try:
                    there_is_hope = await wait.again()
                except OrchardError:
                    there_is_hope = False
                if not there_is_hope:
                    await send({"type": "websocket.close", "code": COME_AGAIN})
                    return
        async with there:
            await receive()
            await send({"type": "websocket.accept", "subprotocol": there.protocol})
            await _both_ways(there, receive, send)


async def _both_ways(there: aiohttp.ClientWebSocketResponse, receive: Receive, send: Send) -> None:
    async def outwards() -> None:
        while True:
            message = await receive()
            if message["type"] == "websocket.disconnect":
                await there.close(code=message.get("code") or 1005)
                return
            try:
                if message.get("text") is not None:
                    await there.send_str(message["text"])
                else:
                    await there.send_bytes(message.get("bytes") or b"")
            except (aiohttp.ClientError, OSError):
                return

    async def inwards() -> None:
        async for message in there:
            if message.type is aiohttp.WSMsgType.TEXT:
                await send({"type": "websocket.send", "text": message.data})
            elif message.type is aiohttp.WSMsgType.BINARY:
                await send({"type": "websocket.send", "bytes": message.data})
        code = there.close_code
        lost = code is None or code in (1005, 1006)
        await send({"type": "websocket.close", "code": COME_AGAIN if lost else code})

    tasks = {asyncio.ensure_future(outwards()), asyncio.ensure_future(inwards())}
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


class _Request:
    """A request that can be sent again, if what it asks for allows that. scope: as it is passed on."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self.scope = scope
        self._receive = receive
        method, path = scope["method"], scope["path"]
        self.repeatable = method in _REPEATABLE_METHODS or (
            method == "POST" and path.endswith(_REPEATABLE_POSTS)
        )
        self._body: bytes | None = None
        self._sent = asyncio.Event()

    async def read(self) -> None:
        """Hold the body of one that may be sent again. Raises `TooLarge`."""
        if not self.repeatable:
            return
        self._body = await read_body(self.scope, self._receive, MAX_FILE_BODY_BYTES)
        if self.scope["path"].endswith("/exec") and self.scope["method"] == "POST":
            self._body = _with_job_id(self._body)
            headers = [(name, value) for name, value in self.scope["headers"] if name != b"content-length"]
            length = (b"content-length", b"%d" % len(self._body))
            self.scope = {**self.scope, "headers": [*headers, length]}
        self._sent.set()

    def data(self) -> bytes | AsyncIterator[bytes] | None:
        if self._body is not None:
            return self._body or None
        headers = dict(self.scope["headers"])
        if b"content-length" not in headers and b"transfer-encoding" not in headers:
            self._sent.set()
            return None
        return self._pieces()

    async def _pieces(self) -> AsyncIterator[bytes]:
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self._sent.set()
                raise ConnectionError("the client went away during its upload")
            if body := message.get("body", b""):
                yield body
            if not message.get("more_body"):
                self._sent.set()
                return

    async def receive(self) -> Message:
        """For an application of this process."""
        if self._body is None:
            return await self._receive()
        if self._sent.is_set():
            self._sent.clear()
            return {"type": "http.request", "body": self._body, "more_body": False}
        return await self._receive()

    async def until_gone(self) -> None:
        """Returns when the client has gone, after its request was passed on."""
        await self._sent.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass


def _with_job_id(body: bytes) -> bytes:
    """A command that can be asked for again. What is no proper request is left for the service to refuse."""
    try:
        fields: Any = json.loads(body)
    except (ValueError, RecursionError):
        return body
    if not isinstance(fields, dict) or fields.get("job_id") is not None:
        return body
    fields["job_id"] = "job-" + os.urandom(8).hex()
    return json.dumps(fields).encode()


def _url(scope: Scope) -> URL:
    path = (scope.get("raw_path") or scope["path"].encode()).decode("latin-1").partition("?")[0]
    query = scope["query_string"].decode("latin-1")
    return URL(f"http://seat{path}" + (f"?{query}" if query else ""), encoded=True)


def _headers(scope: Scope, without: frozenset[bytes]) -> list[tuple[str, str]]:
    headers = [
        (name.decode("latin-1"), value.decode("latin-1"))
        for name, value in scope["headers"]
        if name not in without
    ]
    client = scope.get("client")
    if client:
        headers.append((CLIENT_HEADER.decode(), str(client[0])))
    return headers


def _unknown_outcome() -> InfrastructureError:
    error = InfrastructureError(
        "the service that holds the sandbox died while it worked on this; nobody knows whether it was done: look, then"
        " ask again"
    )
    error.retryable = False
    return error
