"""The create queue: a cap on sandboxes that are starting, fair between owners.

Owners take turns: each free place goes to the next owner that has something waiting, and to the oldest of
theirs. So one owner's burst of a thousand delays another owner's single sandbox by one place, not by a thousand.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable

from orchard.env.errors import Overloaded


class CreateQueue:
    """Decides when a sandbox may start; `start` is called with its id, `finished` must be called after."""

    def __init__(self, max_starting: int, max_waiting: int, start: Callable[[str], None]) -> None:
        self._max_starting = max_starting
        self._max_waiting = max_waiting
        self._start = start
        self._waiting: dict[str, OrderedDict[str, None]] = {}
        self._turns: deque[str] = deque()
        self._owner_of: dict[str, str] = {}
        self._started_at: dict[str, float] = {}
        self._usual_start_s = 0.05

    def __len__(self) -> int:
        return len(self._owner_of)

    @property
    def starting(self) -> int:
        return len(self._started_at)

    def push(self, owner: str, sandbox_id: str, *, forced: bool = False) -> None:
        """Take it in; it may start before this returns. Raises `Overloaded` when full, unless `forced` (work
        accepted earlier is never dropped)."""
        if not forced and len(self._owner_of) >= self._max_waiting:
            raise Overloaded(
                f"{len(self._owner_of)} sandboxes are waiting to start already; try again later",
                retry_after_s=self._wait_estimate_s(),
            )
        line = self._waiting.get(owner)
        if line is None:
            line = self._waiting[owner] = OrderedDict()
            self._turns.append(owner)
        line[sandbox_id] = None
        self._owner_of[sandbox_id] = owner
        self._fill()

    def remove(self, sandbox_id: str) -> bool:
        """Take it out again; False when it was not waiting."""
        owner = self._owner_of.pop(sandbox_id, None)
        if owner is None:
            return False
        line = self._waiting[owner]
        del line[sandbox_id]
        if not line:
            del self._waiting[owner]
            self._turns.remove(owner)
        return True

    def finished(self, sandbox_id: str) -> None:
        """It has started, failed or was cancelled: its place is free."""
        began = self._started_at.pop(sandbox_id, None)
        if began is not None:
            self._usual_start_s += 0.1 * (time.monotonic() - began - self._usual_start_s)
        self._fill()

    def positions(self) -> dict[str, int]:
        """How many start before each waiting one, if nothing else comes. 0 is next."""
        lines = [(owner, iter(self._waiting[owner])) for owner in self._turns]
        order: dict[str, int] = {}
        while lines:
            going_on = []
            for owner, line in lines:
                sandbox_id = next(line, None)
                if sandbox_id is not None:
                    order[sandbox_id] = len(order)
                    going_on.append((owner, line))
            lines = going_on
        return order

    def position(self, sandbox_id: str) -> int | None:
        """As in `positions`, for one; None when it is not waiting."""
        owner = self._owner_of.get(sandbox_id)
        if owner is None:
            return None
        ahead = 0
        for other in self._waiting[owner]:
            if other == sandbox_id:
                break
            ahead += 1
        turn = self._turns.index(owner)
        total = ahead
        for index, other in enumerate(self._turns):
            if other != owner:
                total += min(len(self._waiting[other]), ahead + (1 if index < turn else 0))
        return total

    def _fill(self) -> None:
        while self._turns and len(self._started_at) < self._max_starting:
            owner = self._turns.popleft()
            line = self._waiting[owner]
            sandbox_id, _ = line.popitem(last=False)
            del self._owner_of[sandbox_id]
            if line:
                self._turns.append(owner)
            else:
                del self._waiting[owner]
            self._started_at[sandbox_id] = time.monotonic()
            self._start(sandbox_id)

    def _wait_estimate_s(self) -> float:
        rounds = len(self._owner_of) / self._max_starting
        return float(min(60, max(1, math.ceil(rounds * self._usual_start_s))))
