"""Two minutes of the soak (`experiments/soak`): everything that can die does, and nothing that was acknowledged is lost."""

from __future__ import annotations

import os
from pathlib import Path

from experiments.soak.__main__ import soak

SEED = int(os.environ.get("ORCHARD_CHAOS_SEED", "20240607"))
SECONDS = float(os.environ.get("ORCHARD_SOAK_SECONDS", "120"))


def test_nothing_that_was_acknowledged_is_lost(tmp_path: Path) -> None:
    result = soak(tmp_path, SECONDS, clients=64, seed=SEED)
    assert result["acknowledged_commands"] > 100, result
    assert {name: found for name, found in result["faults"].items() if found} == {}, f"seed {SEED}"
