"""The application factory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.types import Receive, Scope, Send

from orchard.env.contract import API_VERSION, KEY_HEADER, PatchRequest
from orchard.env.orchestrator.metrics import Metrics
from orchard.env.orchestrator.middleware import Edge
from orchard.env.orchestrator.orchestrator import Orchestrator
from orchard.env.orchestrator.routes import (
    contents,
    events,
    files,
    images,
    jobs,
    pty,
    sandboxes,
    service,
    streams,
    tunnels,
)
from orchard.env.orchestrator.routes.base import EVENT_STREAM, LeanRoute, event_schema
from orchard.env.orchestrator.settings import ServiceSettings
from orchard.env.orchestrator.stores.base import Store
from orchard.env.runtimes.base import Runtime


class Service(FastAPI):
    """FastAPI for routing and documentation. A request goes from the edge straight to the router: the edge does
    what the usual stack of middleware is for, in a fifth of its time."""

    edge: Edge

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope["app"] = self
            await self.edge(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            self.openapi_schema = _openapi(self)
        return self.openapi_schema


def create_app(
    settings: ServiceSettings, runtime: Runtime, store: Store, metrics: Metrics | None = None
) -> Service:
    """The service as an ASGI application; its lifespan starts and stops the orchestrator (`app.state.orchestrator`).

    Raises `SettingsError` for keys that cannot be used.
    """
    orchestrator = Orchestrator(settings, runtime, store, metrics)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        await orchestrator.start()
        try:
            yield
        finally:
            await orchestrator.stop()

    app = Service(title="Orchard", version=API_VERSION, lifespan=lifespan, redirect_slashes=False,
                  description="Sandboxes for agents: create, run commands, move files.")  # fmt: skip
    app.state.orchestrator = orchestrator
    app.edge = Edge(
        app.router, orchestrator.keys, orchestrator.metrics, orchestrator.audit, orchestrator.tracing
    )
    app.router.route_class = LeanRoute
    # Most frequent first: routes are tried in order.
    own = [
        route
        for part in (sandboxes, jobs, files, contents, streams, tunnels, images, events, service, pty)
        for route in part.routes.routes
    ]
    app.router.routes[:0] = own
    return app


def _openapi(app: FastAPI) -> dict[str, Any]:
    """FastAPI's document, with the key that routes need, the one body that it cannot see, and streams as what they
    are."""
    schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    components = schema.setdefault("components", {})
    components.setdefault("schemas", {})["PatchRequest"] = PatchRequest.model_json_schema()
    components["securitySchemes"] = {"key": {"type": "apiKey", "in": "header", "name": KEY_HEADER}}
    for path, operations in schema["paths"].items():
        if path not in service.PUBLIC_PATHS:
            for operation in operations.values():
                operation["security"] = [{"key": []}]
        for operation in operations.values():
            _name_stream(operation["responses"].get("200", {}))
    return schema


def _name_stream(answer: dict[str, Any]) -> None:
    """FastAPI takes every model for a JSON body; that of an event stream is what the data of its events are."""
    if answer.get("description", "").startswith(EVENT_STREAM):
        data = answer["content"].pop("application/json")["schema"]
        answer["content"][EVENT_STREAM] = {"schema": event_schema(data)}
