"""GET /events of all services as one stream.

An id tells the last event of every seat, so that a reader goes on anywhere. Where events may have been missed, because
a service died or another one has come, the stream says `gap`, as a service alone does after its restart.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from starlette.types import Message, Receive, Scope, Send

from orchard.env.contract import EventType
from orchard.env.errors import InfrastructureError, OrchardError
from orchard.env.orchestrator.catalog import parse_labels
from orchard.env.orchestrator.replicas.collect import Collected
from orchard.env.orchestrator.responses import json_bytes
from orchard.env.orchestrator.routes.events import KEEPALIVE_S, SLOW_S

if TYPE_CHECKING:
    from orchard.env.orchestrator.replicas.household import Household

_log = logging.getLogger(__name__)
_LOOK_EVERY_S = 0.5
_LAST_ID = b"last-event-id"
_PLACE = re.compile(r"(\d{1,9}):([0-9a-f]{8}-\d{1,18})\Z")
_MARKS = (EventType.OPEN.value, EventType.GAP.value)
#: Events read ahead of a slow reader; more stay where they are.
_AHEAD = 1000
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
#: The stream of a seat has ended, as a type that no event has.
_ENDED = "(ended)"


async def events(household: Household, scope: Scope, receive: Receive, send: Send) -> None:
    """GET /events."""
    # What every seat would refuse is refused here.
    parse_labels(parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True).get("label", []))
    stream = _Merged(household, scope)
    sending = asyncio.ensure_future(stream.send_all(send))
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
        if sending.done():
            sending.result()
    finally:
        for task in (sending, gone, *stream.tasks.values()):
            task.cancel()


class _Merged:
    """One reader's stream. tasks: what follows each seat."""

    def __init__(self, household: Household, scope: Scope) -> None:
        self._household = household
        self._neighbours = household.neighbours
        self._scope = scope
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self._queue: asyncio.Queue[tuple[int, dict[str, Any]]] = asyncio.Queue(_AHEAD)
        self._refused: Collected | None = None
        last = dict(scope["headers"]).get(_LAST_ID, b"").decode("latin-1")
        #: seat → the id of its last event that the reader has seen
        self._places = _places(last)
        self._resumed = bool(last)
        self._missed = bool(last) and not self._places

    async def send_all(self, send: Send) -> None:
        followed = self._follow_new()
        self._missed = self._missed or not set(self._places) <= followed
        self._places = {number: place for number, place in self._places.items() if number in followed}
        # Those whose place is known tell what comes after it, perhaps not soon; the others first tell where they are.
        waiting = followed - set(self._places)
        early: list[tuple[int, dict[str, Any]]] = []
        while waiting and self._refused is None:
            number, event = await self._queue.get()
            if event["type"] == _ENDED:
                self._refused = self._refused or _unavailable()
            elif event["type"] in _MARKS and number in waiting:
                self._places[number] = event["id"]
                self._missed = self._missed or self._resumed
                waiting.discard(number)
            else:
                early.append((number, event))
        if self._refused is not None:
            await self._refused.response()(self._scope, _never, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        text = b""
        if not self._resumed or self._missed:
            text = self._mark(EventType.GAP if self._missed else EventType.OPEN)
        text += b"".join(self._text(number, event) for number, event in early)
        if text:
            await _send_piece(send, text)
        await self._go_on(send)

    async def _go_on(self, send: Send) -> None:
        silent_since = time.monotonic()
        while self._refused is None:
            text = b""
            try:
                async with asyncio.timeout(_LOOK_EVERY_S):
                    number, event = await self._queue.get()
                text = self._take(number, event)
                while not self._queue.empty() and len(text) < 1 << 18:
                    text += self._take(*self._queue.get_nowait())
            except TimeoutError:
                self._follow_new()
            if not text and time.monotonic() - silent_since > KEEPALIVE_S:
                text = b": keepalive\n\n"
            if text:
                await _send_piece(send, text)
                silent_since = time.monotonic()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _take(self, number: int, event: dict[str, Any]) -> bytes:
        if event["type"] == _ENDED:
            # Its service is gone, or all are asked to come again with their keys.
            del self.tasks[number]
            if self._refused is None:
                self._follow(number)
            return b""
        return self._text(number, event)

    def _text(self, number: int, event: dict[str, Any]) -> bytes:
        self._places[number] = event["id"]
        if event["type"] in _MARKS:
            return self._mark(EventType.GAP)
        return _event_text(self._id(), event)

    def _mark(self, kind: EventType) -> bytes:
        return _event_text(self._id(), {"type": kind.value, "time": time.time()})

    def _id(self) -> str:
        return ".".join(f"{number}:{place}" for number, place in sorted(self._places.items()))

    # ---------------------------------------------------------------------------------------- following

    def _follow_new(self) -> set[int]:
        """Follow every seat that is not followed yet; which those are."""
        lines = self._neighbours.lines
        numbers = {*self._household.held, *filter(lines.occupied, lines.others())}
        new = numbers - set(self.tasks)
        for number in new:
            self._follow(number)
        return new

    def _follow(self, number: int) -> None:
        self.tasks[number] = asyncio.ensure_future(self._read(number))

    async def _read(self, number: int) -> None:
        headers = [(name, value) for name, value in self._scope["headers"] if name != _LAST_ID]
        if (place := self._places.get(number)) is not None:
            headers.append((_LAST_ID, place.encode()))
        incoming: list[Message] = [{"type": "http.request", "body": b"", "more_body": False}]
        answer = Collected()
        unread = b""

        async def receive() -> Message:
            return incoming.pop() if incoming else await _never()

        async def send(message: Message) -> None:
            nonlocal unread
            if message["type"] == "http.response.start":
                answer.status, answer.headers = message["status"], list(message["headers"])
                return
            unread += message.get("body", b"")
            if answer.status != 200:
                return
            *whole, unread = unread.split(b"\n\n")
            for text in whole:
                if (event := _parse(text)) is not None:
                    await self._queue.put((number, event))

        try:
            await self._neighbours.way_to(number)({**self._scope, "headers": headers}, receive, send)
        except OrchardError as error:
            _log.info("the events of seat %d broke off: %s", number, error.detail)
            if not answer.status:
                self._refused = _unavailable()
        if answer.status not in (0, 200):
            answer.body = unread
            self._refused = answer
        await self._queue.put((number, {"type": _ENDED}))


def _places(last: str) -> dict[int, str]:
    found = [_PLACE.match(part) for part in last.split(".")]
    return {int(match[1]): match[2] for match in found if match is not None}


def _parse(text: bytes) -> dict[str, Any] | None:
    for line in text.split(b"\n"):
        if line.startswith(b"data: "):
            event: dict[str, Any] = json.loads(line[6:])
            return event
    return None


def _event_text(event_id: str, event: dict[str, Any]) -> bytes:
    data = json_bytes({**event, "id": event_id})
    return b"id: %s\nevent: %s\ndata: %s\n\n" % (event_id.encode(), event["type"].encode(), data)


def _unavailable() -> Collected:
    error = InfrastructureError(
        "the events of a service cannot be read just now; try again", retry_after_s=1.0
    )
    return Collected(503, [(b"retry-after", b"1")], json_bytes(error.body()))


async def _send_piece(send: Send, text: bytes) -> None:
    async with asyncio.timeout(SLOW_S):
        await send({"type": "http.response.body", "body": text, "more_body": True})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _never() -> Message:
    await asyncio.Event().wait()
    raise AssertionError("unreachable")
