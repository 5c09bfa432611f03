"""Where and of what a result was measured."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import uvloop

ROOT = Path(__file__).resolve().parents[1]


def _git(*arguments: str) -> str:
    result = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    return result.stdout.strip()


def _field(path: str, name: str) -> str:
    for line in Path(path).read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return "unknown"


def describe() -> dict[str, Any]:
    """Commit, date, machine and versions, as they go into the JSON result."""
    return {
        "commit": _git("rev-parse", "HEAD") or "unknown",
        "uncommitted_changes": bool(
            _git("status", "--porcelain", "--untracked-files=no", "--", "src", "benchmarks")
        ),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "cpu": _field("/proc/cpuinfo", "model name"),
            "cores": len(os.sched_getaffinity(0)),
            "memory_mib": int(_field("/proc/meminfo", "MemTotal").split()[0]) // 1024,
            "load_average_before": os.getloadavg()[0],
            "system": platform.freedesktop_os_release().get("PRETTY_NAME", "unknown"),
            "kernel": platform.release(),
            "root": os.geteuid() == 0,
        },
        "versions": {"python": platform.python_version(), "uvloop": uvloop.__version__},
    }
