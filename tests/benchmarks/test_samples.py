"""What is told of samples is true of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.samples import latency, percentile, throughput
from benchmarks.targets import Target

times = st.lists(st.floats(0, 1e3, allow_nan=False), min_size=1, max_size=300)


@given(times, st.floats(0.01, 1))
def test_percentile_is_the_smallest_sample_that_covers_the_share(samples: list[float], share: float) -> None:
    value = percentile(samples, share)
    assert value in samples
    assert sum(sample <= value for sample in samples) >= share * len(samples) - 1e-6
    assert sum(sample < value for sample in samples) < share * len(samples) + 1e-6


def test_percentiles_of_a_hundred() -> None:
    assert latency([number / 1000 for number in range(1, 101)]) == {
        "p50_ms": 50.0, "p99_ms": 99.0, "mean_ms": 50.5, "n": 100,
    }  # fmt: skip


def test_throughput_counts_wall_time_once() -> None:
    assert throughput([0.5, 0.5, 0.5, 0.5], 1.0)["per_s"] == 4.0


@pytest.mark.parametrize(
    ("least", "value", "met"), [(False, 8, True), (False, 8.1, False), (True, 8, True), (True, 7.9, False)]
)
def test_target_bounds_are_inclusive(least: bool, value: float, met: bool) -> None:
    target = Target("metric", "field", 8, least=least)
    assert target.met({target.tool: {"metric": {"field": value}}}) is met


def test_target_without_a_measurement_is_unknown() -> None:
    assert Target("metric", "field", 8).met({}) is None
