"""How the processes of one command are kept together, so that all of them and nothing else can be ended.

On Linux that is a cgroup (version 2) per running command: `cgroup.kill` ends whatever a command started,
however it forked. The agent spawns from a group that is used for nothing else, and moves what is in it on to the
command's groups at once, a process that was forked meanwhile included. It never enters a group with limited memory
itself: at the limit it would be the one that is killed.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False  # importing typing would cost every sandbox most of a megabyte
if TYPE_CHECKING:
    from typing import Protocol

    class JobGroup(Protocol):
        """The processes of one command."""

        def populated(self) -> bool: ...

        def pids(self) -> list[int]: ...

        def kill(self) -> None:
            """SIGKILL to every process, at once and without races."""
            ...

    class Containment(Protocol):
        """Makes and recycles job groups."""

        def acquire(self) -> JobGroup: ...

        def release(self, group: JobGroup) -> None:
            """Give back a group that is no longer populated."""
            ...

        def enter(self, *, past_limit: bool = False) -> None:
            """From here on the agent's children are born apart from it, and within the process limit, which can
            refuse them; or counted by it only when they are adopted."""
            ...

        def leave(self) -> None: ...

        def adopt(self, group: JobGroup, pid: int) -> None:
            """Put the new child, and all that it has started by now, into `group` and under the limits."""
            ...

        def close(self) -> None: ...

        def oom_kills(self) -> int:
            """How many processes the sandbox's memory limit has killed so far."""
            ...


COMMAND_OOM_SCORE = 500
_COMMAND_SCORE = b"%d" % COMMAND_OOM_SCORE
_SWEEPS = 100


class CgroupJobGroup:
    """One cgroup2 directory, held by its descriptors."""

    __slots__ = ("events_fd", "kill_fd", "name", "procs_fd")

    def __init__(self, name: str, procs_fd: int, kill_fd: int, events_fd: int) -> None:
        self.name = name
        self.procs_fd = procs_fd
        self.kill_fd = kill_fd
        self.events_fd = events_fd

    def populated(self) -> bool:
        return b"populated 1" in os.pread(self.events_fd, 256, 0)

    def pids(self) -> list[int]:
        # A plain pread of cgroup.procs restarts the iteration at offset 0; a page holds hundreds of pids.
        data = b""
        while chunk := os.pread(self.procs_fd, 65536, len(data)):
            data += chunk
        return [int(pid) for pid in data.split() if pid != b"0"]

    def kill(self) -> None:
        os.write(self.kill_fd, b"1")


class CgroupContainment:
    """Job groups under one directory, plus the sandbox's limits. `fds` holds, by name:

    box: directory under which a group per running command is made; first, first_kill, first_events: one that is
    there already. home, spawn, spawn_kill: `cgroup.procs` of the agent's own group, `cgroup.procs` and `cgroup.kill`
    of the one it spawns from. score: its own `oom_score_adj`, opened while it still could be. Where version 1 holds
    limits, their groups' `cgroup.procs`: cpu, memory and pids, and pids_home, the agent's own. oom:
    `memory.oom_control` (version 1) or `memory.events` (version 2), where memory can be limited.
    """

    #: The agent's own score, to come back to.
    home_score = b"0"

    def __init__(self, fds: dict[str, int]) -> None:
        self._fds = list(fds.values())
        self._box_fd = fds["box"]
        self._home_fd = fds["home"]
        self._spawn_fd = fds["spawn"]
        self._spawn_kill_fd = fds["spawn_kill"]
        self._score_fd = fds["score"]
        self._limit_fds = [fds[name] for name in ("memory", "cpu") if name in fds]
        self._pids_fd = fds.get("pids", -1)
        self._pids_home_fd = fds.get("pids_home", -1)
        self._oom_fd = fds.get("oom", -1)
        self._within_pids = False
        self._free = [CgroupJobGroup("j0", fds["first"], fds["first_kill"], fds["first_events"])]
        self._made = 1

    def acquire(self) -> CgroupJobGroup:
        if self._free:
            return self._free.pop()
        name = f"j{self._made}"
        os.mkdir(name, dir_fd=self._box_fd)
        self._made += 1
        flags = os.O_CLOEXEC
        return CgroupJobGroup(
            name,
            os.open(f"{name}/cgroup.procs", os.O_RDWR | flags, dir_fd=self._box_fd),
            os.open(f"{name}/cgroup.kill", os.O_WRONLY | flags, dir_fd=self._box_fd),
            os.open(f"{name}/cgroup.events", os.O_RDONLY | flags, dir_fd=self._box_fd),
        )

    def release(self, group: JobGroup) -> None:
        assert isinstance(group, CgroupJobGroup)
        if len(self._free) < 4:
            self._free.append(group)
            return
        for fd in (group.procs_fd, group.kill_fd, group.events_fd):
            os.close(fd)
        os.rmdir(group.name, dir_fd=self._box_fd)

    def enter(self, *, past_limit: bool = False) -> None:
        # The process limit must hold before the child's first instruction: a fork bomb needs no second one.
        self._within_pids = self._pids_fd >= 0 and not past_limit
        if self._within_pids:
            os.write(self._pids_fd, b"0")
        os.write(self._spawn_fd, b"0")
        # When the machine itself is short of memory, commands go before agents.
        os.write(self._score_fd, _COMMAND_SCORE)

    def leave(self) -> None:
        os.write(self._score_fd, self.home_score)
        os.write(self._home_fd, b"0")
        if self._within_pids:
            os.write(self._pids_home_fd, b"0")

    def adopt(self, group: JobGroup, pid: int) -> None:
        assert isinstance(group, CgroupJobGroup)
        self._move(group, pid)
        for _ in range(_SWEEPS):
            rest = os.pread(self._spawn_fd, 65536, 0).split()
            if not rest:
                return
            for straggler in rest:
                self._move(group, int(straggler))
        # Nothing that means well forks faster than it can be moved, a hundred times in a row.
        os.write(self._spawn_kill_fd, b"1")

    def _move(self, group: CgroupJobGroup, pid: int) -> None:
        number = b"%d" % pid
        try:
            for limited in self._limit_fds:
                os.write(limited, number)
            if self._pids_fd >= 0 and not self._within_pids:
                os.write(self._pids_fd, number)
            os.write(group.procs_fd, number)
        except ProcessLookupError:
            return  # it has ended; what it started is found in the spawn group

    def close(self) -> None:
        """Close all descriptors; only where an agent does not simply die with its sandbox."""
        for group in self._free:
            if group.procs_fd not in self._fds:
                self._fds += (group.procs_fd, group.kill_fd, group.events_fd)
        for fd in self._fds:
            os.close(fd)

    def oom_kills(self) -> int:
        if self._oom_fd < 0:
            return 0
        for line in os.pread(self._oom_fd, 4096, 0).splitlines():
            if line.startswith(b"oom_kill "):
                return int(line[9:])
        return 0
