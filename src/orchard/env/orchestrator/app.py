"""The application factory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from orchard.env.contract import API_VERSION, KEY_HEADER, PatchRequest
from orchard.env.errors import OrchardError
from orchard.env.orchestrator.middleware import Edge
from orchard.env.orchestrator.orchestrator import Orchestrator
from orchard.env.orchestrator.responses import error_response, from_http, from_validation
from orchard.env.orchestrator.routes import files, jobs, sandboxes, service
from orchard.env.orchestrator.routes.base import LeanRoute
from orchard.env.orchestrator.settings import ServiceSettings
from orchard.env.orchestrator.stores.base import Store
from orchard.env.runtimes.base import Runtime


def create_app(settings: ServiceSettings, runtime: Runtime, store: Store) -> FastAPI:
    """The service as an ASGI application; its lifespan starts and stops the orchestrator (`app.state.orchestrator`).

    Raises `SettingsError` for keys that cannot be used.
    """
    orchestrator = Orchestrator(settings, runtime, store)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        await orchestrator.start()
        try:
            yield
        finally:
            await orchestrator.stop()

    app = FastAPI(title="Orchard", version=API_VERSION, lifespan=lifespan, redirect_slashes=False,
                  description="Sandboxes for agents: create, run commands, move files.")  # fmt: skip
    app.state.orchestrator = orchestrator
    app.router.route_class = LeanRoute
    # Most frequent first: routes are tried in order.
    for routes in (sandboxes.routes, jobs.routes, files.routes, service.routes):
        app.router.routes.extend(routes.routes)
    app.add_exception_handler(OrchardError, _orchard_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_middleware(Edge, keys=orchestrator.keys, metrics=orchestrator.metrics)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


async def _orchard_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, OrchardError)
    return error_response(error)


async def _validation_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return error_response(from_validation(error))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return error_response(from_http(request, error))


def _openapi(app: FastAPI) -> dict[str, Any]:
    """FastAPI's document, with the key that routes need and the one body that it cannot see."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        components = schema.setdefault("components", {})
        components.setdefault("schemas", {})["PatchRequest"] = PatchRequest.model_json_schema()
        components["securitySchemes"] = {"key": {"type": "apiKey", "in": "header", "name": KEY_HEADER}}
        for path, operations in schema["paths"].items():
            if path not in service.PUBLIC_PATHS:
                for operation in operations.values():
                    operation["security"] = [{"key": []}]
        app.openapi_schema = schema
    return app.openapi_schema
