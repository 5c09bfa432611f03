"""Answers put together from those of all services. One that cannot be asked makes the whole answer a 503: half a list
would pass for a whole one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from starlette.types import Receive, Scope, Send

from orchard.env.orchestrator.catalog import encode_cursor
from orchard.env.orchestrator.replicas.collect import Collected, collect
from orchard.env.orchestrator.responses import json_of

if TYPE_CHECKING:
    from orchard.env.orchestrator.replicas.household import Household

_DEFAULT_LIMIT = 1000
_HEADERS = (b"x-orchard-version", b"x-request-id")

Merge = Callable[[list[Any]], dict[str, Any]]


async def listing(household: Household, scope: Scope, receive: Receive, send: Send) -> None:
    """GET /sandboxes. Every seat goes on after the same cursor, which is a place in time and not in a list."""
    asked = parse_qs(scope["query_string"].decode("latin-1")).get("limit")

    def merge(answers: list[Any]) -> dict[str, Any]:
        limit = int(asked[-1]) if asked else _DEFAULT_LIMIT
        rows = [row for answer in answers for row in answer["sandboxes"]]
        rows.sort(key=lambda row: (row["created_at"], row["sandbox_id"]))
        page = rows[:limit]
        more = len(rows) > limit or any(answer["next_cursor"] for answer in answers)
        cursor = encode_cursor(page[-1]["created_at"], page[-1]["sandbox_id"]) if more and page else None
        return {"sandboxes": page, "next_cursor": cursor}

    await _together(household, scope, receive, send, merge)


async def deletion(household: Household, scope: Scope, receive: Receive, send: Send) -> None:
    """DELETE /sandboxes?label=…"""

    def merge(answers: list[Any]) -> dict[str, Any]:
        return {**answers[0], "sandbox_ids": [each for answer in answers for each in answer["sandbox_ids"]]}

    await _together(household, scope, receive, send, merge)


async def resources(household: Household, scope: Scope, receive: Receive, send: Send) -> None:
    """GET /resources: the machine is the same for all, what they do on it is summed up."""

    def merge(answers: list[Any]) -> dict[str, Any]:
        merged = dict(answers[0])
        for name in ("queue_length", "starting", "max_starting"):
            merged[name] = sum(answer[name] for answer in answers)
        counts: dict[str, int] = {}
        for answer in answers:
            for status, count in answer["sandboxes"].items():
                counts[status] = counts.get(status, 0) + count
        return {**merged, "sandboxes": counts}

    await _together(household, scope, receive, send, merge)


async def _together(household: Household, scope: Scope, receive: Receive, send: Send, merge: Merge) -> None:
    """Ask our own application first: what it refuses, all would refuse."""
    first = await collect(household.app, scope)
    neighbours = household.neighbours
    others = [number for number in neighbours.lines.others() if neighbours.lines.occupied(number)]
    numbers = [*(number for number in household.held if number != household.number), *others]
    refused: Collected | None = first if first.status != 200 else None
    answers = [first]
    if refused is None:
        answers += await asyncio.gather(*(collect(neighbours.way_to(n), scope) for n in numbers))
        refused = next((answer for answer in answers if answer.status != 200), None)
    headers = [(name, value) for name, value in first.headers if name in _HEADERS]
    response = refused.response() if refused else json_of(merge([answer.json() for answer in answers]))
    response.raw_headers.extend(headers)
    await response(scope, receive, send)
