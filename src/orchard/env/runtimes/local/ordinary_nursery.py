"""What differs in the zygote of an ordinary user. Loaded for such a one only: modules are memory of every sandbox."""

from __future__ import annotations

import os
import struct

from orchard.env.agent.containment import CgroupContainment
from orchard.env.agent.marks import MarkContainment, limit_processes, own_score
from orchard.env.runtimes.local import kernel
from orchard.env.runtimes.local.delegated import DelegatedCgroups
from orchard.env.runtimes.local.nursery import Nursery
from orchard.env.runtimes.local.processes import Processes, process_name
from orchard.env.runtimes.local.removal import remove_all
from orchard.env.runtimes.local.userns import become_root, check_proc

TYPE_CHECKING = False  # importing typing would cost every sandbox most of a megabyte
if TYPE_CHECKING:
    from typing import Any

    from orchard.env.agent.containment import Containment
    from orchard.env.runtimes.local.cgroups import Cgroups


class OrdinaryNursery(Nursery):
    """With the same ids for all sandboxes. ordinary: `Ordinary.to_wire()`."""

    def __init__(self, state_dir: str, control_fd: int, instance: str, ordinary: dict[str, Any]) -> None:
        self._ordinary = ordinary
        group, self._words = ordinary["group"], None
        if group:
            groups: Cgroups | Processes = DelegatedCgroups(instance, group, state_dir)
        else:
            groups = Processes(state_dir)
            self._words = struct.unpack("<QQ", os.urandom(16))
        super().__init__(state_dir, groups, control_fd, self._words)
        self.ids = ordinary["ids"]

    def enter(self) -> None:
        become_root(self._ordinary["uids"], self._ordinary["gids"])
        check_proc()
        # The midwives come back to these: the machine's own could only be left.
        kernel.unshare(kernel.CLONE_NEWNET | kernel.CLONE_NEWUTS)

    def note(self, pid: int) -> dict[str, str]:
        return {"process": process_name(pid)}

    def contain(self, groups: dict[str, int], told: dict[str, Any]) -> Containment:
        if self._words is not None:
            return MarkContainment(groups["score"], told["pids"], self._words)
        if "pids" not in self.cgroups.enforced():
            limit_processes(told["pids"])
        containment = CgroupContainment(groups)
        containment.home_score = b"%d" % own_score()
        return containment

    def remove(self, launch: int, sandbox_id: str) -> None:
        if os.fork() == 0:
            try:
                remove_all(f"{self.state_dir}/sandboxes/{sandbox_id}")
                self.tell("delivered", launch, pid=0)
            except OSError as error:
                self.tell_failure(launch, error)
            finally:
                os._exit(0)
