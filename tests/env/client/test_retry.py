"""The arithmetic of retries."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from orchard.env.client.retry import Backoff, RetryPolicy, parse_retry_after


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def longest(_low: float, high: float) -> float:
    return high


def test_pauses_double_up_to_the_cap() -> None:
    backoff = Backoff(RetryPolicy(base_s=0.1, cap_s=0.5), clock=Clock(), uniform=longest)
    assert [backoff.pause_s() for _ in range(5)] == [0.1, 0.2, 0.4, 0.5, 0.5]


def test_pauses_are_uniform_from_zero() -> None:
    drawn: list[tuple[float, float]] = []

    def record(low: float, high: float) -> float:
        drawn.append((low, high))
        return low

    Backoff(RetryPolicy(base_s=0.1), clock=Clock(), uniform=record).pause_s()
    assert drawn == [(0.0, 0.1)]


def test_retry_after_is_a_lower_bound() -> None:
    backoff = Backoff(RetryPolicy(base_s=0.1), clock=Clock(), uniform=longest)
    assert backoff.pause_s(7) == 7.1


def test_no_pause_ends_after_the_total() -> None:
    clock = Clock()
    backoff = Backoff(RetryPolicy(total_s=10, base_s=1, cap_s=1), clock=clock, uniform=longest)
    assert backoff.pause_s(20) is None
    clock.now += 9
    assert backoff.pause_s() == 1
    clock.now += 0.5
    assert backoff.pause_s() is None


def test_first_contact_has_its_own_bound() -> None:
    clock = Clock()
    backoff = Backoff(
        RetryPolicy(total_s=60, first_contact_s=3, base_s=1, cap_s=1), clock=clock, uniform=longest
    )
    clock.now += 2.5
    assert backoff.pause_s(first_contact=True) is None
    assert backoff.pause_s() == 1


def test_total_of_zero_means_no_retries() -> None:
    assert Backoff(RetryPolicy(total_s=0), clock=Clock(), uniform=longest).pause_s() is None


@given(st.floats(0, 100), st.integers(1, 200))
def test_any_number_of_attempts_ends_in_time(total_s: float, attempts: int) -> None:
    clock = Clock()
    backoff = Backoff(RetryPolicy(total_s=total_s), clock=clock, uniform=longest)
    for _ in range(attempts):
        pause_s = backoff.pause_s()
        if pause_s is None:
            break
        clock.now += pause_s
    assert clock.now - 1000.0 <= total_s + 1e-6


def test_retry_after_as_number_and_date() -> None:
    assert parse_retry_after("1.5") == 1.5
    assert parse_retry_after("Thu, 01 Jan 1970 00:01:40 GMT", now=40.0) == 60.0
    assert parse_retry_after("Thu, 01 Jan 1970 00:01:40 GMT", now=400.0) == 0.0


@given(st.text(max_size=40))
def test_any_retry_after_is_harmless(text: str) -> None:
    seconds = parse_retry_after(text, now=0.0)
    assert seconds is None or seconds >= 0
