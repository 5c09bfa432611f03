"""When and how long to wait before a request is sent again: pure arithmetic, no I/O."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Exponential backoff with full jitter, bounded in total time.

    The n-th pause (from 0) is uniform in [0, min(cap_s, base_s · 2ⁿ)], added to what the service asked for in
    Retry-After. total_s: no pause begins that would end later than this after the first attempt; 0 turns
    retries off. first_contact_s: the same bound as long as nothing has ever answered at the address, where
    a wrong URL is likelier than a restart.
    """

    total_s: float = 60.0
    base_s: float = 0.1
    cap_s: float = 5.0
    first_contact_s: float = 3.0


class Backoff:
    """The pauses of one logical request."""

    def __init__(
        self,
        policy: RetryPolicy,
        *,
        clock: Callable[[], float] = time.monotonic,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._policy = policy
        self._clock = clock
        self._uniform = uniform
        self._began = clock()
        self._attempts = 0

    def pause_s(self, retry_after_s: float | None = None, *, first_contact: bool = False) -> float | None:
        """Seconds to wait before the next attempt; None when the time for retries is over."""
        policy = self._policy
        ceiling = min(policy.cap_s, policy.base_s * 2 ** min(self._attempts, 30))
        self._attempts += 1
        pause = max(0.0, retry_after_s or 0.0) + self._uniform(0.0, ceiling)
        total = min(policy.total_s, policy.first_contact_s) if first_contact else policy.total_s
        return pause if self._clock() - self._began + pause <= total else None


def parse_retry_after(value: str | None, now: float | None = None) -> float | None:
    """Seconds from a Retry-After header, which holds a number or an HTTP date; None if it is neither."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            moment = parsedate_to_datetime(value).timestamp()
        except (ValueError, OverflowError):
            return None
        return max(0.0, moment - (time.time() if now is None else now))
    return seconds if 0 <= seconds < 1e6 else None
