"""Waiting on conditions instead of sleeping and hoping."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def eventually(probe: Callable[[], T], what: str, within_s: float = 30.0, every_s: float = 0.02) -> T:
    """The first truthy value of `probe()`; AssertionError naming `what` when there is none within `within_s`."""
    deadline = time.monotonic() + within_s
    while True:
        value = probe()
        if value:
            return value
        if time.monotonic() >= deadline:
            raise AssertionError(f"not within {within_s:g} s: {what} (last seen: {value!r:.500})")
        time.sleep(every_s)


class Stopwatch:
    """Seconds since it was made; for deadlines that are semantics, never for speed."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start
