"""The sandboxes' control groups, on version 1, version 2 and the mixture of both.

Layout, in every hierarchy: `orchard/<instance>/<sandbox>`. In version 2 the sandbox's group is the agent's
home; `box` below it holds user code, one group per running command, and `spawn` what is being started. Limits
sit on `box`, so that the agent is never throttled or killed by them, the process limit on a group around both, so
that it holds from the first moment. In version 1 the sandbox's own group holds user code and its limits, and the
agent stays in the service's group, but for the moment in which it starts a process.
"""

from __future__ import annotations

import os
import time

from orchard.env.runtimes.local import kernel

TYPE_CHECKING = False  # importing typing would cost every sandbox most of a megabyte
if TYPE_CHECKING:
    from typing import Any

    from orchard.env.runtimes.local.spec import LaunchSpec

_V1_CONTROLLERS = ("memory", "pids", "cpu")
_CPU_PERIOD_US = 100_000
DEFAULT_PIDS = 2048


def read(path: str) -> str | None:
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return None


def _read_int(path: str) -> int | None:
    text = read(path)
    # "max" and version 1's page-rounded 2⁶³ both mean no limit.
    return int(text) if text is not None and text.isdigit() and int(text) < 1 << 62 else None


def _field(text: str | None, name: str) -> int | None:
    for line in (text or "").splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return None


def _memory_limit(limits: LaunchSpec) -> int:
    """A limited disk lives in memory and is charged to the sandbox: it comes on top, else a full disk would leave no
    memory to run anything that could clear it."""
    return (limits.memory_bytes or 0) + (limits.disk_bytes or 0)


class Cgroups:
    """The groups of one service instance. `detect` finds the hierarchies; nothing is made before `prepare`."""

    def __init__(
        self, instance: str, v2_root: str, v1_roots: dict[str, str], v2_controllers: frozenset[str]
    ) -> None:
        self.instance = instance
        self.v2_root = v2_root
        self.v1_roots = v1_roots
        self.v2_controllers = v2_controllers
        self.v2 = f"{v2_root}/orchard/{instance}"
        self.v1 = {name: f"{root}/orchard/{instance}" for name, root in v1_roots.items()}
        self._own: dict[str, str] = {}
        self._swap_v1 = os.path.exists(f"{v1_roots.get('memory')}/memory.memsw.limit_in_bytes")

    @classmethod
    def detect(cls, instance: str, mounts: str = "/proc/self/mounts") -> Cgroups:
        """OSError if no version 2 hierarchy is mounted (it ends process trees and holds the commands)."""
        v2_root = ""
        v1_roots: dict[str, str] = {}
        for line in (read(mounts) or "").splitlines():
            _, target, kind, options = line.split(" ")[:4]
            if kind == "cgroup2" and not v2_root:
                v2_root = target
            elif kind == "cgroup":
                for name in _V1_CONTROLLERS:
                    if name in options.split(","):
                        v1_roots.setdefault(name, target)
        if not v2_root:
            raise OSError(
                "no cgroup2 hierarchy is mounted; mount one: mount -t cgroup2 none /sys/fs/cgroup/unified"
            )
        v2 = frozenset((read(f"{v2_root}/cgroup.controllers") or "").split())
        return cls(
            instance, v2_root, {n: r for n, r in v1_roots.items() if n not in v2}, v2 & set(_V1_CONTROLLERS)
        )

    def enforced(self) -> set[str]:
        """Which of cpu, memory and pids can be limited here."""
        return set(self.v1_roots) | set(self.v2_controllers)

    def favour_moves(self) -> bool:
        """Make moving processes between groups take microseconds instead of milliseconds; whether that is so.

        Every command moves the agent into a group and back. By default the kernel optimises for forks and makes each
        such move wait for a grace period of all cores (6 to 12 ms on an idle machine); `favordynmods`, made for this
        use, is an option of the version 2 mount and holds for all hierarchies.
        """
        for line in (read("/proc/self/mountinfo") or "").splitlines():
            fields, _, rest = line.partition(" - ")
            kind, _, options = rest.split(" ", 2)
            if kind == "cgroup2" and fields.split(" ")[4] == self.v2_root:
                # A remount replaces all options: those that are set are named again.
                kept = [name for name in options.split(",") if name not in ("rw", "ro", "favordynmods")]
                try:
                    kernel.remount(self.v2_root, fields.split(" ")[5], ",".join([*kept, "favordynmods"]))
                except OSError:
                    return False
                return True
        return False

    def prepare(self) -> None:
        for path in (self.v2, *self.v1.values()):
            os.makedirs(path, exist_ok=True)
        if "cpu" in self.v1:
            # All sandboxes together weigh as much as one busy process per core, however many they are: the
            # service and the agents, which are not among them, always get their turn.
            weight = str(1024 * (os.cpu_count() or 1))
            kernel.write_control(f"{os.path.dirname(self.v1['cpu'])}/cpu.shares", weight)
            kernel.write_control(f"{self.v1['cpu']}/cpu.shares", weight)
        if self.v2_controllers:
            enable = " ".join(f"+{name}" for name in sorted(self.v2_controllers))
            for folder in (self.v2_root, f"{self.v2_root}/orchard", self.v2):
                kernel.write_control(f"{folder}/cgroup.subtree_control", enable)

    def create(self, limits: LaunchSpec) -> None:
        """Make the groups of a sandbox; its root may make groups for commands in `box`."""
        sandbox_id, owner_uid = limits.sandbox_id, limits.base_uid
        home, user = f"{self.v2}/{sandbox_id}", self._user(sandbox_id)
        os.mkdir(home)
        if self.v2_controllers:
            # No processes beside children that are limited: the agent gets a leaf of its own.
            os.mkdir(f"{home}/agent")
            os.mkdir(user)
        os.mkdir(f"{user}/box")
        os.mkdir(f"{user}/spawn")
        os.chown(f"{user}/box", owner_uid, owner_uid)
        os.chown(f"{user}/cgroup.procs", owner_uid, owner_uid)
        for name, root in self.v1.items():
            path = f"{root}/{sandbox_id}"
            os.mkdir(path)
            self._limit_v1(name, path, limits)
        if self.v2_controllers:
            self._limit_v2(home, user, limits)

    def settle(self, sandbox_id: str, pid: int) -> None:
        """Put the sandbox's first process into its home."""
        kernel.write_control(f"{self._home(sandbox_id)}/cgroup.procs", str(pid))

    def open_containment(self, sandbox_id: str, opened: list[int]) -> list[str]:
        """Open what `CgroupContainment` works with, and append it to `opened`; the names, in that order."""
        user, procs, flags = self._user(sandbox_id), "cgroup.procs", os.O_CLOEXEC
        first = f"{user}/box/j0"
        os.mkdir(first)
        wanted = [
            ("box", f"{user}/box", os.O_RDONLY | os.O_DIRECTORY),
            ("home", f"{self._home(sandbox_id)}/{procs}", os.O_WRONLY),
            ("spawn", f"{user}/spawn/{procs}", os.O_RDWR),
            ("spawn_kill", f"{user}/spawn/cgroup.kill", os.O_WRONLY),
            ("first", f"{first}/{procs}", os.O_RDWR),
            ("first_kill", f"{first}/cgroup.kill", os.O_WRONLY),
            ("first_events", f"{first}/cgroup.events", os.O_RDONLY),
        ]
        for name, root in self.v1.items():
            wanted.append((name, f"{root}/{sandbox_id}/{procs}", os.O_WRONLY))
            if name == "pids":
                wanted.append(("pids_home", f"{self._own_v1(name)}/{procs}", os.O_WRONLY))
        oom = self.oom_file(sandbox_id)
        if oom is not None:
            wanted.append(("oom", oom, os.O_RDONLY))
        for _, path, mode in wanted:
            opened.append(os.open(path, mode | flags))
        return [name for name, _, _ in wanted]

    def _limit_v1(self, name: str, path: str, limits: LaunchSpec) -> None:
        if name == "memory" and limits.memory_bytes is not None:
            kernel.write_control(f"{path}/memory.limit_in_bytes", str(_memory_limit(limits)))
            if self._swap_v1:
                kernel.write_control(f"{path}/memory.memsw.limit_in_bytes", str(_memory_limit(limits)))
        elif name == "pids":
            kernel.write_control(f"{path}/pids.max", str(limits.pids or DEFAULT_PIDS))
        elif name == "cpu" and limits.cpu_cores is not None:
            kernel.write_control(f"{path}/cpu.cfs_period_us", str(_CPU_PERIOD_US))
            kernel.write_control(
                f"{path}/cpu.cfs_quota_us", str(max(1000, int(limits.cpu_cores * _CPU_PERIOD_US)))
            )

    def _limit_v2(self, home: str, user: str, limits: LaunchSpec) -> None:
        # Limits on `home` would bind the agent too, so the controllers are passed down.
        box = f"{user}/box"
        enable = " ".join(f"+{name}" for name in sorted(self.v2_controllers))
        for path in (home, user):
            kernel.write_control(f"{path}/cgroup.subtree_control", enable)
        if "memory" in self.v2_controllers and limits.memory_bytes is not None:
            kernel.write_control(f"{box}/memory.max", str(_memory_limit(limits)))
            if os.path.exists(f"{box}/memory.swap.max"):
                kernel.write_control(f"{box}/memory.swap.max", "0")
        if "pids" in self.v2_controllers:
            kernel.write_control(f"{user}/pids.max", str(limits.pids or DEFAULT_PIDS))
        if "cpu" in self.v2_controllers and limits.cpu_cores is not None:
            kernel.write_control(
                f"{box}/cpu.max", f"{max(1000, int(limits.cpu_cores * _CPU_PERIOD_US))} {_CPU_PERIOD_US}"
            )

    def own_group(self) -> str:
        """`cgroup.procs` of the version 2 group that this process is in."""
        for line in (read("/proc/self/cgroup") or "").splitlines():
            number, _, path = line.split(":", 2)
            if number == "0":
                return f"{self.v2_root}{path}/cgroup.procs"
        raise OSError("this process is in no version 2 group")

    def _own_v1(self, controller: str) -> str:
        """The version 1 group that this process is in, which is the agents' too."""
        path = self._own.get(controller)
        if path is None:
            for line in (read("/proc/self/cgroup") or "").splitlines():
                _, names, group = line.split(":", 2)
                if controller in names.split(","):
                    path = self._own[controller] = f"{self.v1_roots[controller]}{group}"
                    return path
            raise OSError(f"this process is in no group of the {controller} controller")
        return path

    def _home(self, sandbox_id: str) -> str:
        """The version 2 group that the agent lives in."""
        return f"{self.v2}/{sandbox_id}/agent" if self.v2_controllers else f"{self.v2}/{sandbox_id}"

    def _user(self, sandbox_id: str) -> str:
        """The version 2 group around `box` and `spawn`."""
        return f"{self.v2}/{sandbox_id}/user" if self.v2_controllers else f"{self.v2}/{sandbox_id}"

    def oom_file(self, sandbox_id: str) -> str | None:
        if "memory" in self.v1:
            return f"{self.v1['memory']}/{sandbox_id}/memory.oom_control"
        if "memory" in self.v2_controllers:
            return f"{self._user(sandbox_id)}/box/memory.events"
        return None

    # ------------------------------------------------------------------------------------ from the service

    def sandboxes(self) -> set[str]:
        """Ids that have a group in any hierarchy."""
        found: set[str] = set()
        for path in (self.v2, *self.v1.values()):
            try:
                found.update(entry.name for entry in os.scandir(path) if entry.is_dir())
            except FileNotFoundError:
                continue
        return found

    def kill(self, sandbox_id: str) -> None:
        """SIGKILL everything in the sandbox, its agent included."""
        try:
            kernel.write_control(f"{self.v2}/{sandbox_id}/cgroup.kill", "1")
        except FileNotFoundError:
            return

    def empty(self, sandbox_id: str) -> bool:
        events = read(f"{self.v2}/{sandbox_id}/cgroup.events")
        return events is None or "populated 0" in events

    def remove(self, sandbox_id: str, patience_s: float = 2.0) -> None:
        """Remove the sandbox's (empty) groups. OSError when one stays busy for longer than `patience_s`."""
        deadline = time.monotonic() + patience_s
        for root in (self.v2, *self.v1.values()):
            path = f"{root}/{sandbox_id}"
            while True:
                try:
                    self._remove_tree(path)
                    break
                except FileNotFoundError:
                    break
                except OSError:
                    # The kernel lets go of the last dead task a moment after it was reaped.
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.002)

    def _remove_tree(self, path: str) -> None:
        try:
            os.rmdir(path)
        except OSError:
            for entry in os.scandir(path):
                if entry.is_dir(follow_symlinks=False):
                    self._remove_tree(entry.path)
            os.rmdir(path)

    def remove_instance(self) -> None:
        """Remove what `prepare` made, if no sandbox is left in it."""
        for path in (self.v2, *self.v1.values()):
            for folder in (path, os.path.dirname(path)):
                try:
                    os.rmdir(folder)
                except OSError:
                    break  # in use: by a sandbox, or by another instance

    def peak_memory_bytes(self, sandbox_id: str) -> int | None:
        if "memory" in self.v1:
            return _read_int(f"{self.v1['memory']}/{sandbox_id}/memory.max_usage_in_bytes")
        return _read_int(f"{self._user(sandbox_id)}/box/memory.peak")

    def usage(self, sandbox_id: str) -> dict[str, Any]:
        """The fields of `orchard.env.runtimes.base.Usage` that groups can tell."""
        home, user = f"{self.v2}/{sandbox_id}", self._user(sandbox_id)
        box = f"{user}/box"
        usec = _field(read(f"{home}/cpu.stat"), "usage_usec")
        memory = f"{self.v1['memory']}/{sandbox_id}" if "memory" in self.v1 else ""
        pids = f"{self.v1['pids']}/{sandbox_id}" if "pids" in self.v1 else user
        oom_file = self.oom_file(sandbox_id)
        return {
            "cpu_seconds": None if usec is None else usec / 1e6,
            "memory_bytes": _read_int(
                f"{memory}/memory.usage_in_bytes" if memory else f"{box}/memory.current"
            ),
            "peak_memory_bytes": self.peak_memory_bytes(sandbox_id),
            "memory_limit_bytes": _read_int(
                f"{memory}/memory.limit_in_bytes" if memory else f"{box}/memory.max"
            ),
            "pids": _read_int(f"{pids}/pids.current"),
            "pids_limit": _read_int(f"{pids}/pids.max"),
            "oom_kills": _field(read(oom_file), "oom_kill") if oom_file else None,
        }
