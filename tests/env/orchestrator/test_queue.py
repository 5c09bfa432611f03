"""The create queue: a cap, fairness between owners, places told truly."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchard.env.errors import Overloaded
from orchard.env.orchestrator.queue import CreateQueue


def make(max_starting: int = 1, max_waiting: int = 1000) -> tuple[CreateQueue, list[str]]:
    started: list[str] = []
    return CreateQueue(max_starting, max_waiting, started.append), started


def test_no_more_than_the_cap_start_at_once() -> None:
    queue, started = make(max_starting=2)
    for name in "abcd":
        queue.push("me", name)
    assert started == ["a", "b"]
    assert (queue.starting, len(queue)) == (2, 2)
    queue.finished("a")
    assert started == ["a", "b", "c"]


def test_owners_take_turns() -> None:
    queue, started = make()
    for number in range(3):
        queue.push("crowd", f"c{number}")
    queue.push("single", "s0")
    for _ in range(3):
        queue.finished(started[-1])
    assert started == ["c0", "c1", "s0", "c2"]


def test_what_was_accepted_before_is_never_refused() -> None:
    queue, _ = make(max_waiting=1)
    queue.push("me", "a")
    queue.push("me", "b")
    with pytest.raises(Overloaded) as caught:
        queue.push("me", "c")
    assert caught.value.retry_after_s is not None and caught.value.retry_after_s >= 1
    queue.push("me", "d", forced=True)
    assert len(queue) == 2


def test_what_is_removed_does_not_start() -> None:
    queue, started = make()
    for name in "abc":
        queue.push("me", name)
    assert queue.remove("b")
    assert not queue.remove("b")
    assert not queue.remove("a"), "it has started already"
    queue.finished("a")
    assert started == ["a", "c"]


@given(
    owners=st.lists(st.sampled_from("xyz"), max_size=40),
    removed=st.sets(st.integers(0, 39)),
    cap=st.integers(1, 4),
)
def test_the_places_told_are_the_order_of_starting(owners: list[str], removed: set[int], cap: int) -> None:
    queue, started = make(max_starting=cap)
    for number, owner in enumerate(owners):
        queue.push(owner, f"{owner}{number}")
    for number in removed:
        if number < len(owners):
            queue.remove(f"{owners[number]}{number}")
    places = queue.positions()
    assert {name: queue.position(name) for name in places} == places
    begun = len(started)
    index = 0
    while index < len(started):
        queue.finished(started[index])
        index += 1
    assert started[begun:] == sorted(places, key=places.__getitem__)
    assert (len(queue), queue.starting) == (0, 0)
