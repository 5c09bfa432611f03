"""What a service with neighbours answers on its port: its own work itself, others' through them, lists of all."""

from __future__ import annotations

import logging
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orchard.env.contract import API_VERSION, VERSION_HEADER
from orchard.env.errors import OrchardError, Unauthorized
from orchard.env.orchestrator.auth import Principal
from orchard.env.orchestrator.replicas import following, gather
from orchard.env.orchestrator.replicas.household import Household
from orchard.env.orchestrator.replicas.sockets import COME_AGAIN
from orchard.env.orchestrator.responses import error_response

_log = logging.getLogger(__name__)
_VERSION = (VERSION_HEADER.lower().encode(), API_VERSION.encode())
_TOGETHER = {
    ("GET", "/sandboxes"): gather.listing,
    ("DELETE", "/sandboxes"): gather.deletion,
    ("GET", "/resources"): gather.resources,
    ("GET", "/events"): following.events,
}


class Front:
    """The ASGI application of a service that shares its state directory with others."""

    def __init__(self, household: Household) -> None:
        self._household = household
        self.state = household.app.state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def send_noted(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await (await self._way(scope))(scope, receive, send_noted)
        except OrchardError as error:
            if started:
                # Left without its end, the answer breaks off with its connection.
                _log.warning("an answer is cut off: %s", error)
                return
            if scope["type"] != "http":
                await send({"type": "websocket.close", "code": COME_AGAIN})
                return
            answer = error_response(error)
            answer.raw_headers.append(_VERSION)
            await answer(scope, receive, send)

    async def _way(self, scope: Scope) -> ASGIApp:
        """The application that answers a request."""
        own = self._household.app
        _, first, *rest = scope["path"].split("/", 3) if scope["path"].startswith("/") else ("", "")
        name = rest[0] if rest else ""
        if first == "sandboxes" and name and not (name == "batch" and len(rest) == 1):
            if name in self._household.orchestrator.catalog.live:
                return own
            if scope["type"] == "http" and self._principal(scope) is None:
                return own
            return self._to(await self._household.neighbours.sandbox(name))
        if scope["type"] != "http":
            return own
        if first == "jobs" and name:
            principal = self._principal(scope)
            if principal is None:
                return own
            return self._to(await self._household.neighbours.job(principal, name))
        together = _TOGETHER.get((scope["method"], scope["path"]))
        if together is None or self._principal(scope) is None:
            return own
        household = self._household

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            await together(household, scope, receive, send)

        return answer

    def _to(self, number: int | None) -> ASGIApp:
        if number is None or number == self._household.number:
            return self._household.app
        return self._household.neighbours.way_to(number)

    def _principal(self, scope: Scope) -> Principal | None:
        """Who calls; None for somebody whom our own application has to refuse."""
        headers: dict[bytes, Any] = dict(scope["headers"])
        try:
            return self._household.orchestrator.keys.principal(headers.get(b"x-api-key"))
        except Unauthorized:
            return None
