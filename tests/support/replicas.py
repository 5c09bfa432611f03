"""Services that share a state directory, and the Redis between them."""

from __future__ import annotations

import http.client
import itertools
import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.conformance.runtimes import RuntimeCase
from tests.support.machine import Leftovers
from tests.support.redis import RedisServer
from tests.support.rest import Answer, Rest
from tests.support.service import Service, live_sandboxes


class Replicas:
    """`count` services, named A, B, …, not started yet."""

    def __init__(
        self, state_dir: Path, runtime: RuntimeCase, *, count: int = 2, arguments: Sequence[str] = ()
    ) -> None:
        self.state_dir = state_dir
        self.redis = RedisServer().start()
        self._runtime = runtime
        key = secrets.token_hex(16)
        options = (*runtime.serve_arguments, "--redis-url", self.redis.url, *arguments)
        self.services = [
            Service(state_dir, arguments=options, api_key=key, name=f"-{name}") for name in "ABCD"[:count]
        ]

    def start(self) -> Replicas:
        """Have all run, Redis included, that do not."""
        if not self.redis.running:
            self.redis.start()
        with ThreadPoolExecutor() as pool:
            stopped = [service for service in self.services if not service.running]
            list(pool.map(Service.start, stopped))
        return self

    @property
    def rest(self) -> Alternating:
        """The requests of one go to one service after the other."""
        return Alternating([service.rest for service in self.services])

    def end_and_check(self) -> None:
        """Deletes all, stops all, and fails when anything is left."""
        try:
            self.start()
            ids = {each["sandbox_id"] for each in live_sandboxes(self.services[0].rest)}
            self.services[-1].delete_all()
            for service in self.services:
                assert service.stop() == 0, service.log()
            for seat in [self.state_dir, *(self.state_dir / "seats").glob("[0-9]*")]:
                for service in self.services:
                    Leftovers(service.mark, seat, ids, self._runtime.tags(seat)).check()
        finally:
            for service in self.services:
                if service.running:
                    service.kill()
            self.redis.end()


class Alternating(Rest):
    """Every request goes to another service than the one before."""

    def __init__(self, ways: Sequence[Rest]) -> None:
        self._ways = ways
        self._turns = itertools.count()
        self.api_key = ways[0].api_key

    def _next(self) -> Rest:
        return self._ways[next(self._turns) % len(self._ways)]

    @property
    def base_url(self) -> str:  # type: ignore[override]
        return self._next().base_url

    def with_key(self, api_key: str | None) -> Rest:
        return Alternating([way.with_key(api_key) for way in self._ways])

    def connect(self) -> http.client.HTTPConnection:
        return self._next().connect()

    def raw(self, *arguments: Any, **options: Any) -> Answer:
        return self._next().raw(*arguments, **options)
