"""How the processes of one command are kept together, so that all of them and nothing else can be ended.

On Linux that is a cgroup (version 2) per running command: `cgroup.kill` ends whatever a command started,
however it forked. The agent spawns from a group that is used for nothing else, and moves what is in it on to the
command's groups at once, a process that was forked meanwhile included. It never enters a limited group itself: at
the memory limit it would be the one that is killed.
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

        def enter(self) -> None:
            """From here on the agent's children are born apart from it."""
            ...

        def leave(self) -> None: ...

        def adopt(self, group: JobGroup, pid: int) -> None:
            """Put the new child, and all that it has started by now, into `group` and under the limits."""
            ...

        def close(self) -> None: ...

        def oom_kills(self) -> int:
            """How many processes the sandbox's memory limit has killed so far."""
            ...


_COMMAND_OOM_SCORE = b"500"
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
    """Job groups under one directory, plus the sandbox's limits.

    box_fd: directory under which a group per running command is made. home_fd, spawn_fd, spawn_kill_fd:
    `cgroup.procs` of the agent's own group, and `cgroup.procs` and `cgroup.kill` of the one it spawns from.
    limit_fds: `cgroup.procs` of the sandbox's limited group for each version 1 controller; empty where version 2
    holds the limits, which then lie on the box. oom_fd: `memory.oom_control` (version 1) or `memory.events`
    (version 2), or -1. score_fd: the agent's own `oom_score_adj`, opened while it still could be.
    """

    def __init__(
        self, *, box_fd: int, home_fd: int, spawn_fd: int, spawn_kill_fd: int, limit_fds: list[int], oom_fd: int,
        score_fd: int,
    ) -> None:  # fmt: skip
        self.box_fd = box_fd
        self.home_fd = home_fd
        self.spawn_fd = spawn_fd
        self.spawn_kill_fd = spawn_kill_fd
        self.limit_fds = limit_fds
        self.score_fd = score_fd
        self.oom_fd = oom_fd
        self._free: list[CgroupJobGroup] = []
        self._made = 0

    def acquire(self) -> CgroupJobGroup:
        if self._free:
            return self._free.pop()
        name = f"j{self._made}"
        os.mkdir(name, dir_fd=self.box_fd)
        self._made += 1
        flags = os.O_CLOEXEC
        return CgroupJobGroup(
            name,
            os.open(f"{name}/cgroup.procs", os.O_RDWR | flags, dir_fd=self.box_fd),
            os.open(f"{name}/cgroup.kill", os.O_WRONLY | flags, dir_fd=self.box_fd),
            os.open(f"{name}/cgroup.events", os.O_RDONLY | flags, dir_fd=self.box_fd),
        )

    def release(self, group: JobGroup) -> None:
        assert isinstance(group, CgroupJobGroup)
        if len(self._free) < 4:
            self._free.append(group)
            return
        for fd in (group.procs_fd, group.kill_fd, group.events_fd):
            os.close(fd)
        os.rmdir(group.name, dir_fd=self.box_fd)

    def enter(self) -> None:
        os.write(self.spawn_fd, b"0")
        # When the machine itself is short of memory, commands go before agents.
        os.write(self.score_fd, _COMMAND_OOM_SCORE)

    def leave(self) -> None:
        os.write(self.score_fd, b"0")
        os.write(self.home_fd, b"0")

    def adopt(self, group: JobGroup, pid: int) -> None:
        assert isinstance(group, CgroupJobGroup)
        self._move(group, pid)
        for _ in range(_SWEEPS):
            rest = os.pread(self.spawn_fd, 65536, 0).split()
            if not rest:
                return
            for straggler in rest:
                self._move(group, int(straggler))
        # Nothing that means well forks faster than it can be moved, a hundred times in a row.
        os.write(self.spawn_kill_fd, b"1")

    def _move(self, group: CgroupJobGroup, pid: int) -> None:
        number = b"%d" % pid
        try:
            for limited in self.limit_fds:
                os.write(limited, number)
            os.write(group.procs_fd, number)
        except ProcessLookupError:
            return  # it has ended; what it started is found in the spawn group

    def close(self) -> None:
        """Close all descriptors; only where an agent does not simply die with its sandbox."""
        fds = [self.box_fd, self.home_fd, self.spawn_fd, self.spawn_kill_fd, self.score_fd, *self.limit_fds]
        for group in self._free:
            fds += [group.procs_fd, group.kill_fd, group.events_fd]
        for fd in (*fds, self.oom_fd):
            if fd >= 0:
                os.close(fd)

    def oom_kills(self) -> int:
        if self.oom_fd < 0:
            return 0
        for line in os.pread(self.oom_fd, 4096, 0).splitlines():
            if line.startswith(b"oom_kill "):
                return int(line[9:])
        return 0
