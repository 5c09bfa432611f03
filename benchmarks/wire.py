"""A raw HTTP/1.1 client as lean as possible: it shares the cores with the service that it measures.

One request at a time on each kept-alive connection; answers must carry Content-Length.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any, cast
from urllib.parse import urlsplit

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


class BenchError(RuntimeError):
    """Something did not answer as it has to; a measurement of it would mean nothing."""


class Connection(asyncio.Protocol):
    """One kept-alive connection."""

    def __init__(self, head: bytes) -> None:
        self._head = head
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._buffer = b""
        self._end = 0
        self._body = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not of asyncio's classes.
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._answer and not self._answer.done():
            self._answer.set_exception(BenchError(f"connection lost: {exc or 'closed by the service'}"))

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not self._end:
            self._find_end()
        if self._end and len(self._buffer) >= self._end and self._answer and not self._answer.done():
            body = self._buffer[self._body : self._end]
            status = int(self._buffer[9:12])
            self._buffer, self._end = b"", 0
            self._answer.set_result((status, body))

    def _find_end(self) -> None:
        head_end = self._buffer.find(b"\r\n\r\n")
        if head_end < 0:
            return
        found = _LENGTH.search(self._buffer, 0, head_end)
        if not found:
            raise BenchError(f"an answer without Content-Length: {self._buffer[:head_end]!r}")
        self._body = head_end + 4
        self._end = self._body + int(found[1])

    async def request(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """Status and body."""
        if self._transport is None:
            raise BenchError("connection lost")
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(
            b"%s %s HTTP/1.1\r\n%scontent-length: %d\r\n\r\n%s"
            % (method.encode(), path.encode(), self._head, len(body), body)
        )
        return await self._answer

    async def json(self, method: str, path: str, payload: Any = None) -> Any:
        """The decoded body of an answer below 300; BenchError otherwise."""
        status, body = await self.request(
            method, path, b"" if payload is None else json.dumps(payload).encode()
        )
        if status >= 300:
            raise BenchError(f"{method} {path}: HTTP {status} {body[:300]!r}")
        return json.loads(body)

    def close(self) -> None:
        if self._transport:
            self._transport.close()


class Address:
    """Where to connect, and the headers of every request."""

    def __init__(self, base_url: str, api_key: str) -> None:
        parts = urlsplit(base_url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        lines = [f"host: {parts.netloc}", f"x-api-key: {api_key}", "content-type: application/json", ""]
        self._head = "\r\n".join(lines).encode()

    async def connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: Connection(self._head), self._host, self._port)
        return connection

    async def connect_many(self, count: int) -> list[Connection]:
        return [await self.connect() for _ in range(count)]
