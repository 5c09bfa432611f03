"""Routes about sandboxes: their life, and commands and patches in them."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Annotated, Any

from fastapi import Query
from starlette.requests import Request
from starlette.responses import Response

from orchard.env.contract import (
    BatchCreate,
    BatchResult,
    CreateSandbox,
    Deleted,
    DeletedMany,
    ExecRequest,
    Heartbeat,
    Job,
    JobList,
    JobQueued,
    PatchSandbox,
    SandboxInfo,
    SandboxList,
    SandboxLogs,
    SandboxStats,
    SandboxStatus,
    Seconds,
    SessionList,
)
from orchard.env.errors import InvalidRequest, OrchardError, SandboxTimeout
from orchard.env.orchestrator.audit import SANDBOXES
from orchard.env.orchestrator.auth import Principal
from orchard.env.orchestrator.catalog import MAX_CURSOR, parse_labels
from orchard.env.orchestrator.identity import Elsewhere, encoded
from orchard.env.orchestrator.logging import request_id
from orchard.env.orchestrator.orchestrator import Orchestrator
from orchard.env.orchestrator.replicas.collect import collect, passed_on
from orchard.env.orchestrator.responses import Json, json_of
from orchard.env.orchestrator.routes.base import errors, orchestrator, principal, router

routes = router("sandboxes")

Labels = Annotated[list[str], Query(alias="label", description="`name=value`; several must all match")]


@routes.post("/sandboxes/{sandbox_id}/exec", response_model=Job | JobQueued, tags=["commands"],
             responses=errors(400, 404, 409, 413), summary="Run a command")  # fmt: skip
async def execute(request: Request, sandbox_id: str, body: ExecRequest) -> Response:
    """With `wait` the whole job when it has finished, else `{job_id, status: "queued"}` once it is accepted."""
    service = orchestrator(request)
    sandbox = await service.catalog.ready_one(principal(request), sandbox_id)

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    return Json(await service.execution.execute(sandbox, body, disconnected))


@routes.post(
    "/sandboxes", response_model=SandboxInfo, responses=errors(403, 409, 413, 429), summary="Create a sandbox"
)
async def create(request: Request, body: CreateSandbox, wait: Seconds | None = None) -> Response:
    """Answers at once, with status `pending`; GET …/wait tells when it is ready. With `wait`, a number of seconds, it
    answers when the sandbox is ready or has failed to start, or when they are over, with what it is then. The same
    `sandbox_id` or `idempotency_key` with the same body is the same sandbox; with another body it is a 409."""
    service = orchestrator(request)
    try:
        sandbox = await service.lifecycle.create(principal(request), body)
    except Elsewhere as other:
        return await passed_on(other.app, request.scope, encoded(body))
    request.scope[SANDBOXES] = [sandbox.sandbox_id]
    if wait is not None:
        with suppress(SandboxTimeout):
            await service.lifecycle.wait_ready(sandbox, wait)
    return json_of(service.describe(sandbox))


@routes.post(
    "/sandboxes/batch", response_model=BatchResult, responses=errors(413), summary="Create many sandboxes"
)
async def create_many(request: Request, body: BatchCreate) -> Response:
    """Each entry as POST /sandboxes would answer it, in the same order: a sandbox or an error."""
    service, caller = orchestrator(request), principal(request)
    results = await asyncio.gather(
        *(_create_one(request, service, caller, entry) for entry in body.sandboxes)
    )
    request.scope[SANDBOXES] = [entry["sandbox"]["sandbox_id"] for entry in results if entry["sandbox"]]
    return json_of({"results": results})


async def _create_one(
    request: Request, service: Orchestrator, caller: Principal, body: CreateSandbox
) -> dict[str, Any]:
    try:
        sandbox = await service.lifecycle.create(caller, body)
    except Elsewhere as other:
        answer = await collect(other.app, {**request.scope, "path": "/sandboxes"}, encoded(body))
        made = answer.status == 200
        return {"sandbox": answer.json() if made else None, "error": None if made else answer.json()}
    except OrchardError as error:
        return {"sandbox": None, "error": error.body(request_id.get())}
    return {"sandbox": service.describe(sandbox), "error": None}


@routes.get("/sandboxes", response_model=SandboxList, responses=errors(), summary="List sandboxes")
async def list_all(
    request: Request,
    label: Labels = [],  # noqa: B006 - FastAPI copies it
    status: Annotated[list[SandboxStatus], Query(description="default: the live ones")] = [],  # noqa: B006
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
    cursor: Annotated[str | None, Query(max_length=MAX_CURSOR)] = None,
) -> Response:
    """Those you may see, in order of creation. Ended ones only when their status is asked for."""
    service = orchestrator(request)
    page, following = service.catalog.page(
        principal(request), parse_labels(label), set(status), limit, cursor
    )
    return json_of({"sandboxes": service.describe_all(page), "next_cursor": following})


@routes.delete("/sandboxes", response_model=DeletedMany, responses=errors(), summary="Delete by label")
async def delete_many(request: Request, label: Labels = []) -> Response:  # noqa: B006
    """All live ones with these labels. Without a label nothing is deleted and the answer is 422."""
    service = orchestrator(request)
    labels = parse_labels(label)
    if not labels:
        raise InvalidRequest(
            "name at least one label=name=value: deleting everything needs to be asked for one by one"
        )
    doomed = list(service.catalog.select(principal(request), labels, set()))
    request.scope[SANDBOXES] = [sandbox.sandbox_id for sandbox in doomed]
    outcomes = await asyncio.gather(*map(service.lifecycle.delete, doomed), return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return json_of({"status": "deleted", "sandbox_ids": [sandbox.sandbox_id for sandbox in doomed]})


@routes.get(
    "/sandboxes/{sandbox_id}", response_model=SandboxInfo, responses=errors(404), summary="One sandbox"
)
async def get(request: Request, sandbox_id: str) -> Response:
    """One that failed to start is still there, with `status` failed and its `reason`; one that has ended is a 404
    with code `sandbox_dead` or `sandbox_deleted`."""
    service = orchestrator(request)
    sandbox = await service.catalog.get(principal(request), sandbox_id)
    if (error := sandbox.gone()) is not None and not sandbox.never_ready:
        raise error
    return json_of(service.describe(sandbox))


@routes.get("/sandboxes/{sandbox_id}/wait", response_model=SandboxInfo, responses=errors(404, 408),
            summary="Wait until ready")  # fmt: skip
async def wait(request: Request, sandbox_id: str, timeout: Seconds | None = None) -> Response:  # noqa: ASYNC109
    """Returns when it is ready or has failed to start (`status` tells); 408 when `timeout` seconds are over first.
    Without `timeout`, it waits as long as the sandbox may take to become ready."""
    service = orchestrator(request)
    sandbox = await service.catalog.get(principal(request), sandbox_id)
    await service.lifecycle.wait_ready(sandbox, timeout)
    return json_of(service.describe(sandbox))


@routes.delete(
    "/sandboxes/{sandbox_id}", response_model=Deleted, responses=errors(404), summary="Delete a sandbox"
)
async def delete(request: Request, sandbox_id: str) -> Response:
    """Returns when nothing of it is left. Repeating is fine; while it is pending, it is cancelled."""
    service = orchestrator(request)
    sandbox = await service.catalog.get(principal(request), sandbox_id)
    await service.lifecycle.delete(sandbox)
    return json_of({"status": "deleted", "sandbox_id": sandbox.sandbox_id})


@routes.patch(
    "/sandboxes/{sandbox_id}",
    response_model=SandboxInfo,
    responses=errors(404, 409),
    summary="Change a sandbox",
)
async def change(request: Request, sandbox_id: str, body: PatchSandbox) -> Response:
    """`ttl_seconds` counts anew from now; `labels` replaces all labels; `allow_egress` is all that it may reach from
    the answer on, and cuts connections to anything else. It cannot be taken back to no list at all."""
    service = orchestrator(request)
    sandbox = await service.catalog.live_one(principal(request), sandbox_id)
    await service.lifecycle.change(sandbox, body)
    return json_of(service.describe(sandbox))


@routes.post("/sandboxes/{sandbox_id}/heartbeat", response_model=Heartbeat, responses=errors(404),
             summary="Renew the lease")  # fmt: skip
async def heartbeat(request: Request, sandbox_id: str) -> Response:
    """The first one begins the lease, unless it was asked for at creation."""
    service = orchestrator(request)
    sandbox = await service.catalog.live_one(principal(request), sandbox_id)
    expires_at = await service.lifecycle.heartbeat(sandbox)
    return json_of({"status": "ok", "sandbox_id": sandbox.sandbox_id, "lease_expires_at": expires_at})


@routes.get("/sandboxes/{sandbox_id}/jobs", response_model=JobList, tags=["commands"], responses=errors(404, 409),
            summary="Its commands")  # fmt: skip
async def list_jobs(request: Request, sandbox_id: str) -> Response:
    """Queued, running and recently finished ones, without their output: GET /jobs/{id} has that."""
    service = orchestrator(request)
    sandbox = await service.catalog.ready_one(principal(request), sandbox_id)
    return Json(await service.jobs.listing(sandbox))


@routes.get("/sandboxes/{sandbox_id}/sessions", response_model=SessionList, tags=["commands"],
            responses=errors(404, 409), summary="Its sessions")  # fmt: skip
async def list_sessions(request: Request, sandbox_id: str) -> Response:
    """Named shells, oldest first; a session begins with the first command that names it."""
    service = orchestrator(request)
    sandbox = await service.catalog.ready_one(principal(request), sandbox_id)
    header, _ = await service.agents.call(sandbox, "sessions")
    return json_of({"sessions": header["sessions"]})


@routes.delete("/sandboxes/{sandbox_id}/sessions/{name}", response_model=Deleted, tags=["commands"],
               responses=errors(404, 409), summary="Forget a session")  # fmt: skip
async def delete_session(request: Request, sandbox_id: str, name: str) -> Response:
    """The next command of that name begins anew. One that is not there is fine; a command that runs goes on."""
    service = orchestrator(request)
    sandbox = await service.catalog.ready_one(principal(request), sandbox_id)
    await service.agents.call(sandbox, "end_session", name=name)
    return json_of({"status": "deleted", "sandbox_id": sandbox.sandbox_id})


@routes.get("/sandboxes/{sandbox_id}/stats", response_model=SandboxStats, responses=errors(404, 409),
            summary="What it uses")  # fmt: skip
async def stats(request: Request, sandbox_id: str) -> Response:
    service = orchestrator(request)
    sandbox = await service.catalog.ready_one(principal(request), sandbox_id)
    return json_of(await service.stats(sandbox))


@routes.get(
    "/sandboxes/{sandbox_id}/logs", response_model=SandboxLogs, responses=errors(404), summary="Its log"
)
async def logs(request: Request, sandbox_id: str) -> Response:
    """Lines of its lifecycle and of its agent; also of one that failed to start."""
    service = orchestrator(request)
    sandbox = await service.catalog.get(principal(request), sandbox_id)
    if (error := sandbox.gone()) is not None and not sandbox.never_ready:
        raise error
    lines = await service.logs(sandbox)
    return json_of({"sandbox_id": sandbox.sandbox_id, "lines": lines})
