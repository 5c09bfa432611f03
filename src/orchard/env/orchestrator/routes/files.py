"""Routes about files and patches in a sandbox."""

from __future__ import annotations

import base64
import json
from typing import Annotated, Any

from fastapi import Query
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from orchard.env.contract import (
    FileContent,
    FileListing,
    FileRemoved,
    FileStat,
    FileWritten,
    MakeDirectory,
    MoveFile,
    Ok,
    PatchRequest,
    PatchResult,
    WriteFile,
    mode_bits,
)
from orchard.env.errors import InvalidRequest
from orchard.env.orchestrator.patches import encode_patch
from orchard.env.orchestrator.responses import from_validation, json_of
from orchard.env.orchestrator.routes.base import errors, orchestrator, principal, read_body, router

routes = router("files")
FilePath = Annotated[
    str, Query(description="inside the sandbox; relative ones start at its working directory")
]


@routes.post("/sandboxes/{sandbox_id}/files", response_model=FileWritten, responses=errors(400, 404, 409, 413),
             summary="Write a file")  # fmt: skip
async def write(request: Request, sandbox_id: str, body: WriteFile) -> Response:
    """Replaces the file in one step, and makes the directories on the way."""
    service = orchestrator(request)
    sandbox = await service.catalog.ready_one(principal(request), sandbox_id)
    size = await service.files.write(sandbox, body.path, body.content, mode_bits(body.mode))
    service.metrics.file_bytes["in"].observe(size)
    return json_of({"success": True, "path": body.path, "size": size})


@routes.get("/sandboxes/{sandbox_id}/files", response_model=FileContent, responses=errors(400, 404, 409, 413),
            summary="Read a file")  # fmt: skip
async def read(request: Request, sandbox_id: str, path: FilePath) -> Response:
    service = orchestrator(request)
    sandbox = await service.catalog.ready_one(principal(request), sandbox_id)
    data = await service.files.read(sandbox, path)
    service.metrics.file_bytes["out"].observe(len(data))
    return json_of({"path": path, "content": base64.b64encode(data).decode("ascii"), "size": len(data)})


@routes.get("/sandboxes/{sandbox_id}/files/list", response_model=FileListing, responses=errors(400, 404, 409),
            summary="List a directory")  # fmt: skip
async def list_directory(request: Request, sandbox_id: str, path: FilePath = "/") -> Response:
    service = orchestrator(request)
    sandbox = await service.catalog.ready_one(principal(request), sandbox_id)
    return json_of(await service.files.list(sandbox, path))


@routes.delete("/sandboxes/{sandbox_id}/files", response_model=FileRemoved, responses=errors(400, 404, 409),
               summary="Remove a file or directory")  # fmt: skip
async def remove(
    request: Request,
    sandbox_id: str,
    path: FilePath,
    recursive: Annotated[bool, Query(description="with everything in it")] = False,
) -> Response:
    """A link is removed itself. A directory that is not empty is 409 unless `recursive`."""
    service = orchestrator(request)
    sandbox = await service.catalog.ready_one(principal(request), sandbox_id)
    await service.files.remove(sandbox, path, recursive)
    return json_of({"status": "deleted", "path": path})


@routes.get("/sandboxes/{sandbox_id}/files/stat", response_model=FileStat, responses=errors(400, 404, 409),
            summary="Look at one file or directory")  # fmt: skip
async def stat(
    request: Request,
    sandbox_id: str,
    path: FilePath,
    follow: Annotated[bool, Query(description="of a link, what it leads to")] = False,
) -> Response:
    service = orchestrator(request)
    sandbox = await service.catalog.ready_one(principal(request), sandbox_id)
    found = await service.files.stat(sandbox, path, follow)
    del found["modified_ns"]
    return json_of(found)


@routes.post("/sandboxes/{sandbox_id}/files/mkdir", response_model=Ok, responses=errors(400, 404, 409),
             summary="Make a directory")  # fmt: skip
async def mkdir(request: Request, sandbox_id: str, body: MakeDirectory) -> Response:
    """409 when it exists, unless `parents` and it is a directory."""
    service = orchestrator(request)
    sandbox = await service.catalog.ready_one(principal(request), sandbox_id)
    await service.files.mkdir(sandbox, body.path, body.parents, mode_bits(body.mode))
    return json_of({"status": "ok"})


@routes.post("/sandboxes/{sandbox_id}/files/move", response_model=Ok, responses=errors(400, 404, 409),
             summary="Move a file or directory")  # fmt: skip
async def move(request: Request, sandbox_id: str, body: MoveFile) -> Response:
    """In one step; links are moved themselves. The directories on the way to `target` are made. 409 when it exists,
    unless `overwrite`."""
    service = orchestrator(request)
    sandbox = await service.catalog.ready_one(principal(request), sandbox_id)
    await service.files.move(sandbox, body.source, body.target, body.overwrite)
    return json_of({"status": "ok"})


@routes.post("/sandboxes/{sandbox_id}/apply_patch", response_model=PatchResult,
             responses=errors(400, 404, 409, 413), summary="Apply a patch",
             openapi_extra={"requestBody": {"required": True, "content": {"application/json": {
                 "schema": {"$ref": "#/components/schemas/PatchRequest"}}}}})  # fmt: skip
async def apply_patch(request: Request, sandbox_id: str) -> Response:
    """By `git apply` in a git work tree, else by `patch`; `success` tells whether it went in."""
    body, patch = _parse_patch(await read_body(request.scope, request.receive))
    service = orchestrator(request)
    sandbox = await service.catalog.ready_one(principal(request), sandbox_id)
    return json_of(await service.patches.apply(sandbox, body, patch))


def _parse_patch(raw: bytes) -> tuple[PatchRequest, bytes]:
    """The request and the patch's bytes. JSON text can hold lone surrogates, which stand for bytes that are no
    UTF-8; models refuse them, so the patch itself is taken out before."""
    try:
        fields: Any = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"body: not valid JSON: {error}") from None
    patch = fields.get("patch") if isinstance(fields, dict) else None
    if isinstance(patch, str) and patch:
        fields["patch"] = "-"
    try:
        body = PatchRequest.model_validate(fields)
    except ValidationError as error:
        raise from_validation(error) from None
    return body, encode_patch(patch or "")
