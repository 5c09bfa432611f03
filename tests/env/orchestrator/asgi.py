"""Requests to the application in this process, without a socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from starlette.types import ASGIApp, Message


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    def expect(self, status: int = 200) -> Any:
        assert self.status == status, f"HTTP {self.status}, not {status}: {self.body[:1000]!r}"
        return self.json


class Caller:
    """Sends requests with one key. `hang_up` at a request, once set, is the client going away; with `more` the body
    is only its beginning."""

    def __init__(self, app: ASGIApp, key: str | None = "admin-key") -> None:
        self.app = app
        self._key = key

    async def __call__(
        self, method: str, target: str, body: Any = None, *, headers: dict[str, str] | None = None,
        hang_up: asyncio.Event | None = None, more: bool = False,
    ) -> Reply:  # fmt: skip
        path, _, query = target.partition("?")
        sent = {"host": "127.0.0.1:8000", "content-type": "application/json", **(headers or {})}
        if self._key is not None:
            sent["x-api-key"] = self._key
        raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        scope = {
            "type": "http", "http_version": "1.1", "method": method, "path": unquote(path), "raw_path": path.encode(),
            "query_string": query.encode(), "headers": [(k.encode(), v.encode()) for k, v in sent.items()],
            "root_path": "", "scheme": "http", "server": ("127.0.0.1", 8000), "client": ("127.0.0.1", 1), "state": {},
        }  # fmt: skip
        incoming = [{"type": "http.request", "body": raw, "more_body": more}]
        out: list[Message] = []

        async def receive() -> Message:
            if incoming:
                return incoming.pop()
            await (hang_up or asyncio.Event()).wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            out.append(message)

        await self.app(scope, receive, send)
        start, *rest = out
        found = {k.decode(): v.decode() for k, v in start["headers"]}
        return Reply(start["status"], found, b"".join(part["body"] for part in rest))

    async def get(self, target: str, **options: Any) -> Reply:
        return await self("GET", target, **options)

    async def post(self, target: str, body: Any = None, **options: Any) -> Reply:
        return await self("POST", target, body, **options)

    async def delete(self, target: str) -> Reply:
        return await self("DELETE", target)

    async def until(self, target: str, settled: Callable[[Reply], bool]) -> Reply:
        """GET until the answer is as wanted; an assertion error after ten seconds."""
        async with asyncio.timeout(10):
            while True:
                reply = await self.get(target)
                if settled(reply):
                    return reply
                await asyncio.sleep(0.01)

    async def ready(self, sandbox_id: str = "box", **fields: Any) -> str:
        """A ready sandbox's id."""
        (await self.post("/sandboxes", {"image": "x", "sandbox_id": sandbox_id, **fields})).expect()
        info = (await self.get(f"/sandboxes/{sandbox_id}/wait")).expect()
        assert info["status"] == "ready", info
        return sandbox_id

    async def run(self, sandbox_id: str, command: Any, **fields: Any) -> Any:
        """The finished job."""
        body = {"command": command, "wait": True, **fields}
        return (await self.post(f"/sandboxes/{sandbox_id}/exec", body)).expect()
