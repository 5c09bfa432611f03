"""Routes about commands by their job id."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from orchard.env.contract import Job, Ok, Seconds, SignalRequest, StdinRequest
from orchard.env.orchestrator.responses import Json, json_of
from orchard.env.orchestrator.routes.base import errors, orchestrator, principal, router

routes = router("commands")


@routes.get("/jobs/{job_id}", response_model=Job, responses=errors(404), summary="One command")
async def get(request: Request, job_id: str) -> Response:
    """As it stands now; with its output once it has finished."""
    return Json(await orchestrator(request).jobs.look(principal(request), job_id))


@routes.get(
    "/jobs/{job_id}/wait", response_model=Job, responses=errors(404, 408), summary="Wait for a command"
)
async def wait(request: Request, job_id: str, timeout: Seconds | None = None) -> Response:  # noqa: ASYNC109 - the contract's name
    """Returns when it has finished; 408 when `timeout` seconds are over first."""
    return Json(await orchestrator(request).jobs.wait(principal(request), job_id, timeout))


@routes.delete("/jobs/{job_id}", response_model=Job, responses=errors(404), summary="Cancel a command")
async def cancel(request: Request, job_id: str) -> Response:
    """Stops everything that it started (SIGTERM, its grace, SIGKILL) and returns it. Finished ones stay as they are."""
    return Json(await orchestrator(request).jobs.cancel(principal(request), job_id))


@routes.post(
    "/jobs/{job_id}/signal", response_model=Ok, responses=errors(404, 409), summary="Signal a command"
)
async def signal(request: Request, job_id: str, body: SignalRequest) -> Response:
    await orchestrator(request).jobs.signal(principal(request), job_id, body)
    return json_of({"status": "ok"})


@routes.post(
    "/jobs/{job_id}/stdin", response_model=Ok, responses=errors(404, 409), summary="Input for a command"
)
async def stdin(request: Request, job_id: str, body: StdinRequest) -> Response:
    """For one started with `stdin_open`. Returns when there is room for the bytes."""
    await orchestrator(request).jobs.stdin(principal(request), job_id, body)
    return json_of({"status": "ok"})
