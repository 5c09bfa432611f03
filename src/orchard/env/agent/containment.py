"""How the processes of one command are kept together, so that all of them and nothing else can be ended.

On Linux that is a cgroup (version 2) per running command: `cgroup.kill` ends whatever a command started,
however it forked. The agent moves itself into the command's groups, spawns, and moves back: children are
born inside, without a moment in which they could slip away, and without a copying fork.
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

        def enter(self, group: JobGroup) -> None:
            """From here on the agent's children are born into `group`."""
            ...

        def leave(self) -> None: ...

        def oom_kills(self) -> int:
            """How many processes the sandbox's memory limit has killed so far."""
            ...


_COMMAND_OOM_SCORE = b"500"


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

    box_fd: directory under which a group per running command is made. home_fd: `cgroup.procs` of the agent's
    own group. limit_fds: pairs of `cgroup.procs` (the sandbox's limited group, the agent's own) for each
    version 1 controller; empty where version 2 holds the limits, which then lie on the directory itself.
    oom_fd: `memory.oom_control` (version 1) or `memory.events` (version 2), or -1. score_fd: the agent's own
    `oom_score_adj`, opened while it still could be.
    """

    def __init__(
        self, box_fd: int, home_fd: int, limit_fds: list[tuple[int, int]], oom_fd: int, score_fd: int
    ) -> None:
        self.score_fd = score_fd
        self.box_fd = box_fd
        self.home_fd = home_fd
        self.limit_fds = limit_fds
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

    def enter(self, group: JobGroup) -> None:
        assert isinstance(group, CgroupJobGroup)
        for limited, _ in self.limit_fds:
            os.write(limited, b"0")
        os.write(group.procs_fd, b"0")
        # When the machine itself is short of memory, commands go before agents.
        os.write(self.score_fd, _COMMAND_OOM_SCORE)

    def leave(self) -> None:
        os.write(self.score_fd, b"0")
        os.write(self.home_fd, b"0")
        for _, home in self.limit_fds:
            os.write(home, b"0")

    def oom_kills(self) -> int:
        if self.oom_fd < 0:
            return 0
        for line in os.pread(self.oom_fd, 4096, 0).splitlines():
            if line.startswith(b"oom_kill "):
                return int(line[9:])
        return 0
