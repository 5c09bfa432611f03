"""The control groups that an ordinary user may use: the version 2 group that it was given (delegation)."""

from __future__ import annotations

import os

from orchard.env.runtimes.local import kernel
from orchard.env.runtimes.local.cgroups import Cgroups, read
from orchard.env.runtimes.local.processes import Processes

_SERVICE = "orchard-service"
_SWEEPS = 100


def delegated_group() -> str:
    """The directory of this process' own version 2 group if it may make groups there, else nothing."""
    root = ""
    for line in (read("/proc/self/mounts") or "").splitlines():
        _, target, kind, _ = line.split(" ", 3)
        if kind == "cgroup2" and not root:
            root = target
    for line in (read("/proc/self/cgroup") or "").splitlines():
        number, _, path = line.split(":", 2)
        if root and number == "0":
            # Where an earlier service has moved what was there, this one's parent included.
            group = f"{root}{path.removesuffix(f'/{_SERVICE}')}"
            wanted = (group, f"{group}/cgroup.procs", f"{group}/cgroup.subtree_control")
            return group if all(os.access(name, os.W_OK) for name in wanted) else ""
    return ""


class DelegatedCgroups(Cgroups):
    """Below `group`, with the controllers that came with it. After a restart elsewhere, sandboxes are still in the groups
    that they were made in: so their processes are found by themselves."""

    def __init__(self, instance: str, group: str, state_dir: str) -> None:
        controllers = frozenset((read(f"{group}/cgroup.controllers") or "").split())
        super().__init__(instance, group, {}, controllers & {"memory", "pids", "cpu"})
        self._processes = Processes(state_dir)

    def prepare(self) -> None:
        if self.v2_controllers:
            self._make_room()
        super().prepare()

    def _make_room(self) -> None:
        """A group whose children are limited may have no processes itself: this service's go to a child of it."""
        os.makedirs(f"{self.v2_root}/{_SERVICE}", exist_ok=True)
        for _ in range(_SWEEPS):
            found = (read(f"{self.v2_root}/cgroup.procs") or "").split()
            if not found:
                return
            for pid in found:
                try:
                    kernel.write_control(f"{self.v2_root}/{_SERVICE}/cgroup.procs", pid)
                except ProcessLookupError:
                    continue

    def kill(self, sandbox_id: str) -> None:
        super().kill(sandbox_id)
        self._processes.kill(sandbox_id)

    def empty(self, sandbox_id: str) -> bool:
        return super().empty(sandbox_id) and self._processes.empty(sandbox_id)
