"""Following a command's output over connections that may break: each one goes on where the last one ended."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

from pydantic import ValidationError

from orchard.env.client.results import JobResult, OutputChunk, OutputGap
from orchard.env.client.retry import Backoff
from orchard.env.client.sse import EventParser
from orchard.env.client.transport import Query, Transport, path_of
from orchard.env.contract import StreamName
from orchard.env.errors import BY_CODE, ConnectionFailed, InfrastructureError, InternalError, OrchardError

#: The service says something at least every ten seconds.
_SILENCE_S = 45.0


async def follow(
    transport: Transport, job_id: str, stdout_offset: int, stderr_offset: int
) -> AsyncIterator[OutputChunk | OutputGap | JobResult]:
    """What the command writes from the offsets on; last its result. Raises the typed error of the service."""
    at = {StreamName.STDOUT: stdout_offset, StreamName.STDERR: stderr_offset}
    backoff = Backoff(transport.settings.retry)
    while True:
        query = [(f"{name.value}_offset", str(offset)) for name, offset in at.items()]
        try:
            async for name, data in read_events(transport, path_of("jobs", job_id, "stream"), query):
                if name == "exit":
                    yield _result(data)
                    return
                if name == "error":
                    raise told_error(data)
                # Also after a keepalive: a command may be silent for longer than the time for attempts.
                backoff = Backoff(transport.settings.retry)
                happening = _happening(name, data)
                if happening is not None:
                    at[happening.stream] = happening.end
                    yield happening
            lost: OrchardError = ConnectionFailed(
                "the service ended the stream before the command's end", sent=True
            )
        except OrchardError as error:
            lost = error
        pause_s = backoff.pause_s(lost.retry_after_s, first_contact=False) if may_pass(lost) else None
        if pause_s is None:
            raise lost
        await asyncio.sleep(pause_s)


def may_pass(error: OrchardError) -> bool:
    """Whether a stream that broke off so may be opened again."""
    return isinstance(error, ConnectionFailed) or (error.http_status == 503 and error.retryable)


def told_error(data: dict[str, Any]) -> OrchardError:
    """What an event `error` stands for."""
    return BY_CODE.get(str(data.get("code")), InternalError)(
        str(data.get("detail", "the stream ended by an error"))
    )


def _result(data: dict[str, Any]) -> JobResult:
    try:
        return JobResult.model_validate(data.get("job"))
    except ValidationError as error:
        raise not_understood(str(error)) from None


def _happening(name: str, data: dict[str, Any]) -> OutputChunk | OutputGap | None:
    try:
        if name in ("stdout", "stderr"):
            return OutputChunk(StreamName(name), int(data["offset"]), base64.b64decode(data["data"]))
        if name == "gap":
            return OutputGap(StreamName(data["stream"]), int(data["from"]), int(data["to"]))
    except (KeyError, TypeError, ValueError) as error:
        raise not_understood(f"{name}: {type(error).__name__}: {error}") from None
    return None  # a keepalive, or what later versions will say


async def read_events(
    transport: Transport, path: str, query: Query
) -> AsyncGenerator[tuple[str, dict[str, Any]], None]:
    """Name and data of server-sent events."""
    parser = EventParser()
    async with aclosing(transport.open_stream(path, query, _SILENCE_S)) as pieces:
        async for piece in pieces:
            for name, text in parser.feed(piece):
                yield name, _object(text)


def _object(text: bytes) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise not_understood(str(error)) from None
    if not isinstance(data, dict):
        raise not_understood("its data is no JSON object")
    return data


def not_understood(why: str) -> InfrastructureError:
    """An event that no service of ours sends. Asking again would bring it again."""
    error = InfrastructureError(
        f"the service sent an event that this client does not understand ({why:.300})"
    )
    error.retryable = False
    return error
