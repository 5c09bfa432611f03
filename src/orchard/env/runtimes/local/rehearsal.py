"""The zygote rehearses an agent's work before the first fork.

The interpreter adapts code to how it is used while it runs, by writing into it. Done here once, that is there for
every sandbox: an agent's first commands cost half, and it copies fewer pages of memory for itself.
"""

from __future__ import annotations

import os
import socket

from orchard.env.agent.server import Agent, Connection
from orchard.env.agent.wire import FrameReader, frame

TYPE_CHECKING = False  # importing typing would cost every sandbox most of a megabyte
if TYPE_CHECKING:
    from orchard.env.agent.containment import JobGroup

_ROUNDS = 24
_PROGRAMS = ("/bin/true", "/usr/bin/true")


class _Group:
    def populated(self) -> bool:
        return False

    def pids(self) -> list[int]:
        return []

    def kill(self) -> None:
        return


class _NoContainment:
    """Commands of the rehearsal run in the zygote's own groups; they are `true` and nothing else."""

    def acquire(self) -> JobGroup:
        return _Group()

    def release(self, group: JobGroup) -> None:
        return

    def enter(self) -> None:
        return

    def leave(self) -> None:
        return

    def adopt(self, group: JobGroup, pid: int) -> None:
        return

    def oom_kills(self) -> int:
        return 0


def rehearse(null_fd: int, folder: str) -> None:
    """Let an agent of our own serve some commands; nothing is left of it."""
    program = next((path for path in _PROGRAMS if os.access(path, os.X_OK)), None)
    if program is None:
        return
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    listener = socket.socket(socket.AF_UNIX)
    theirs.setblocking(False)
    folder_fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    log_fd = os.memfd_create("rehearsal", os.MFD_CLOEXEC)
    agent = Agent(listener, "rehearsal", _NoContainment(), null_fd, log_fd, folder_fd)
    connection = Connection(agent, theirs)
    connection.start()
    reader = FrameReader()
    ours.sendall(frame({"id": 0, "op": "hello", "token": "rehearsal", "configure": {"env": {"A": "b"}}}))
    for number in range(_ROUNDS):
        request = {
            "id": number,
            "op": "exec",
            "job_id": f"r{number}",
            "command": [program],
            "wait": True,
            "timeout_s": 9,
        }
        ours.sendall(frame(request))
        answered = False
        while not answered:
            agent.loop.turn(0.0005)
            agent.jobs.reap()
            try:
                data = ours.recv(65536, socket.MSG_DONTWAIT)
            except BlockingIOError:
                continue
            answered = any("job" in header for header, _ in reader.feed(data))
    connection.close()
    agent.close()
    for fd in (folder_fd, log_fd):
        os.close(fd)
    ours.close()
