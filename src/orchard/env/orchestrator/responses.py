"""Answers as ready-made JSON bytes, and errors in the one shape that the contract gives them."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticSerializationError, to_json, to_jsonable_python
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from orchard.env.contract import Death, field_of
from orchard.env.errors import (
    Forbidden,
    InternalError,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    OrchardError,
    TooLarge,
    Unauthorized,
)
from orchard.env.orchestrator.logging import request_id

_log = logging.getLogger(__name__)


class ErrorBody(BaseModel):
    """Every error answer. detail: what was wrong and what to do. retryable: the same request may succeed later.
    infra: the service or sandbox failed, not the caller's command."""

    detail: str
    code: str
    retryable: bool
    infra: bool
    request_id: str | None = None
    reason: str | None = None
    retry_after_s: float | None = None
    death: Death | None = None


class Json(Response):
    """JSON that is bytes already; nothing is encoded or validated again."""

    media_type = "application/json"

    def __init__(self, content: bytes, status_code: int = 200) -> None:
        self.status_code = status_code
        self.background = None
        self.body = content
        self.raw_headers = [(b"content-length", b"%d" % len(content)), (b"content-type", b"application/json")]


#: What a client that has stopped reading holds here and in the agent is given back after this long.
STALL_S = 300.0


class Stream(Response):
    """Bytes of any number, sent as fast as the client takes them.

    size: sent as Content-Length where known. What fails before the first piece is an ordinary error answer; what
    fails after it breaks the connection, since only that tells that the answer is not whole. stall_s: a client that
    takes nothing for this long is dropped, and `on_drop` called.
    """

    def __init__(
        self,
        pieces: AsyncGenerator[bytes, None],
        media_type: str,
        size: int | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        stall_s: float = STALL_S,
        on_drop: Callable[[], None] = lambda: None,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.raw_headers = [(b"content-type", media_type.encode("latin-1"))]
        if size is not None:
            self.raw_headers.append((b"content-length", b"%d" % size))
        for name, value in (headers or {}).items():
            self.raw_headers.append((name.lower().encode("latin-1"), value.encode("latin-1")))
        self._pieces = pieces
        self._stall_s = stall_s
        self._on_drop = on_drop

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(send))
        gone = asyncio.ensure_future(_until_gone(receive))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            sending.cancel()
            await asyncio.wait({sending})
            await self._pieces.aclose()
        if not sending.cancelled():
            sending.result()

    async def _send(self, send: Send) -> None:
        piece = await anext(self._pieces, b"")
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        while piece:
            try:
                async with asyncio.timeout(self._stall_s):
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            except TimeoutError:
                self._on_drop()
                _log.warning("a client took nothing for %g s and is dropped", self._stall_s)
                return
            try:
                piece = await anext(self._pieces, b"")
            except OrchardError as error:
                # Left without its end, the answer breaks off with its connection.
                _log.warning("an answer is cut off: %s", error)
                return
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def events(pieces: AsyncGenerator[bytes, None], stall_s: float = STALL_S,
           on_drop: Callable[[], None] = lambda: None) -> Stream:  # fmt: skip
    """Server-sent events that are encoded already."""
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return Stream(
        pieces, "text/event-stream; charset=utf-8", headers=headers, stall_s=stall_s, on_drop=on_drop
    )


def error_event(error: OrchardError) -> bytes:
    """The last event of a stream that ends by an error."""
    fields = {"code": error.code, "detail": error.detail, "retryable": error.retryable}
    return b"event: error\ndata: %s\n\n" % json_bytes(fields)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def json_bytes(value: Any) -> bytes:
    """JSON of mappings, lists and models. Text that holds lone surrogates (names of files in unknown encodings) is
    escaped instead of refused."""
    try:
        return to_json(value)
    except (PydanticSerializationError, UnicodeError):
        return json.dumps(to_jsonable_python(value, serialize_unknown=True)).encode("ascii")


def json_of(value: Any) -> Json:
    """Any mapping, list or model of the contract as an answer."""
    return Json(json_bytes(value))


def error_response(error: OrchardError) -> Response:
    """The answer that carries an error."""
    answer = Json(json_bytes(error.body(request_id.get())), error.http_status)
    if error.retry_after_s is not None:
        answer.raw_headers.append((b"retry-after", b"%d" % max(1, math.ceil(error.retry_after_s))))
    elif error.http_status == 503:
        answer.raw_headers.append((b"retry-after", b"1"))
    return answer


def from_validation(error: ValidationError | RequestValidationError) -> InvalidRequest:
    """What of a request was wrong, by field."""
    # The layer below says first in which part of the request the field is.
    if isinstance(error, RequestValidationError):
        found, skip = list(error.errors()), 1
    else:
        found, skip = list(error.errors(include_url=False, include_input=False)), 0
    parts = []
    for problem in found[:5]:
        where = field_of(problem["loc"][skip:])
        message = str(problem["msg"]).removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            message = "unknown field; see /docs for the fields of this request"
        parts.append(f"{where or 'body'}: {message}")
    more = f" (and {len(found) - 5} more)" if len(found) > 5 else ""
    return InvalidRequest("; ".join(parts) + more)


_BY_STATUS: dict[int, type[OrchardError]] = {
    401: Unauthorized, 403: Forbidden, 404: NotFound, 405: MethodNotAllowed, 413: TooLarge,
}  # fmt: skip


def from_http(method: str, path: str, error: HTTPException) -> OrchardError:
    """An error of the HTTP layer below, such as an unknown path."""
    if error.status_code == 404:
        return NotFound(f"there is no {path[:200]}; see /docs for what there is")
    if error.status_code == 405:
        return MethodNotAllowed(f"{method} is not for {path[:200]}; see /docs for what is")
    cls = _BY_STATUS.get(error.status_code, InvalidRequest if error.status_code < 500 else InternalError)
    return cls(str(error.detail))
