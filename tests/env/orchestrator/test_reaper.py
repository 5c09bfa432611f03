"""Deadlines on one timer."""

from __future__ import annotations

import asyncio
import time

from orchard.env.orchestrator.reaper import Reaper


class Watch:
    """Deadlines by name; expired names in order, each removed."""

    def __init__(self) -> None:
        self.deadlines: dict[str, float] = {}
        self.expired: list[str] = []
        self.some = asyncio.Event()
        self.reaper = Reaper(self.deadlines.get, self._expire)

    def _expire(self, name: str) -> None:
        del self.deadlines[name]
        self.expired.append(name)
        self.some.set()

    def put(self, name: str, in_s: float) -> None:
        self.deadlines[name] = time.monotonic() + in_s
        self.reaper.watch(name)

    async def until(self, count: int) -> None:
        async with asyncio.timeout(10):
            while len(self.expired) < count:
                self.some.clear()
                await self.some.wait()


async def test_names_expire_in_the_order_of_their_deadlines() -> None:
    watch = Watch()
    for name, in_s in (("c", 0.09), ("a", 0.01), ("b", 0.05)):
        watch.put(name, in_s)
    await watch.until(3)
    assert watch.expired == ["a", "b", "c"]


async def test_a_deadline_may_move_both_ways() -> None:
    watch = Watch()
    watch.put("later", 0.02)
    watch.put("sooner", 60)
    watch.deadlines["later"] += 0.1
    watch.put("sooner", 0.03)
    await watch.until(2)
    assert watch.expired == ["sooner", "later"]


async def test_a_name_expires_once_and_forgotten_ones_never() -> None:
    watch = Watch()
    for _ in range(5):
        watch.put("a", 0.01)
    watch.put("gone", 0.01)
    del watch.deadlines["gone"]
    watch.reaper.forget("gone")
    watch.put("last", 0.05)
    await watch.until(2)
    assert watch.expired == ["a", "last"]


async def test_forgotten_names_do_not_pile_up() -> None:
    watch = Watch()
    for number in range(10_000):
        watch.put(f"n{number}", 3600)
        del watch.deadlines[f"n{number}"]
        watch.reaper.forget(f"n{number}")
    assert len(watch.reaper._heap) < 200


async def test_nothing_expires_after_stop() -> None:
    watch = Watch()
    watch.put("a", 0.01)
    watch.reaper.stop()
    watch.put("b", 0.0)
    await asyncio.sleep(0.05)
    assert watch.expired == []
