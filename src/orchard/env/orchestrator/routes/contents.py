"""Routes for files and trees of any size: bodies are bytes, and no more than a few pieces of them are in memory."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import Query
from starlette.requests import Request
from starlette.responses import Response

from orchard.env.contract import ArchiveWritten, FileChange, FileWritten, OctalMode, mode_bits
from orchard.env.errors import OrchardError
from orchard.env.orchestrator.responses import Stream, error_event, events, json_bytes, json_of
from orchard.env.orchestrator.routes.base import errors, orchestrator, principal, read_stream, router
from orchard.env.orchestrator.routes.files import FilePath

routes = router("files")
BYTES = "application/octet-stream"
TAR = "application/x-tar"
#: A reader of changes that takes nothing for this long is dropped.
_STALL_S = 30.0


def _body(media_type: str) -> dict[str, Any]:
    content = {media_type: {"schema": {"type": "string", "format": "binary"}}}
    return {"requestBody": {"required": True, "content": content}}


def _answer(media_type: str, *statuses: int) -> dict[int | str, dict[str, Any]]:
    content = {media_type: {"schema": {"type": "string", "format": "binary"}}}
    return {200: {"description": "The bytes", "content": content}, **errors(*statuses)}


@routes.put("/sandboxes/{sandbox_id}/files/content", response_model=FileWritten,
            responses=errors(400, 404, 409, 507), summary="Write a file from bytes", openapi_extra=_body(BYTES))  # fmt: skip
async def write(
    request: Request,
    sandbox_id: str,
    path: FilePath,
    mode: Annotated[OctalMode | None, Query(description="permission bits in octal, such as 0755")] = None,
) -> Response:
    """The body is the content, of any size. The file is replaced in one step when it has ended; an upload that breaks
    off leaves nothing. The directories on the way are made."""
    service = orchestrator(request)
    sandbox = await service.catalog.ready_one(principal(request), sandbox_id)
    size = await service.files.write_stream(sandbox, path, read_stream(request.receive), mode=mode_bits(mode))
    return json_of({"success": True, "path": path, "size": size})


@routes.get("/sandboxes/{sandbox_id}/files/content", response_class=Response, responses=_answer(BYTES, 400, 404, 409),
            summary="Read a file as bytes")  # fmt: skip
async def read(request: Request, sandbox_id: str, path: FilePath) -> Response:
    """The content, of any size, with its Content-Length. When the sandbox ends meanwhile, or the file is replaced or
    gets shorter, the connection breaks instead."""
    service = orchestrator(request)
    sandbox = await service.catalog.ready_one(principal(request), sandbox_id)
    content = await service.files.open(sandbox, path)
    return Stream(aiter(content), BYTES, content.size)


@routes.put("/sandboxes/{sandbox_id}/archive", response_model=ArchiveWritten,
            responses=errors(400, 404, 409, 507), summary="Unpack a tar archive", openapi_extra=_body(TAR))  # fmt: skip
async def unpack(request: Request, sandbox_id: str, path: FilePath) -> Response:
    """The body is an uncompressed tar archive (ustar, pax, GNU) of what shall be in the directory `path`: files,
    directories, symbolic links and hard links (which become files of their own), with modes and times, not owners.
    Names that are absolute or hold `..`, links that lead outside, devices, and entries below a link are refused with
    `archive_invalid`. A directory that does not exist yet appears whole at the end; one that does is filled file by
    file."""
    service = orchestrator(request)
    sandbox = await service.catalog.ready_one(principal(request), sandbox_id)
    counts = await service.archives.unpack(sandbox, path, read_stream(request.receive))
    return json_of({"success": True, "path": path, **counts})


@routes.get("/sandboxes/{sandbox_id}/archive", response_class=Response, responses=_answer(TAR, 400, 404, 409),
            summary="A directory as a tar archive")  # fmt: skip
async def pack(request: Request, sandbox_id: str, path: FilePath) -> Response:
    """What is in the directory `path`, as a pax archive of any size. Links stay links, wherever they lead; sockets,
    FIFOs and devices are left out."""
    service = orchestrator(request)
    sandbox = await service.catalog.ready_one(principal(request), sandbox_id)
    return Stream(service.archives.pack(sandbox, path), TAR)


@routes.get("/sandboxes/{sandbox_id}/files/watch", response_class=Response, responses={
                200: {"model": FileChange, "description": "text/event-stream of FileChange"}, **errors(400, 404, 409)},
            summary="Follow changes of files")  # fmt: skip
async def watch(
    request: Request,
    sandbox_id: str,
    path: FilePath,
    recursive: Annotated[bool, Query(description="of a directory, all below it too")] = False,
) -> Response:
    """Server-sent events about a file, or what is in a directory. The first is `open`: from there on nothing is missed.
    `gap` says that changes came faster than they were read; the rest is in `FileChange`. A comment comes every 10 s when
    nothing happens. It ends when what is watched is gone (after `removed`), or with an event `error` when the sandbox
    is. Links are not followed into; at most 8,192 directories are watched."""
    service = orchestrator(request)
    sandbox = await service.catalog.ready_one(principal(request), sandbox_id)
    return events(_told(service.files.watch(sandbox, path, recursive)), _STALL_S)


async def _told(changes: AsyncGenerator[list[dict[str, Any]], None]) -> AsyncGenerator[bytes, None]:
    begun = False
    try:
        async with aclosing(changes):
            async for several in changes:
                begun = True
                parts = [
                    b"event: %s\ndata: %s\n\n" % (each["type"].encode(), json_bytes(each)) for each in several
                ]
                yield b"".join(parts) or b": keepalive\n\n"
    except OrchardError as error:
        if not begun:
            raise
        yield error_event(error)
