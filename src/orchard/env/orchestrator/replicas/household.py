"""The seats that this service holds: the one it was started with, and those of services that died.

Each seat is a whole orchestrator with its own runtime and file, so a seat is adopted by the very code that adopts after
a restart. New sandboxes are made in the first one only; the others are given up when nothing is recorded in them any
more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from orchard.env.errors import InfrastructureError, OrchardError
from orchard.env.orchestrator.app import Service, create_app
from orchard.env.orchestrator.metrics import Metrics
from orchard.env.orchestrator.orchestrator import Orchestrator
from orchard.env.orchestrator.replicas.neighbours import Neighbours
from orchard.env.orchestrator.replicas.seats import DATABASE, SOCKET, Seat, Seats
from orchard.env.orchestrator.replicas.sockets import SeatApp, listen
from orchard.env.orchestrator.settings import ServiceSettings
from orchard.env.orchestrator.stores.mirrored import MirroredStore
from orchard.env.orchestrator.stores.redis import RedisStore
from orchard.env.orchestrator.stores.sqlite import SqliteStore
from orchard.env.runtimes.base import Runtime

_log = logging.getLogger(__name__)
_LOOK_EVERY_S = 0.25
#: A seat that could not be taken over is tried again after this.
_TAKE_AGAIN_S = 5.0
_MIRROR_PATIENCE_S = 1.0
_BACKLOG = 1024

MakeRuntime = Callable[[Path], Runtime]
Configure = Callable[[ASGIApp], uvicorn.Config]


@dataclass(slots=True)
class Held:
    """A seat at work."""

    seat: Seat
    app: Service
    store: MirroredStore
    server: _SeatServer
    serving: asyncio.Task[None]

    @property
    def orchestrator(self) -> Orchestrator:
        orchestrator: Orchestrator = self.app.state.orchestrator
        return orchestrator


class Household:
    """See the module's docstring. Takes a seat when it is made; use it between `start` and `stop`.

    make_runtime: the runtime of a seat's directory. configure: how its socket is served.
    """

    def __init__(
        self, settings: ServiceSettings, redis_url: str, make_runtime: MakeRuntime, configure: Configure
    ) -> None:
        self.settings = settings
        self.seats = Seats(settings.state_dir)
        self.seats.prepare()
        self._redis_url = redis_url
        self._make_runtime = make_runtime
        self._configure = configure
        self.metrics = Metrics()
        self._seat = self.seats.take_first()
        try:
            self._store = self._make_store(self._seat)
            self.app = self._make_app(self._seat, self._store)
        except BaseException:
            self._seat.release()
            raise
        self.held: dict[int, Held] = {}
        self.neighbours = Neighbours(self.seats, self._apps, redis_url, self._prefix)
        #: Seats that could not be taken over, and when to try again.
        self._failed: dict[int, float] = {}
        self._looking: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()
        self.metrics.gauge("orchard_redis_up", "Whether Redis answers", lambda: float(self._store.up))
        self.metrics.gauge(
            "orchard_redis_published", "How often Redis was told everything anew", self._published
        )
        self.metrics.gauge("orchard_seats", "Seats that this service holds", lambda: len(self.held))

    @property
    def number(self) -> int:
        """Of the seat that new sandboxes are made in."""
        return self._seat.number

    @property
    def orchestrator(self) -> Orchestrator:
        orchestrator: Orchestrator = self.app.state.orchestrator
        return orchestrator

    def _apps(self) -> dict[int, Service]:
        return {number: held.app for number, held in self.held.items()}

    def _published(self) -> float:
        return sum(held.store.published for held in self.held.values())

    def _prefix(self, number: int) -> str:
        return f"orchard:{self.seats.cluster}:{number}"

    def _make_store(self, seat: Seat) -> MirroredStore:
        mirror = RedisStore(self._redis_url, self._prefix(seat.number), patience_s=_MIRROR_PATIENCE_S)
        return MirroredStore(SqliteStore(seat.folder / DATABASE), mirror)

    def _make_app(self, seat: Seat, store: MirroredStore) -> Service:
        return create_app(self.settings, self._make_runtime(seat.folder), store, self.metrics)

    # -------------------------------------------------------------------------------------------- start

    async def start(self) -> None:
        """Take up the work of our seat. Raises `OrchardError` when that is impossible."""
        _log.info("this service has seat %d", self._seat.number)
        self.orchestrator.lifecycle.neighbours = self.neighbours
        await self._take_up(self._seat, self.app, self._store)
        self._looking = asyncio.get_running_loop().create_task(self._keep_looking())

    async def _take_up(self, seat: Seat, app: Service, store: MirroredStore) -> None:
        orchestrator: Orchestrator = app.state.orchestrator
        (seat.folder / SOCKET).unlink(missing_ok=True)
        await orchestrator.start()
        listener = listen(seat.folder, _BACKLOG)
        server = _SeatServer(self._configure(SeatApp(app, orchestrator)))
        serving = asyncio.get_running_loop().create_task(server.serve(sockets=[listener]))
        self.held[seat.number] = Held(seat, app, store, server, serving)

    async def _keep_looking(self) -> None:
        while not self._stopping.is_set():
            try:
                async with asyncio.timeout(_LOOK_EVERY_S):
                    await self._stopping.wait()
                return
            except TimeoutError:
                pass
            try:
                await self._look()
            except OrchardError as error:
                _log.error("%s", error.detail)
            except Exception:
                _log.exception("looking after other seats failed; it is tried again")

    async def _look(self) -> None:
        now = time.monotonic()
        resting = {number for number, until in self._failed.items() if until > now}
        seat = self.seats.take_abandoned({*self.held, *resting})
        if seat is not None:
            _log.warning("the service of seat %d is gone; it is taken over", seat.number)
            await self._take_over(seat)
        for held in list(self.held.values()):
            if held.seat is not self._seat and held.orchestrator.idle and held.store.truth.empty():
                _log.info("seat %d is empty and given up", held.seat.number)
                await self._give_up(held)

    async def _take_over(self, seat: Seat) -> None:
        store = self._make_store(seat)
        try:
            app = self._make_app(seat, store)
            try:
                await self._take_up(seat, app, store)
            except BaseException:
                await app.state.orchestrator.stop()
                raise
        except BaseException as error:
            self._failed[seat.number] = time.monotonic() + _TAKE_AGAIN_S
            seat.release()
            if not isinstance(error, OrchardError):
                raise
            raise InfrastructureError(f"seat {seat.number} cannot be taken over: {error.detail}") from error

    async def _give_up(self, held: Held) -> None:
        """The seat is free when this returns. Requests under way are answered first, as far as they are quick."""
        (held.seat.folder / SOCKET).unlink(missing_ok=True)
        del self.held[held.seat.number]
        held.server.should_exit = True
        await held.orchestrator.begin_stop()
        await asyncio.wait({held.serving})
        await held.orchestrator.stop()
        held.seat.release()

    # --------------------------------------------------------------------------------------------- stop

    @property
    def reloads(self) -> bool:
        return self.orchestrator.reloads

    def reload(self) -> None:
        """As `Orchestrator.reload`, for every seat."""
        for held in self.held.values():
            held.orchestrator.reload()

    async def begin_stop(self) -> None:
        """As `Orchestrator.begin_stop`, for every seat."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        if self._looking is not None:
            # A seat that is just being taken is taken first: half taken, it could not be let go of.
            await asyncio.wait({self._looking})
        await asyncio.gather(*(held.orchestrator.begin_stop() for held in self.held.values()))

    async def stop(self) -> None:
        """Let go of every seat; others take them over."""
        await self.begin_stop()
        await self.neighbours.close()
        for held in list(self.held.values()):
            await self._give_up(held)
        if self._seat.number not in self.held:
            # It did not come to serve.
            await self.orchestrator.stop()
            self._seat.release()


class _SeatServer(uvicorn.Server):
    """The server of one seat's socket; signals are none of its business."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def _log_started_message(self, listeners: Any) -> None:
        return
