"""The route of lifecycle events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Annotated

from fastapi import Header
from starlette.requests import Request
from starlette.responses import Response

from orchard.env.contract import SandboxEvent
from orchard.env.orchestrator.catalog import parse_labels
from orchard.env.orchestrator.events import Reader
from orchard.env.orchestrator.responses import events as sse
from orchard.env.orchestrator.routes.base import errors, orchestrator, principal, router
from orchard.env.orchestrator.routes.sandboxes import Labels

KEEPALIVE_S = 15.0
#: A reader that takes nothing for this long is dropped.
SLOW_S = 30.0

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
    `ended` (with its reason), `egress_denied` (with what was refused). The first event is `open`: what was before it,
    GET /sandboxes tells. With the header `Last-Event-ID` it goes on after that event instead; where events between are
    not kept any more (or the service was restarted), it begins with `gap`, which means what `open` means. A comment
    comes every 15 s when nothing happens. A reader that is too slow is disconnected; so is everyone when keys are read
    again."""
    service = orchestrator(request)
    labels = parse_labels(label)
    caller = principal(request)
    texts = _texts(lambda: service.events.reader(caller, labels, last_event_id))
    return sse(texts, SLOW_S, service.metrics.event_streams_dropped.inc)


async def _texts(open_reader: Callable[[], Reader]) -> AsyncGenerator[bytes, None]:
    """What a reader reads, until it has to come again."""
    reader = open_reader()
    try:
        while not reader.ended:
            yield await reader.next(KEEPALIVE_S) or b": keepalive\n\n"
    finally:
        reader.close()
