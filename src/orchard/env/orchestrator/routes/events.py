"""The route of lifecycle events, and the answer that goes on until its reader has gone."""

from __future__ import annotations

import asyncio
import logging
from typing import Annotated

from fastapi import Header
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from orchard.env.contract import SandboxEvent
from orchard.env.orchestrator.catalog import parse_labels
from orchard.env.orchestrator.events import Reader
from orchard.env.orchestrator.metrics import Metrics
from orchard.env.orchestrator.routes.base import errors, orchestrator, principal, router
from orchard.env.orchestrator.routes.sandboxes import Labels

_log = logging.getLogger(__name__)
_KEEPALIVE_S = 15.0
#: A reader that takes nothing for this long is dropped.
_SLOW_S = 30.0

routes = router("sandboxes")


@routes.get("/events", response_class=Response, responses={
                200: {"model": SandboxEvent, "description": "text/event-stream of SandboxEvent"}, **errors()},
            summary="What happens to sandboxes")  # fmt: skip
async def events(
    request: Request,
    label: Labels = [],  # noqa: B006 - FastAPI copies it
    last_event_id: Annotated[str | None, Header(max_length=64)] = None,
) -> Response:
    """Server-sent events about the sandboxes you may see, from now on: `created`, `starting`, `ready`, `changed`,
    `ended` (with its reason). The first event is `open`: what was before it, GET /sandboxes tells. With the header
    `Last-Event-ID` it goes on after that event instead; where events between are not kept any more (or the service was
    restarted), it begins with `gap`, which means what `open` means. A comment comes every 15 s when nothing happens. A
    reader that is too slow is disconnected; so is everyone when keys are read again."""
    service = orchestrator(request)
    reader = service.events.reader(principal(request), parse_labels(label), last_event_id)
    return EventStream(reader, service.metrics)


class EventStream(Response):
    """Sends what a reader reads, until it or the client ends."""

    media_type = "text/event-stream"

    def __init__(self, reader: Reader, metrics: Metrics) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._reader = reader
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            self._reader.close()
            sending.cancel()
            gone.cancel()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        while True:
            text = await self._reader.next(_KEEPALIVE_S)
            more = not self._reader.ended
            try:
                async with asyncio.timeout(_SLOW_S):
                    await send(
                        {"type": "http.response.body", "body": text or b": keepalive\n\n", "more_body": more}
                    )
            except TimeoutError:
                self._metrics.event_streams_dropped.inc()
                _log.warning("a reader of events took nothing for %g s and is dropped", _SLOW_S)
                return
            if not more:
                return


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
