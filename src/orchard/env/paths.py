"""Where the service keeps its state."""

from __future__ import annotations

import os
from pathlib import Path


def default_state_dir() -> Path:
    """`/var/lib/orchard` for root, else `orchard` under the XDG state home."""
    if os.geteuid() == 0:
        return Path("/var/lib/orchard")
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "orchard"
