"""Following the service's events over connections that may break."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from pydantic import ValidationError

from orchard.env.client.retry import Backoff
from orchard.env.client.sse import EventParser
from orchard.env.client.transport import Query, Transport
from orchard.env.contract import SandboxEvent
from orchard.env.errors import ConnectionFailed, InfrastructureError, OrchardError

#: Three times what the service lets pass without a sign of life.
_SILENCE_S = 45.0


async def follow(transport: Transport, query: Query, after: str | None) -> AsyncGenerator[SandboxEvent, None]:
    """Events from now on, or after the one of that id; goes on after them when the connection was lost."""
    backoff = Backoff(transport.settings.retry)
    while True:
        parser = EventParser()
        headers = {"Accept": "text/event-stream", **({"Last-Event-ID": after} if after else {})}
        try:
            chunks = transport.open_stream("/events", query, _SILENCE_S, headers)
            async with aclosing(chunks):
                async for chunk in chunks:
                    backoff = Backoff(transport.settings.retry)
                    for _, text in parser.feed(chunk):
                        event = _event(text)
                        after = event.id
                        yield event
            raise ConnectionFailed("the service ended the stream of events", sent=True)
        except OrchardError as error:
            # A refusal is final, and so is a closed client; a lost connection and a service that restarts are not.
            again = isinstance(error, InfrastructureError) or error.http_status == 503
            first_contact = error.extra.get("sent") is False and not transport.answered
            pause_s = backoff.pause_s(error.retry_after_s, first_contact=first_contact)
            if not again or not error.retryable or pause_s is None:
                raise
            await asyncio.sleep(pause_s)


def _event(text: bytes) -> SandboxEvent:
    try:
        return SandboxEvent.model_validate_json(text)
    except ValidationError as error:
        failure = InfrastructureError(
            f"the service sent an event that this client does not understand: {error}"
        )
        failure.retryable = False
        raise failure from None
