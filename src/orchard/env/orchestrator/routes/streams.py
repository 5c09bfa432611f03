"""The output of a command as it is written: server-sent events, or plain bytes of one stream."""

from __future__ import annotations

import base64
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import Query
from starlette.requests import Request
from starlette.responses import Response

from orchard.env.contract import StreamName
from orchard.env.errors import Conflict, InvalidRequest, OrchardError
from orchard.env.orchestrator.responses import Stream, error_event, json_bytes
from orchard.env.orchestrator.responses import events as sse
from orchard.env.orchestrator.routes.base import (
    EVENT_STREAM,
    errors,
    event_schema,
    orchestrator,
    principal,
    router,
)
from orchard.env.orchestrator.streaming import Ended, Gap, Happening, Piece, Silence

routes = router("commands")

Offset = Annotated[int, Query(ge=0)]
#: Asked for at once: events are made of pieces of this size, so that a reader sees them in good time.
_EVENT_BYTES = 512 << 10
_RAW_BYTES = 1 << 20
_OFFSET_HEADER = "X-Orchard-Offset"


_CONTENT = {
    EVENT_STREAM: {"schema": event_schema({"type": "object"})},
    "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
}


_ANSWER: dict[int | str, dict[str, Any]] = {
    200: {"description": "Events, or with `raw` the bytes", "content": _CONTENT}
}


@routes.get("/jobs/{job_id}/stream", summary="Follow a command's output", response_class=Response,
            responses={**_ANSWER, **errors(404, 409)})  # fmt: skip
async def stream(
    request: Request,
    job_id: str,
    stdout_offset: Offset | None = None,
    stderr_offset: Offset | None = None,
    raw: StreamName | None = None,
) -> Response:
    """Server-sent events from the given offsets on (default 0) until the command has ended: `stdout` and `stderr`
    `{offset, data}` with data in base64, `gap {stream, from, to}` for bytes that are not kept any more, `keepalive`,
    and last `exit {job}`. Each event's id says where to go on: send it back as `Last-Event-ID`.

    With `raw=stdout` or `raw=stderr` the plain bytes of that stream, from its offset on or the first byte that is still
    kept (`X-Orchard-Offset` tells which); when bytes are lost on the way, the connection breaks.
    """
    service = orchestrator(request)
    job = await service.jobs.find(principal(request), job_id)
    offsets = {"stdout": stdout_offset or 0, "stderr": stderr_offset or 0}
    if raw is not None:
        happenings = service.streams.follow(job, {raw.value: offsets[raw.value]}, _RAW_BYTES)
        return await _raw(happenings, offsets[raw.value])
    last = request.headers.get("last-event-id")
    if last is not None and stdout_offset is None and stderr_offset is None:
        offsets = _after(last)
    happenings = service.streams.follow(job, offsets, _EVENT_BYTES)
    return sse(_events(happenings, dict(offsets)))


def _after(event_id: str) -> dict[str, int]:
    stdout, _, stderr = event_id.partition("-")
    if (
        not (stdout.isascii() and stdout.isdigit() and stderr.isascii() and stderr.isdigit())
        or len(event_id) > 40
    ):
        raise InvalidRequest("Last-Event-ID must be the id of an event of this stream")
    return {"stdout": int(stdout), "stderr": int(stderr)}


async def _events(happenings: AsyncGenerator[Happening], at: dict[str, int]) -> AsyncGenerator[bytes, None]:
    yield b"retry: 1000\n\n"
    try:
        async with aclosing(happenings):
            async for happening in happenings:
                yield _event(happening, at)
    except OrchardError as error:
        yield error_event(error)


def _event(happening: Happening, at: dict[str, int]) -> bytes:
    match happening:
        case Piece(stream, offset, data):
            at[stream] = offset + len(data)
            # Put together by hand: base64 needs no escaping, and there is much of it.
            text = b'{"offset":%d,"data":"%s"}' % (offset, base64.b64encode(data))
            return b"event: %s\nid: %d-%d\ndata: %s\n\n" % (stream.encode(), at["stdout"], at["stderr"], text)
        case Gap(stream, start, end):
            at[stream] = end
            fields = json_bytes({"stream": stream, "from": start, "to": end})
            return b"event: gap\nid: %d-%d\ndata: %s\n\n" % (at["stdout"], at["stderr"], fields)
        case Ended(record):
            return b'event: exit\ndata: {"job":%s}\n\n' % record.json()
        case Silence():
            return b"event: keepalive\ndata: {}\n\n"


async def _raw(happenings: AsyncGenerator[Happening], offset: int) -> Response:
    """Begins with the first bytes, or when there are none for a while."""
    first = await anext(happenings)
    if isinstance(first, Gap):
        offset = first.end
        first = await anext(happenings)

    async def body() -> AsyncGenerator[bytes, None]:
        async with aclosing(happenings):
            happening = first
            while not isinstance(happening, Ended):
                if isinstance(happening, Gap):
                    raise Conflict(f"bytes {happening.start} to {happening.end} are not kept any more")
                if isinstance(happening, Piece):
                    yield happening.data
                happening = await anext(happenings)

    return Stream(body(), "application/octet-stream", headers={_OFFSET_HEADER: str(offset)})
