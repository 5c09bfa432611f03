"""What happens to sandboxes, told as it happens: the last events are kept, and every reader has a place among them.

A reader is a number, not a queue: whoever is slow costs nothing, and has missed something only when what it had not
read yet was pushed out. Events have ids `RUN-NUMBER`, where RUN names this run of the service, so that a reader who
comes back with an id of an earlier run is told that there is a gap.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from orchard.env.contract import EventType
from orchard.env.egress import EgressDenial
from orchard.env.errors import Overloaded
from orchard.env.orchestrator.auth import Principal
from orchard.env.orchestrator.metrics import Metrics
from orchard.env.orchestrator.responses import json_bytes
from orchard.env.orchestrator.sandbox import Sandbox

#: Events kept: some 5 MiB, and two thousand sandboxes from creation to end.
KEPT = 10_000
_MAX_READERS = 1000
#: Events handed to a reader at once.
_BATCH = 200


@dataclass(frozen=True, slots=True)
class _Event:
    owner: str
    labels: dict[str, str]
    earlier_labels: dict[str, str]
    data: dict[str, Any]


class EventLog:
    """Publishing never waits for anybody. kept: events that a reader may be behind."""

    def __init__(self, metrics: Metrics, kept: int = KEPT) -> None:
        self._metrics = metrics
        self._run = os.urandom(4).hex()
        self._events: deque[_Event] = deque(maxlen=kept)
        #: Of the latest event; the first has 1.
        self._last = 0
        self._news: asyncio.Future[None] | None = None
        self._readers: set[Reader] = set()
        self._closed = False

    def publish(
        self,
        kind: EventType,
        sandbox: Sandbox,
        earlier_labels: dict[str, str] | None = None,
        egress: EgressDenial | None = None,
    ) -> None:
        """Tell everyone who may know. earlier_labels: what it was found by before a change of its labels. egress: what
        was refused."""
        body = sandbox.body
        labels = dict(sandbox.labels)
        data = {
            "type": kind.value,
            "time": time.time(),
            "sandbox_id": sandbox.sandbox_id,
            "owner": sandbox.owner,
            "image": body.image,
            "status": sandbox.status.value,
            "reason": sandbox.reason.value if sandbox.reason else None,
            "message": sandbox.status_message,
            "labels": labels,
            "created_at": sandbox.created_at,
            "cpu": body.cpu,
            "memory": body.memory,
            "block_network": body.block_network,
        }
        if egress is not None:
            data["egress"] = egress.model_dump()
        self._events.append(_Event(sandbox.owner, labels, earlier_labels or labels, data))
        self._last += 1
        self._wake()

    def reader(self, principal: Principal, labels: dict[str, str], after: str | None) -> Reader:
        """A new reader; `close` it. after: the id of the last event it has seen. Raises `Overloaded`."""
        if self._closed or len(self._readers) >= _MAX_READERS:
            raise Overloaded(
                f"{len(self._readers)} readers of events are the most; try again later", retry_after_s=5
            )
        reader = Reader(self, principal, labels, after)
        self._readers.add(reader)
        self._metrics.event_streams.inc()
        return reader

    def end_streams(self) -> None:
        """Every reader of now has to come again, with its key and the id that it has seen."""
        for reader in self._readers:
            reader.ended = True
        self._wake()

    def close(self) -> None:
        self._closed = True
        self.end_streams()

    def _wake(self) -> None:
        if self._news is not None:
            self._news.set_result(None)
            self._news = None

    async def _changed(self) -> None:
        if self._news is None:
            self._news = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._news)

    def _number(self, event_id: str) -> int | None:
        """Of an event of this run that is kept, or the one before those; None for all others."""
        run, _, text = event_id.partition("-")
        if run != self._run or not (text.isascii() and text.isdigit()) or len(text) > 18:
            return None
        number = int(text)
        return number if self._last - len(self._events) <= number <= self._last else None


class Reader:
    """One reader's place. ended: it has to come again."""

    def __init__(
        self, log: EventLog, principal: Principal, labels: dict[str, str], after: str | None
    ) -> None:
        self._log = log
        self._principal = principal
        self._labels = labels
        seen = log._number(after) if after else None
        self._seen = log._last if seen is None else seen
        self._greeting = None if seen is not None else EventType.GAP if after else EventType.OPEN
        self.ended = False

    async def next(self, timeout_s: float) -> bytes:
        """The next events as text of an event stream; empty after `timeout_s` without any, and when it has ended."""
        greeting, self._greeting = self._greeting, None
        if greeting is not None:
            return self._mark(greeting)
        try:
            async with asyncio.timeout(timeout_s):
                while not self.ended:
                    if text := self._unread():
                        return text
                    await self._log._changed()
        except TimeoutError:
            pass
        return b""

    def _unread(self) -> bytes:
        log = self._log
        first = log._last - len(log._events) + 1
        if self._seen + 1 < first:
            self._seen = log._last
            return self._mark(EventType.GAP)
        parts: list[bytes] = []
        while self._seen < log._last and len(parts) < _BATCH:
            event = log._events[self._seen + 1 - first]
            self._seen += 1
            if self._may_see(event):
                event_id = f"{log._run}-{self._seen}"
                parts.append(_text(event.data["type"], event_id, {"id": event_id, **event.data}))
        return b"".join(parts)

    def _may_see(self, event: _Event) -> bool:
        wanted = self._labels.items()
        return self._principal.may_see(event.owner) and (
            wanted <= event.labels.items() or wanted <= event.earlier_labels.items()
        )

    def _mark(self, kind: EventType) -> bytes:
        event_id = f"{self._log._run}-{self._seen}"
        return _text(kind.value, event_id, {"id": event_id, "type": kind.value, "time": time.time()})

    def close(self) -> None:
        if self in self._log._readers:
            self._log._readers.discard(self)
            self._log._metrics.event_streams.dec()


def _text(kind: str, event_id: str, data: dict[str, Any]) -> bytes:
    return b"id: %s\nevent: %s\ndata: %s\n\n" % (event_id.encode(), kind.encode(), json_bytes(data))
