"""Keeping the processes of a command together where no control group can be had: by a mark that they inherit.

The mark is the limit for file locks (RLIMIT_LOCKS), which the kernel keeps and inherits but has long ceased to use. The
agent lowers its own by one before every command, so each command starts with one that no other has. Nothing that a
process does changes it: it outlives exec, setsid, double forks and a new environment, and the sandbox's filter refuses
to set it to anybody but who passes the two words that the agent knows (`seccomp.build`).

The limit of processes is RLIMIT_NPROC, which the kernel counts in every user namespace (so in every sandbox) for itself,
and for each of its users.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import struct

from orchard.env.agent.containment import COMMAND_OOM_SCORE
from orchard.env.agent.syscalls import checked

TYPE_CHECKING = False  # importing typing would cost every sandbox most of a megabyte
if TYPE_CHECKING:
    from orchard.env.agent.containment import JobGroup

_libc = ctypes.PyDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long

PRLIMIT64 = {"x86_64": 302, "aarch64": 261}.get(os.uname().machine, -1)
RLIMIT_NPROC, RLIMIT_LOCKS = 6, 10
_FIRST_MARK = 1 << 40
#: So many commands can be started beyond the limit of processes, so that what fills a sandbox can be ended.
_RESERVE = 32
_AGENT_PID = 1
#: Looks at all processes before they are stopped for it, and at all: what is killed takes its time to be gone.
_SWEEPS_IN_MOTION, _SWEEPS = 3, 1000
_LIMITS_SIZE = 4096


def _set_limit(pid: int, resource: int, soft: int, hard: int, words: tuple[int, int] = (0, 0)) -> None:
    """Set a limit of a process (0: this one). Raises OSError."""
    arguments = [ctypes.c_ulong(word) for word in words]
    checked(_syscall(PRLIMIT64, pid, resource, struct.pack("<QQ", soft, hard), None, *arguments), "prlimit64")


def _hard_limit(resource: int) -> int:
    limit = ctypes.create_string_buffer(16)
    checked(_syscall(PRLIMIT64, 0, resource, None, limit), "prlimit64")
    return int(struct.unpack("<QQ", limit.raw)[1])


def limit_processes(max_pids: int) -> tuple[int, int]:
    """Limit this process and its descendants, in this user namespace, to `max_pids` for each user and the agent; how far
    this process may raise that for itself is the second number returned."""
    hard = min(max_pids + 1 + _RESERVE, _hard_limit(RLIMIT_NPROC))
    soft = min(max_pids + 1, hard)
    _set_limit(0, RLIMIT_NPROC, soft, hard)
    return soft, hard


def own_score() -> int:
    """`oom_score_adj`: that of a user's session may be more than 0, and cannot be lowered."""
    with open("/proc/self/oom_score_adj", "rb") as file:
        return int(file.read())


def _mark_of(pid: int) -> int:
    """The mark of a process that runs, or 0 when it has ended."""
    try:
        if not _runs(pid):
            return 0
        fd = os.open(f"/proc/{pid}/limits", os.O_RDONLY | os.O_CLOEXEC)
        try:
            text = os.read(fd, _LIMITS_SIZE)
        finally:
            os.close(fd)
        _, _, rest = text.partition(b"Max file locks")
        mark = rest.split(None, 1)[0]
        return int(mark) if mark.isdigit() else 0
    except (OSError, IndexError):
        return 0


def _stat(pid: int) -> list[bytes]:
    """The fields of /proc/PID/stat from the state on. Raises OSError."""
    fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 1024).rpartition(b")")[2].split()
    finally:
        os.close(fd)


def _state(pid: int) -> bytes:
    try:
        return _stat(pid)[0]
    except OSError:
        return b""


def _runs(pid: int) -> bool:
    """It has a thread that is not over. Raises OSError."""
    fields = _stat(pid)
    return fields[0] not in (b"Z", b"X") or int(fields[17]) > 1


def _last_pid() -> bytes:
    """The pid that was given away last in this PID namespace."""
    with open("/proc/loadavg", "rb", buffering=0) as file:
        return file.read(128).split()[-1]


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _stop_all() -> list[int]:
    """Stop every process of the sandbox but this one, at once; those that ran until then."""
    before = {pid for pid in _processes() if _state(pid) == b"T"}
    try:
        # To all that there are, under the kernel's own lock: none is born beside it.
        os.kill(-1, signal.SIGSTOP)
    except ProcessLookupError:
        return []
    return [pid for pid in _processes() if pid not in before]


def _processes() -> list[int]:
    return sorted(pid for name in os.listdir("/proc") if name.isdigit() and (pid := int(name)) != _AGENT_PID)


def _marked(mark: int) -> list[int]:
    return [pid for pid in _processes() if _mark_of(pid) == mark]


class MarkJobGroup:
    """The processes that have one mark; none has 0."""

    __slots__ = ("_seen", "mark")

    def __init__(self) -> None:
        self.mark = 0
        self._seen = 0

    def populated(self) -> bool:
        if self._seen and _mark_of(self._seen) == self.mark:
            return True  # without a look at all the others
        found = self.pids()
        self._seen = found[0] if found else 0
        return bool(found)

    def pids(self) -> list[int]:
        return _marked(self.mark) if self.mark else []

    def kill(self) -> None:
        """Until a look finds nothing and nothing was forked meanwhile. Where something always is, by this command or by
        others, all processes are stopped for a moment, so that they cannot."""
        stopped: list[int] = []
        try:
            for sweep in range(_SWEEPS):
                if sweep == _SWEEPS_IN_MOTION:
                    stopped = _stop_all()
                last = _last_pid()
                found = self.pids()
                if not found and _last_pid() == last:
                    return
                for pid in found:
                    _signal(pid, signal.SIGKILL)
        finally:
            # Children first: a shell that is woken looks after those that are stopped.
            for pid in reversed(stopped):
                _signal(pid, signal.SIGCONT)


class MarkContainment:
    """See the module's docstring. score_fd: this process' `oom_score_adj`. max_pids: the limit of processes. words: what
    the filter wants to see. To be made in the sandbox's user namespace, before the filter is installed."""

    def __init__(self, score_fd: int, max_pids: int, words: tuple[int, int]) -> None:
        self._score_fd = score_fd
        self._words = words
        self._mark = min(_FIRST_MARK, _hard_limit(RLIMIT_LOCKS))
        self._max_pids, self._reserve = limit_processes(max_pids)
        self._past_limit = False
        self._home_score = own_score()

    def acquire(self) -> MarkJobGroup:
        return MarkJobGroup()

    def release(self, group: JobGroup) -> None:
        """Nothing is kept of it."""

    def enter(self, *, past_limit: bool = False) -> None:
        self._past_limit = past_limit
        if past_limit:
            _set_limit(0, RLIMIT_NPROC, self._reserve, self._reserve)
        self._mark -= 1
        _set_limit(0, RLIMIT_LOCKS, self._mark, self._mark, self._words)
        # When the machine itself is short of memory, commands go before agents.
        os.write(self._score_fd, b"%d" % max(self._home_score, COMMAND_OOM_SCORE))

    def leave(self) -> None:
        os.write(self._score_fd, b"%d" % self._home_score)
        if self._past_limit:
            self._past_limit = False
            _set_limit(0, RLIMIT_NPROC, self._max_pids, self._reserve)

    def adopt(self, group: JobGroup, pid: int) -> None:
        assert isinstance(group, MarkJobGroup)
        group.mark = self._mark
        try:
            _set_limit(pid, RLIMIT_NPROC, self._max_pids, self._max_pids)
        except OSError as error:
            # It has ended, or runs as another user, and may raise its limit to the agent's.
            if error.errno not in (errno.ESRCH, errno.EPERM):
                raise

    def close(self) -> None:
        os.close(self._score_fd)

    def oom_kills(self) -> int:
        return 0
