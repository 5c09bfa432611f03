"""Deadlines of many things, on one timer of the event loop."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable

#: A timer this late means that the whole process was stopped or starved; it then gets as long to catch up.
_LATE_S = 0.5
_CATCH_UP_S = 1.0


class Reaper:
    """Calls `expire(name)` when the deadline of a name has passed.

    `deadline(name)` tells the current one (`time.monotonic()` seconds), or None when the name needs no more
    watching. A deadline that moved later costs nothing until the old one comes; one that moved earlier needs
    another `watch`.
    """

    def __init__(self, deadline: Callable[[str], float | None], expire: Callable[[str], None]) -> None:
        self._deadline = deadline
        self._expire = expire
        self._heap: list[tuple[float, str]] = []
        self._next: dict[str, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._stopped = False
        self._catching_up = False

    def watch(self, name: str) -> None:
        """Look at `name` when its deadline comes."""
        at = self._deadline(name)
        if at is None or self._stopped:
            return
        known = self._next.get(name)
        if known is None or at < known:
            self._next[name] = at
            heapq.heappush(self._heap, (at, name))
            self._arm()

    def forget(self, name: str) -> None:
        """It needs no more watching."""
        self._next.pop(name, None)
        if len(self._heap) > 2 * len(self._next) + 64:
            # Most entries are of names that are gone: with long deadlines they would pile up.
            self._heap = [(at, name) for name, at in self._next.items()]
            heapq.heapify(self._heap)

    def stop(self) -> None:
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        if not self._heap or self._stopped:
            return
        at = self._heap[0][0]
        if self._timer is not None:
            if self._timer_at <= at:
                return
            self._timer.cancel()
        self._timer_at = at
        self._timer = asyncio.get_running_loop().call_later(max(0.0, at - time.monotonic()), self._run)

    def _run(self) -> None:
        self._timer = None
        now = time.monotonic()
        if now - self._timer_at > _LATE_S and not self._catching_up:
            # The service itself stood still: heartbeats that came meanwhile wait in its sockets and are read first.
            self._catching_up = True
            self._timer_at = now + _CATCH_UP_S
            self._timer = asyncio.get_running_loop().call_later(_CATCH_UP_S, self._run)
            return
        self._catching_up = False
        while self._heap and self._heap[0][0] <= now:
            at, name = heapq.heappop(self._heap)
            if self._next.get(name) != at:
                continue  # watched again since, for an earlier time that has been dealt with
            del self._next[name]
            current = self._deadline(name)
            if current is None:
                continue
            if current <= now:
                self._expire(name)
            else:
                self._next[name] = current
                heapq.heappush(self._heap, (current, name))
        self._arm()
