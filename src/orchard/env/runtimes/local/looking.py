"""What the local runtime tells of the machine, and of a live sandbox."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from orchard.env.runtimes.local.disk import meminfo
from orchard.env.runtimes.local.ordinary import Ordinary


def resources(folder: Path) -> dict[str, Any]:
    """Capacity and use of the machine, as `Runtime.resources`; the disk is that of `folder`."""
    disk = shutil.disk_usage(folder)
    memory = meminfo()
    return {
        "cpu_cores": float(len(os.sched_getaffinity(0))),
        "memory_bytes": memory.get("MemTotal", 0),
        "memory_available_bytes": memory.get("MemAvailable", 0),
        "disk_bytes": disk.total,
        "disk_available_bytes": disk.free,
        "load": list(os.getloadavg()),
    }


def described(enforced: set[str], ordinary: Ordinary | None) -> list[str]:
    """Lines for the log: what is enforced here and what is weaker."""
    whose = "" if ordinary is None else " of an ordinary user"
    lines = [
        f"isolation: user, mount, pid, net, ipc, uts and cgroup namespaces{whose}, seccomp, no_new_privs, "
        "dropped capabilities",
        f"limits enforced: {', '.join(sorted(enforced)) or 'none'}",
    ]
    if ordinary is not None:
        return [*lines, *(f"weaker: {line}" for line in ordinary.weaker(enforced))]
    for name in sorted({"cpu", "memory", "pids"} - enforced):
        lines.append(f"weaker: no {name} limit can be enforced here (no {name} cgroup controller)")
    if shutil.which("nft") is None:
        lines.append(
            "weaker: block_network=false and allow_egress are refused (nft is not installed: package nftables)"
        )
    return lines
