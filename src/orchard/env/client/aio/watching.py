"""Following changes of files over connections that may break."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from pydantic import ValidationError

from orchard.env.client.aio.streams import may_pass, not_understood, read_events, told_error
from orchard.env.client.retry import Backoff
from orchard.env.client.transport import Query, Transport
from orchard.env.contract import FileChange
from orchard.env.errors import ConnectionFailed, OrchardError


async def follow(transport: Transport, url: str, query: Query, path: str) -> AsyncGenerator[FileChange, None]:
    """Changes until what is watched is gone. After a lost connection it begins again, with `gap` in place of `open`."""
    backoff = Backoff(transport.settings.retry)
    begun = False
    while True:
        last: FileChange | None = None
        try:
            async with aclosing(read_events(transport, url, query)) as events:
                async for name, data in events:
                    if name == "error":
                        raise told_error(data)
                    backoff = Backoff(transport.settings.retry)
                    try:
                        last = FileChange.model_validate(data)
                    except ValidationError as error:
                        raise not_understood(str(error)) from None
                    if last.type == "open" and begun:
                        last = FileChange(type="gap", path=path)
                    begun = True
                    yield last
            if last is not None and (last.type == "removed" or last.message):
                return
            lost: OrchardError = ConnectionFailed("the service ended the watch", sent=True)
        except OrchardError as error:
            lost = error
        pause_s = backoff.pause_s(lost.retry_after_s, first_contact=False) if may_pass(lost) else None
        if pause_s is None:
            raise lost
        await asyncio.sleep(pause_s)
