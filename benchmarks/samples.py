"""Samples and what is told of them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

#: What one tool measured: metric → field → number or text.
Metrics = dict[str, dict[str, Any]]


def percentile(samples: Sequence[float], share: float) -> float:
    """The smallest sample that at least `share` of the samples do not exceed (nearest rank)."""
    ranked = sorted(samples)
    return ranked[max(0, math.ceil(share * len(ranked)) - 1)]


def latency(seconds: Sequence[float]) -> dict[str, float]:
    """p50, p99 and mean in milliseconds, and the number of samples."""
    milliseconds = [1000 * value for value in seconds]
    return {
        "p50_ms": round(percentile(milliseconds, 0.50), 3),
        "p99_ms": round(percentile(milliseconds, 0.99), 3),
        "mean_ms": round(sum(milliseconds) / len(milliseconds), 3),
        "n": len(milliseconds),
    }


def throughput(seconds: Sequence[float], wall_s: float) -> dict[str, float]:
    """The same, and operations per second of wall time."""
    return {**latency(seconds), "per_s": round(len(seconds) / wall_s, 1), "wall_s": round(wall_s, 3)}


@contextmanager
def timed(samples: list[float]) -> Iterator[None]:
    """Appends the seconds that the block took."""
    began = time.perf_counter()
    yield
    samples.append(time.perf_counter() - began)


def run_threads(count: int, workers: int, work: Callable[[int], None]) -> dict[str, float]:
    """`work(0)` … `work(count - 1)` on `workers` threads: their latencies and throughput."""
    samples: list[float] = []

    def one(number: int) -> None:
        with timed(samples):
            work(number)

    began = time.perf_counter()
    with ThreadPoolExecutor(workers) as pool:
        for _ in pool.map(one, range(count)):
            pass
    return throughput(samples, time.perf_counter() - began)


def memory_available() -> int:
    """MemAvailable of this machine in bytes, the highest of several readings: reclaim lags behind."""
    readings = []
    for _ in range(5):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                readings.append(int(line.split()[1]) * 1024)
        time.sleep(0.2)
    return max(readings)


def memory_each(before: int, after: int, count: int) -> dict[str, float]:
    """The fall of MemAvailable, for each of `count` sandboxes."""
    return {"mib_each": round((before - after) / count / 2**20, 3), "n": count}
