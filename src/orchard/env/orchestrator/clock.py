"""Time that decides: it goes forward at its own pace, whatever happens to the wall clock."""

from __future__ import annotations

import time
from pathlib import Path


def boot_id() -> str:
    """Names this run of the kernel: monotonic times of the same run can be compared across processes."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return ""


class SteadyClock:
    """Seconds since a beginning that is the clock's own. base: what to add to the monotonic clock of this run of the
    kernel."""

    def __init__(self, base: float = 0.0) -> None:
        self.base = base

    @classmethod
    def resumed(cls, boot: str, base: float, latest: float) -> SteadyClock:
        """One that goes on where another stood, which was kept with `boot` and `base`. latest: the latest time that is
        known of it: after the machine was started anew it goes on from there."""
        if boot and boot == boot_id():
            return cls(base)
        return cls(latest - time.monotonic())

    def now(self) -> float:
        return self.base + time.monotonic()
