"""A request to an application, wherever it runs, and its whole answer."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Scope

from orchard.env.orchestrator.responses import Json

#: Of an answer that is passed on; the rest is of the connection it came by, or is added here.
_KEPT_HEADERS = (b"retry-after",)


@dataclass(slots=True)
class Collected:
    """An answer. status: 0 when there was none."""

    status: int = 0
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    body: bytes = b""

    def json(self) -> Any:
        return json.loads(self.body)

    def response(self) -> Response:
        answer = Json(self.body, self.status)
        answer.raw_headers.extend((name, value) for name, value in self.headers if name in _KEPT_HEADERS)
        return answer


async def collect(app: ASGIApp, scope: Scope, body: bytes = b"") -> Collected:
    """Ask `app` what `scope` asks, with another body."""
    headers = [(name, value) for name, value in scope["headers"] if name != b"content-length"]
    asked = {
        **scope,
        "raw_path": scope["path"].encode(),
        "headers": [*headers, (b"content-length", b"%d" % len(body))],
    }
    found = Collected()
    parts: list[bytes] = []
    incoming: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if incoming:
            return incoming.pop()
        # The caller is there until it has the answer.
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            found.status, found.headers = message["status"], list(message["headers"])
        elif message["type"] == "http.response.body":
            parts.append(message.get("body", b""))

    await app(asked, receive, send)
    found.body = b"".join(parts)
    return found


async def passed_on(app: ASGIApp, scope: Scope, body: bytes) -> Response:
    """The answer of another application to the same request."""
    return (await collect(app, scope, body)).response()
