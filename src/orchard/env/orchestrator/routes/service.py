"""Routes about the service itself."""

from __future__ import annotations

from importlib import metadata

from starlette.requests import Request
from starlette.responses import Response

from orchard.env.contract import Health, Resources, ServiceInfo
from orchard.env.errors import Overloaded
from orchard.env.orchestrator.metrics import CONTENT_TYPE
from orchard.env.orchestrator.responses import json_of
from orchard.env.orchestrator.routes.base import errors, orchestrator, router

#: Need no key.
PUBLIC_PATHS = frozenset({"/", "/health", "/ready", "/metrics", "/docs", "/redoc", "/openapi.json"})

routes = router("service")


def package_version() -> str:
    """The version of the installed distribution."""
    try:
        return metadata.version("orchard-agents")
    except metadata.PackageNotFoundError:
        return "0+unknown"


@routes.get("/", response_model=ServiceInfo, summary="What this is")
async def service_info(request: Request) -> Response:
    return json_of({"service": "orchard", "version": package_version(), "status": "running"})


@routes.get("/health", response_model=Health, summary="Whether the process serves")
async def health(request: Request) -> Response:
    return json_of({"status": "healthy"})


@routes.get("/ready", response_model=Health, responses=errors(), summary="Whether it takes work")
async def ready(request: Request) -> Response:
    if not orchestrator(request).running:
        raise Overloaded("the service is starting or stopping; try again in a moment", retry_after_s=1.0)
    return json_of({"status": "ready"})


@routes.get("/metrics", summary="Prometheus metrics", response_class=Response,
            responses={200: {"content": {"text/plain": {}}}})  # fmt: skip
async def metrics(request: Request) -> Response:
    return Response(orchestrator(request).metrics.text(), headers={"content-type": CONTENT_TYPE})


@routes.get("/resources", response_model=Resources, responses=errors(), summary="Capacity and use")
async def resources(request: Request) -> Response:
    return json_of(await orchestrator(request).resources())
