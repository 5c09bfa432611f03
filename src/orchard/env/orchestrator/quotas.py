"""What one key may use: its limits as a keys file states them, what an owner uses now, and how fast it creates."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from orchard.env.contract import CreateSandbox, parse_bytes, parse_cpu
from orchard.env.errors import InvalidRequest, QuotaExceeded, SettingsError

#: When something may have been deleted: nobody knows better.
_RETRY_S = 5.0


@dataclass(frozen=True, slots=True)
class Quotas:
    """Limits of one key; None means no limit.

    max_sandboxes: live sandboxes. max_cpu: cores, max_memory: bytes, summed over live sandboxes; each new one must
    then say its own. creates_per_minute: creations in the long run; as many may come at once after a quiet minute.
    They are checked against what the key's owner has, whichever of its keys it was created with.
    """

    max_sandboxes: int | None = None
    max_cpu: float | None = None
    max_memory: int | None = None
    creates_per_minute: int | None = None

    @property
    def limited(self) -> bool:
        """Any of them is set."""
        return self != NO_QUOTAS

    @classmethod
    def parse(cls, where: str, entry: dict[str, Any]) -> Quotas:
        """The quotas among the fields of a keys file's entry. Raises `SettingsError` that begins with `where`."""
        return cls(
            max_sandboxes=_count(where, entry, "max_sandboxes", 0),
            max_cpu=_amount(where, entry, "max_cpu", parse_cpu, "cores, such as 8 or '500m'"),
            max_memory=_amount(where, entry, "max_memory", parse_bytes, "bytes, such as '64Gi'"),
            creates_per_minute=_count(where, entry, "creates_per_minute", 1),
        )


NO_QUOTAS = Quotas()
QUOTA_NAMES = frozenset(Quotas.__slots__)


def _count(where: str, entry: dict[str, Any], name: str, least: int) -> int | None:
    value = entry.get(name)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
        raise SettingsError(f"{where}: {name} must be a whole number of at least {least}, not {value!r:.40}")
    return value


def _amount(where: str, entry: dict[str, Any], name: str, parse: Callable[[str], Any], hint: str) -> Any:
    value = entry.get(name)
    if value is None:
        return None
    try:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError
        return parse(value if isinstance(value, str) else f"{value:.9f}".rstrip("0").rstrip("."))
    except ValueError:
        raise SettingsError(f"{where}: {name} must be {hint}, not {value!r:.40}") from None


@dataclass(slots=True)
class Use:
    """What the live sandboxes of one owner hold. Whole numbers, so that adding and taking away leaves zero."""

    sandboxes: int = 0
    cpu_millionths: int = 0
    memory_bytes: int = 0

    def count(self, body: CreateSandbox, times: int = 1) -> None:
        """Add a sandbox; take it away with times=-1. One that did not say its cores or memory counts none."""
        self.sandboxes += times
        self.cpu_millionths += times * _millionths(body)
        self.memory_bytes += times * (parse_bytes(body.memory) if body.memory else 0)

    def __add__(self, other: Use) -> Use:
        return Use(
            self.sandboxes + other.sandboxes,
            self.cpu_millionths + other.cpu_millionths,
            self.memory_bytes + other.memory_bytes,
        )


@dataclass(frozen=True, slots=True)
class Others:
    """What other services hold: `use` of the one owner that is asked about, `live` sandboxes of all owners."""

    use: Use
    live: int


def _millionths(body: CreateSandbox) -> int:
    return round(parse_cpu(body.cpu) * 1_000_000) if body.cpu else 0


def check_use(owner: str, quotas: Quotas, use: Use, body: CreateSandbox) -> None:
    """Whether one more sandbox fits. Raises `QuotaExceeded`, with `retryable` false when it never will, and
    `InvalidRequest` for one that does not say what it will use."""
    limit = quotas.max_sandboxes
    if limit is not None and use.sandboxes >= limit:
        raise _exceeded(
            "max_sandboxes", f"{owner} may have {limit} live sandboxes; delete some first", limit > 0
        )
    if quotas.max_cpu is not None:
        wanted, most = _millionths(body), round(quotas.max_cpu * 1_000_000)
        if not wanted:
            raise _unsaid("cpu", f"{quotas.max_cpu:g} cores", "1")
        if use.cpu_millionths + wanted > most:
            raise _exceeded(
                "max_cpu",
                f"{owner} may use {quotas.max_cpu:g} cores at once and {use.cpu_millionths / 1e6:g} are in use:"
                f" {wanted / 1e6:g} more do not fit; ask for less, or delete some sandboxes first",
                wanted <= most,
            )
    if quotas.max_memory is not None:
        wanted = parse_bytes(body.memory) if body.memory else 0
        if not wanted:
            raise _unsaid("memory", f"{quotas.max_memory} bytes", "1Gi")
        if use.memory_bytes + wanted > quotas.max_memory:
            raise _exceeded(
                "max_memory",
                f"{owner} may use {quotas.max_memory} bytes of memory at once and {use.memory_bytes} are in use:"
                f" {wanted} more do not fit; ask for less, or delete some sandboxes first",
                wanted <= quotas.max_memory,
            )


def _exceeded(quota: str, detail: str, may_fit_later: bool) -> QuotaExceeded:
    error = QuotaExceeded(detail, retry_after_s=_RETRY_S if may_fit_later else None, quota=quota)
    error.retryable = may_fit_later
    return error


def _unsaid(field: str, limit: str, example: str) -> InvalidRequest:
    return InvalidRequest(
        f"{field}: this key may use {limit} over all of its sandboxes, so each must say how much: give {field},"
        f' such as "{example}"'
    )


class Rates:
    """Token buckets of creations, one for each owner: a minute's worth at most, refilled evenly."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        #: owner → (creations left, when that was so)
        self._left: dict[str, tuple[float, float]] = {}

    def check(self, owner: str, per_minute: int | None) -> None:
        """Raises `QuotaExceeded` with the seconds after which the next creation is allowed."""
        if per_minute is None:
            return
        left, _ = self._now(owner, per_minute)
        if left < 1:
            wait_s = math.ceil((1 - left) * 60_000 / per_minute) / 1000
            raise QuotaExceeded(
                f"{owner} may create {per_minute} sandboxes a minute; the next one in {wait_s:.1f} s",
                retry_after_s=wait_s,
                quota="creates_per_minute",
            )

    def take(self, owner: str, per_minute: int | None) -> None:
        """One was created."""
        if per_minute is not None:
            left, now = self._now(owner, per_minute)
            self._left[owner] = (left - 1, now)

    def _now(self, owner: str, per_minute: int) -> tuple[float, float]:
        now = self._clock()
        left, at = self._left.get(owner, (float(per_minute), now))
        # The tolerance: a creation is due after the seconds told, whatever the last bits of a product of floats.
        return min(float(per_minute), left + (now - at) * per_minute / 60 + 1e-9), now
