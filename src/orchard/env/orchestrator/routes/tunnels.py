"""Routes about tunnels: ports inside a sandbox that lead to targets of the operator."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path
from starlette.requests import Request
from starlette.responses import Response

from orchard.env.contract import Deleted, OpenTunnel, TunnelInfo, TunnelList
from orchard.env.orchestrator.responses import json_of
from orchard.env.orchestrator.routes.base import errors, orchestrator, principal, router

routes = router("tunnels")


@routes.get("/sandboxes/{sandbox_id}/tunnels", response_model=TunnelList, responses=errors(404, 409),
            summary="Its tunnels")  # fmt: skip
async def list_tunnels(request: Request, sandbox_id: str) -> Response:
    """In order of their ports, with what came through them and what went wrong last."""
    service = orchestrator(request)
    sandbox = await service.catalog.ready_one(principal(request), sandbox_id)
    return json_of({"tunnels": service.tunnels.listing(sandbox)})


@routes.post("/sandboxes/{sandbox_id}/tunnels", response_model=TunnelInfo, responses=errors(400, 404, 409),
             summary="Open a tunnel")  # fmt: skip
async def open_tunnel(request: Request, sandbox_id: str, body: OpenTunnel) -> Response:
    """User code reaches the target at `url` when this answers, whether or not the network is blocked. A tunnel that is
    there already, with the same `listen_port` and target, is answered as it is."""
    service = orchestrator(request)
    sandbox = await service.catalog.ready_one(principal(request), sandbox_id)
    service.tunnels.check(principal(request), [body])
    (opened,) = await service.tunnels.open(sandbox, [body])
    return json_of(opened)


@routes.delete("/sandboxes/{sandbox_id}/tunnels/{listen_port}", response_model=Deleted, responses=errors(404, 409),
               summary="Close a tunnel")  # fmt: skip
async def close_tunnel(
    request: Request, sandbox_id: str, listen_port: Annotated[int, Path(ge=1, le=65535)]
) -> Response:
    """Nothing listens on the port any more, and connections through it are reset. One that is not there is fine."""
    service = orchestrator(request)
    sandbox = await service.catalog.ready_one(principal(request), sandbox_id)
    await service.tunnels.close(sandbox, listen_port)
    return json_of({"status": "deleted", "sandbox_id": sandbox.sandbox_id})
