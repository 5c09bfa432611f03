"""Refused attempts, gathered: each kind is told at once, then at most once a second with how often it happened since.

A sandbox that is refused more different things than anybody would read is told of in sums: what it does must not push
out what happens to others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

#: Reports of one sandbox: so many at once, and so many a second in the long run.
BURST = 50
PER_SECOND = 2.0
INTERVAL_S = 1.0
_SUM_INTERVAL_S = 5.0
_FORGET_S = 10.0
_KINDS_PER_SOURCE = 256


@dataclass(frozen=True, slots=True)
class Refusal:
    """One refused attempt of the sandbox at `source`; the rest as in `EgressDenial`."""

    protocol: str
    reason: str
    destination: str | None = None
    name: str | None = None
    port: int | None = None


@dataclass(slots=True)
class _Kind:
    told_at: float
    untold: int = 0


@dataclass(slots=True)
class _Source:
    allowance: float
    refilled_at: float
    kinds: dict[Refusal, _Kind] = field(default_factory=dict)
    beyond: int = 0
    beyond_told_at: float = float("-inf")

    def may_tell(self, now: float) -> bool:
        self.allowance = min(BURST, self.allowance + (now - self.refilled_at) * PER_SECOND)
        self.refilled_at = now
        if self.allowance < 1:
            return False
        self.allowance -= 1
        return True


SEVERAL = Refusal("several", "more different attempts were refused than are reported one by one")


class Denials:
    """tell: called with the source, what was refused, and how often. Times are seconds of one clock."""

    def __init__(self, tell: Callable[[str, Refusal, int], None]) -> None:
        self._tell = tell
        self._sources: dict[str, _Source] = {}

    def refused(self, source: str, refusal: Refusal, now: float) -> None:
        about = self._sources.get(source)
        if about is None:
            about = self._sources[source] = _Source(BURST, now)
        kind = about.kinds.get(refusal)
        if kind is not None:
            kind.untold += 1
        elif len(about.kinds) < _KINDS_PER_SOURCE and about.may_tell(now):
            about.kinds[refusal] = _Kind(now)
            self._tell(source, refusal, 1)
        else:
            about.beyond += 1

    def tick(self, now: float) -> None:
        """Tell what has gathered; call it about once a second."""
        for source, about in list(self._sources.items()):
            for refusal, kind in list(about.kinds.items()):
                if kind.untold and now - kind.told_at >= INTERVAL_S:
                    if about.may_tell(now):
                        self._tell(source, refusal, kind.untold)
                    else:
                        about.beyond += kind.untold
                    kind.untold, kind.told_at = 0, now
                elif not kind.untold and now - kind.told_at >= _FORGET_S:
                    del about.kinds[refusal]
            if about.beyond and now - about.beyond_told_at >= _SUM_INTERVAL_S:
                self._tell(source, SEVERAL, about.beyond)
                about.beyond, about.beyond_told_at = 0, now
            if not about.kinds and not about.beyond and now - about.refilled_at >= BURST / PER_SECOND:
                del self._sources[source]

    def forget(self, source: str) -> None:
        """The sandbox is gone."""
        self._sources.pop(source, None)
