"""Quotas as arithmetic: what fits, what never will, when the next creation is due."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchard.env.contract import CreateSandbox
from orchard.env.errors import InvalidRequest, QuotaExceeded
from orchard.env.orchestrator.quotas import Quotas, Rates, Use, check_use


def body(**fields: object) -> CreateSandbox:
    return CreateSandbox.model_validate({"image": "x", **fields})


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@given(st.lists(st.sampled_from(["10m", "0.1", "1", "333m", "2.5"]), max_size=20))
def test_what_is_added_and_taken_away_again_leaves_nothing(cpus: list[str]) -> None:
    use = Use()
    for cpu in cpus:
        use.count(body(cpu=cpu, memory="1.1Gi"))
    for cpu in reversed(cpus):
        use.count(body(cpu=cpu, memory="1.1Gi"), -1)
    assert use == Use()


def test_the_last_bit_of_a_quota_may_be_used() -> None:
    use = Use()
    for _ in range(10):
        check_use("a", Quotas(max_cpu=1.0, max_memory=10 << 30), use, body(cpu="100m", memory="1Gi"))
        use.count(body(cpu="100m", memory="1Gi"))
    with pytest.raises(QuotaExceeded, match="1 are in use"):
        check_use("a", Quotas(max_cpu=1.0), use, body(cpu="10m"))
    with pytest.raises(QuotaExceeded, match="memory"):
        check_use("a", Quotas(max_memory=10 << 30), use, body(memory="1"))


@pytest.mark.parametrize(
    ("quotas", "fields"),
    [
        (Quotas(max_cpu=2), {"cpu": "3"}),
        (Quotas(max_memory=1 << 30), {"memory": "2Gi"}),
        (Quotas(max_sandboxes=0), {}),
    ],
)
def test_what_will_never_fit_is_not_to_be_tried_again(quotas: Quotas, fields: dict[str, str]) -> None:
    with pytest.raises(QuotaExceeded) as raised:
        check_use("a", quotas, Use(), body(**fields))
    assert (raised.value.retryable, raised.value.retry_after_s) == (False, None)


@pytest.mark.parametrize(
    ("quotas", "field"), [(Quotas(max_cpu=2), "cpu"), (Quotas(max_memory=1 << 30), "memory")]
)
def test_a_summed_quota_needs_every_sandbox_to_say_its_share(quotas: Quotas, field: str) -> None:
    with pytest.raises(InvalidRequest, match=f"give {field}"):
        check_use("a", quotas, Use(), body())


def test_a_minutes_worth_may_come_at_once_and_the_next_when_told() -> None:
    clock = Clock()
    rates = Rates(clock)
    for _ in range(6):
        rates.check("a", 6)
        rates.take("a", 6)
    with pytest.raises(QuotaExceeded) as raised:
        rates.check("a", 6)
    assert raised.value.retry_after_s == 10.0
    clock.now += 9.9
    with pytest.raises(QuotaExceeded):
        rates.check("a", 6)
    clock.now += 0.1
    rates.check("a", 6)


@given(st.integers(1, 10_000), st.integers(0, 100))
def test_after_the_time_told_a_creation_is_allowed(per_minute: int, early_ms: int) -> None:
    clock = Clock()
    rates = Rates(clock)
    for _ in range(per_minute):
        rates.take("a", per_minute)
    clock.now += early_ms / 1000
    try:
        rates.check("a", per_minute)
    except QuotaExceeded as error:
        assert error.retry_after_s is not None
        clock.now += error.retry_after_s
        rates.check("a", per_minute)


def test_owners_have_rates_of_their_own() -> None:
    rates = Rates(Clock())
    rates.take("a", 1)
    rates.check("b", 1)
    with pytest.raises(QuotaExceeded):
        rates.check("a", 1)


def test_checking_takes_nothing() -> None:
    rates = Rates(Clock())
    for _ in range(5):
        rates.check("a", 1)
