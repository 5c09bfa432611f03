"""Who holds which sandbox and command, and creations that no two services make twice.

A sandbox stays in its seat for good, so what was found once stays found. Redis is asked first; what it does not know,
or does not tell, the other services are asked themselves: that a thing does not exist is never concluded from Redis.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from redis.exceptions import RedisError

from orchard.env.contract import CreateSandbox
from orchard.env.orchestrator.app import Service
from orchard.env.orchestrator.auth import Principal
from orchard.env.orchestrator.identity import Elsewhere
from orchard.env.orchestrator.quotas import Others, Use
from orchard.env.orchestrator.replicas.forward import Forwarder
from orchard.env.orchestrator.replicas.lines import Lines
from orchard.env.orchestrator.replicas.seats import Seats
from orchard.env.orchestrator.stores.redis import connect

_log = logging.getLogger(__name__)
_KEPT = 100_000
_REDIS_ANSWER_S = 0.5
#: A Redis that did not answer is not asked again for this long.
_REDIS_REST_S = 1.0


class Neighbours:
    """apps: the seats of this process. prefix: what a seat's keys in Redis begin with."""

    def __init__(
        self,
        seats: Seats,
        apps: Callable[[], dict[int, Service]],
        redis_url: str,
        prefix: Callable[[int], str],
    ) -> None:
        self._seats = seats
        self._apps = apps
        self._prefix = prefix
        self._redis = connect(redis_url, _REDIS_ANSWER_S)
        self._redis_rests_until = 0.0
        self.lines = Lines(seats, apps)
        self._known: OrderedDict[tuple[str, ...], int] = OrderedDict()
        self._ways: dict[int, Forwarder] = {}

    def way_to(self, number: int) -> Forwarder:
        """The application that passes requests on to whoever holds a seat."""
        way = self._ways.get(number)
        if way is None:
            way = self._ways[number] = Forwarder(self.lines, number)
        return way

    async def close(self) -> None:
        await self.lines.close()
        await self._redis.aclose()

    # ------------------------------------------------------------------------------------------ finding

    async def sandbox(self, sandbox_id: str) -> int | None:
        """The seat of a sandbox; None when no service knows it. Raises `InfrastructureError` when one that may know it
        cannot be asked."""
        for number, app in self._apps().items():
            if sandbox_id in app.state.orchestrator.catalog.live:
                return number
        return await self._find(("sandbox", sandbox_id), "sandboxes", [sandbox_id], id=sandbox_id)

    async def job(self, principal: Principal, job_id: str) -> int | None:
        """The seat of a command that the caller may see. As `sandbox`."""
        owner, role = principal.owner, principal.role.value
        return await self._find(
            ("job", owner, job_id), "jobs", [f"{owner}\0{job_id}"], id=job_id, owner=owner, role=role
        )

    async def _find(self, name: tuple[str, ...], kind: str, fields: list[str], **query: str) -> int | None:
        number = self._known.get(name)
        if number is not None:
            self._known.move_to_end(name)
            return number
        question = name[0]
        for number in list(self._apps()):
            if (await self.lines.ask(number, question, **query) or {}).get("found"):
                return self._remember(name, number)
        others = self.lines.others()
        if not others:
            return None
        number = await self._in_redis(others, kind, fields[0])
        if number is None:
            answers = await asyncio.gather(*(self.lines.ask(each, question, **query) for each in others))
            found = [each for each, answer in zip(others, answers, strict=True) if answer and answer["found"]]
            number = found[0] if found else None
        return None if number is None else self._remember(name, number)

    def _remember(self, name: tuple[str, ...], number: int) -> int:
        if number not in self._apps():
            self._known[name] = number
            if len(self._known) > _KEPT:
                self._known.popitem(last=False)
        return number

    async def _in_redis(self, seats: list[int], kind: str, field: str) -> int | None:
        if time.monotonic() < self._redis_rests_until:
            return None
        try:
            async with self._redis.pipeline(transaction=False) as pipe:
                for number in seats:
                    pipe.hexists(f"{self._prefix(number)}:{kind}", field)
                answers = await pipe.execute()
        except (RedisError, OSError, TimeoutError):
            self._redis_rests_until = time.monotonic() + _REDIS_REST_S
            return None
        return next((number for number, there in zip(seats, answers, strict=True) if there), None)

    # ----------------------------------------------------------------------------------------- creating

    @asynccontextmanager
    async def creation(
        self, principal: Principal, body: CreateSandbox, sandbox_id: str
    ) -> AsyncIterator[Others | None]:
        """See `orchard.env.orchestrator.lifecycle.Neighbourhood`."""
        named = body.sandbox_id is not None or body.idempotency_key is not None
        limited = principal.quotas.limited
        limits_all = any(
            app.state.orchestrator.lifecycle.admission.limits_all for app in self._apps().values()
        )
        names = [f"sandbox {sandbox_id}"] if named else []
        if limited:
            names.append(f"owner {principal.owner}")
        if limits_all:
            names.append("all")
        if not names:
            yield None
            return
        async with self._seats.claim(names):
            if named:
                await self._check_elsewhere(sandbox_id)
            yield await self._others(principal) if limited or limits_all else None

    async def _check_elsewhere(self, sandbox_id: str) -> None:
        number = await self.sandbox(sandbox_id)
        mine = next(iter(self._apps()))
        if number is not None and number != mine:
            raise Elsewhere(self.way_to(number))

    async def _others(self, principal: Principal) -> Others:
        mine, *more = self._apps()
        del mine
        seats = [*more, *self.lines.others()]
        answers: list[dict[str, Any] | None] = await asyncio.gather(
            *(self.lines.ask(number, "use", owner=principal.owner) for number in seats)
        )
        use, live = Use(), 0
        for answer in answers:
            if answer is not None:
                use += Use(answer["sandboxes"], answer["cpu_millionths"], answer["memory_bytes"])
                live += answer["live"]
        return Others(use, live)

    async def created(self, principal: Principal) -> None:
        """See `orchard.env.orchestrator.lifecycle.Neighbourhood`."""
        per_minute = principal.quotas.creates_per_minute
        if per_minute is None:
            return
        query = {"owner": principal.owner, "per_minute": str(per_minute)}
        seats = self.lines.others()
        outcomes = await asyncio.gather(
            *(self.lines.ask(number, "taken", **query) for number in seats), return_exceptions=True
        )
        for number, outcome in zip(seats, outcomes, strict=True):
            if isinstance(outcome, Exception):
                _log.warning("seat %d was not told of a creation: %s", number, outcome)
