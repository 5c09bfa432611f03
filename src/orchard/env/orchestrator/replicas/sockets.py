"""The socket of a seat: the service itself, for requests that another service passes on, and a few questions that only
services ask each other. Nobody but the service's own user can reach it."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orchard.env.errors import NotFound
from orchard.env.orchestrator.auth import Principal, Role
from orchard.env.orchestrator.lifecycle import stopping
from orchard.env.orchestrator.orchestrator import Orchestrator
from orchard.env.orchestrator.replicas.seats import SOCKET
from orchard.env.orchestrator.responses import error_response, json_of

#: Who sent a request that is passed on, for the audit log.
CLIENT_HEADER = b"x-orchard-client"
#: Marks a refusal of a service that is about to end: another one will have the seat soon.
STOPPING_HEADER = b"x-orchard-stopping"
QUESTIONS = "/-/"
_TRY_AGAIN = 503
#: The close code of a WebSocket whose service is gone.
COME_AGAIN = 1012


class SeatApp:
    """A seat's application as its socket serves it."""

    def __init__(self, app: ASGIApp, orchestrator: Orchestrator) -> None:
        self._app = app
        self._orchestrator = orchestrator

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(QUESTIONS):
            query = {name: values[0] for name, values in parse_qs(scope["query_string"].decode()).items()}
            try:
                answer = json_of(await ask(self._orchestrator, scope["path"].removeprefix(QUESTIONS), query))
            except NotFound as error:
                answer = error_response(error)  # type: ignore[assignment]
            await answer(scope, receive, send)
            return
        if not self._orchestrator.running:
            await _refuse(scope, receive, send)
            return
        for name, value in scope["headers"]:
            if name == CLIENT_HEADER:
                scope["client"] = (value.decode("latin-1"), 0)

        async def send_marked(message: Message) -> None:
            refused = message["type"] == "http.response.start" and message["status"] == _TRY_AGAIN
            if refused and not self._orchestrator.running:
                message["headers"].append((STOPPING_HEADER, b"1"))
            await send(message)

        await self._app(scope, receive, send_marked)


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    """What comes over a connection from before, while the service ends."""
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": COME_AGAIN})
        return
    answer = error_response(stopping("nothing was done"))
    answer.raw_headers.append((STOPPING_HEADER, b"1"))
    await answer(scope, receive, send)


async def ask(orchestrator: Orchestrator, question: str, query: dict[str, str]) -> dict[str, Any]:
    """What one seat knows: `sandbox` and `job` (whether it has that one), `use` of an owner, and `taken`, which tells
    it of a creation elsewhere."""
    match question:
        case "sandbox":
            return {"found": await orchestrator.catalog.find(query["id"]) is not None}
        case "job":
            principal = Principal(query["owner"], Role(query["role"]))
            return {"found": await orchestrator.jobs.known(principal, query["id"])}
        case "use":
            use = orchestrator.catalog.use_of(query["owner"])
            return {
                "sandboxes": use.sandboxes,
                "cpu_millionths": use.cpu_millionths,
                "memory_bytes": use.memory_bytes,
                "live": len(orchestrator.catalog.live),
            }
        case "taken":
            orchestrator.lifecycle.admission.taken(query["owner"], int(query["per_minute"]))
            return {}
    raise NotFound(f"services of this version do not know the question {question:.40}")


def listen(folder: Path, backlog: int) -> socket.socket:
    """The listening socket of a seat."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    draft = f"{SOCKET}.new"
    try:
        (folder / draft).unlink(missing_ok=True)
        # The path of the directory may be longer than an address can be.
        listener.bind(f"/proc/self/fd/{descriptor}/{draft}")
        (folder / draft).chmod(0o600)
        listener.listen(backlog)
        (folder / draft).rename(folder / SOCKET)
    except BaseException:
        listener.close()
        raise
    finally:
        os.close(descriptor)
    return listener
