"""The zygote: a small, warm, single-threaded process from which every sandbox is forked.

It is executed before any key is loaded and holds no secret: a sandbox's token is made by the sandbox itself.
Everything an agent will ever import is imported here, since after its birth the import system is closed.
Run as a program with one argument, the JSON of `{state_dir, instance, control_fd}`; it serves requests on the
control socket (one JSON message each) and ends when the service closes it. Sandboxes go on without it.
"""

from __future__ import annotations

# Without the enumerations that `socket` makes of every property.
import _socket
import ctypes

# Preloaded for the agents: what the standard library would import lazily inside them.
import encodings.ascii
import encodings.latin_1
import encodings.utf_8
import errno
import fcntl
import gc
import json
import os
import select
import signal
import socket
import stat
import sys
import time
from collections import deque

from orchard.env.agent import server
from orchard.env.agent.syscalls import PR_SET_NAME, default_signals, prctl
from orchard.env.runtimes.local import kernel, midwife
from orchard.env.runtimes.local.cgroups import Cgroups
from orchard.env.runtimes.local.descriptors import receive_fds
from orchard.env.runtimes.local.midwife import MAX_ORDER_BYTES, Embryo
from orchard.env.runtimes.local.newborn import be_born
from orchard.env.runtimes.local.nursery import Nursery
from orchard.env.runtimes.local.prefault import written_pages
from orchard.env.runtimes.local.rehearsal import rehearse
from orchard.env.runtimes.local.spec import REQUEST, UIDS_PER_SANDBOX, base_uid

TYPE_CHECKING = False  # importing typing would cost every sandbox most of a megabyte
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

_PRELOADED = (encodings.ascii, encodings.latin_1, encodings.utf_8, server)
_MAX_LAYERS = 128
#: User namespaces that are made in idle moments and kept; each is a descriptor to copy and close in every fork.
_KEPT_USERNS = 1024
#: Processes forked ahead. Milliseconds without a request after which a moment counts as idle.
_PREPARED_EMBRYOS = 4
_CONCEIVED_TOGETHER = 3
#: A newborn has then long become an agent.
_LEARN_AFTER_S = 0.3
_MIDWIVES = 2
_EMBRYO_IDLE_MS = 2
_USERNS_IDLE_MS = 25
_NAMESPACES = (
    kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS
)  # fmt: skip
_DEVICES = {
    "null": (1, 3),
    "zero": (1, 5),
    "full": (1, 7),
    "random": (1, 8),
    "urandom": (1, 9),
    "tty": (5, 0),
}


class UserNamespaces:
    """User namespaces by slot: a mapping of 65,536 ids each, made once and used again.

    Inside, no further user namespace can be made (`max_user_namespaces` is 0 there), whatever call asks.
    """

    def __init__(self, ids: int = 0) -> None:
        """ids: 0 for a range of ids for each; else how many there are, which all have."""
        # One range of the outer namespace cannot be crossed by one inside: its root is a range of its own.
        self._mapping = f"0 0 1\n1 1 {ids - 1}" if ids > 1 else "0 0 1" if ids else ""
        self._fds: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._fds)

    def get(self, slot: int) -> tuple[int, bool]:
        """The namespace of a slot, and whether it is kept (else the caller closes it)."""
        fd = self._fds.get(slot)
        if fd is not None:
            return fd, True
        fd = self._make(self._mapping or f"0 {base_uid(slot)} {UIDS_PER_SANDBOX}")
        if slot < _KEPT_USERNS:
            self._fds[slot] = fd
        return fd, slot < _KEPT_USERNS

    def prepare_one(self) -> None:
        """Make the lowest one that is not there yet."""
        self.get(next(slot for slot in range(_KEPT_USERNS) if slot not in self._fds))

    def _make(self, mapping: str) -> int:
        ready_read, ready_write = os.pipe2(os.O_CLOEXEC)
        hold_read, hold_write = os.pipe2(os.O_CLOEXEC)
        pid, pidfd = kernel.clone3(kernel.CLONE_NEWUSER)
        if pid == 0:
            try:
                os.close(hold_write)
                with open("/proc/sys/user/max_user_namespaces", "w") as file:
                    file.write("0")
                os.write(ready_write, b"1")
                os.read(hold_read, 1)  # ends with the zygote, also when that is killed
            finally:
                os._exit(0)
        os.close(ready_write)
        os.close(hold_read)
        try:
            if os.read(ready_read, 1) != b"1":
                raise OSError("the user namespace could not be closed to further ones")
            for name in ("uid_map", "gid_map"):
                with open(f"/proc/{pid}/{name}", "w") as file:
                    file.write(mapping)
            return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.close(pidfd)
            os.close(ready_read)
            os.close(hold_write)
            os.waitpid(pid, 0)


class Zygote:
    """See the module's docstring."""

    def __init__(self, nursery: Nursery) -> None:
        self._nursery = nursery
        self._control = nursery.control
        self._scratch = nursery.scratch
        self._userns = UserNamespaces(nursery.ids)
        self._embryos: deque[Embryo] = deque()
        self._midwives: set[int] = set()
        # What newborns write to, once known; the one to learn it from, and when it was asked for.
        self._written: list[tuple[int, int]] | None = None
        self._launched: tuple[int, float] | None = None
        self._launches: dict[int, int] = {}
        self._go_fds: dict[int, int] = {}

    # --------------------------------------------------------------------------------------------- set-up

    def prepare_mounts(self) -> None:
        """A mount namespace of our own with a scratch tmpfs: mount points and the sandboxes' /dev.

        What the machine mounts later (a disk that holds an image) comes in; nothing goes out.
        """
        kernel.unshare(kernel.CLONE_NEWNS)
        kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_SLAVE)
        os.makedirs(self._scratch, mode=0o700, exist_ok=True)
        kernel.mount("orchard", self._scratch, "tmpfs", 0, "mode=0700,size=1m")
        for name in ("root", "disk", "dev", "proc", *(f"l{n}" for n in range(_MAX_LAYERS))):
            os.mkdir(f"{self._scratch}/{name}", 0o755)
        mask = os.umask(0)
        dev = f"{self._scratch}/dev"
        for name, (major, minor) in _DEVICES.items():
            if self._nursery.ids:
                os.close(os.open(f"{dev}/{name}", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666))
                kernel.attach(kernel.open_tree(f"/dev/{name}"), f"{dev}/{name}")
            else:
                os.mknod(f"{dev}/{name}", stat.S_IFCHR | 0o666, os.makedev(major, minor))
        for name, target in {"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1",
                             "stderr": "/proc/self/fd/2", "ptmx": "pts/ptmx"}.items():  # fmt: skip
            os.symlink(target, f"{dev}/{name}")
        os.mkdir(f"{dev}/pts", 0o755)
        os.mkdir(f"{dev}/shm", 0o1777)
        os.umask(mask)

    def rehearse(self) -> None:
        if self._nursery.ids:
            return  # it needs control groups
        userns_fd, _ = self._userns.get(0)
        rehearse(self._nursery, userns_fd)

    def call_midwives(self) -> None:
        """Fork the processes that deliver. One waits for the kernel now and then, so there is another."""
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for _ in range(_MIDWIVES):
            pid = os.fork()
            if pid == 0:
                self._requests.close()
                midwife.serve(self._nursery, theirs)
            self._midwives.add(pid)
        theirs.close()

    # -------------------------------------------------------------------------------------------- serving

    def serve(self) -> None:
        wake_read, wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # Ctrl-C in a terminal reaches the whole process group; the service decides when we end.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        poll = select.poll()
        poll.register(self._control.fileno(), select.POLLIN)
        poll.register(wake_read, select.POLLIN)
        self._nursery.tell("ready", 0)
        while True:
            ready = dict(poll.poll(self._idle_ms()))
            if not ready:
                self._prepare_one()
            if wake_read in ready:
                os.read(wake_read, 4096)
                self._reap()
            if self._control.fileno() in ready and not self._request():
                return

    def _idle_ms(self) -> int | None:
        """How long nothing must be asked for before something is prepared; None when all is."""
        if len(self._embryos) < _PREPARED_EMBRYOS:
            return _EMBRYO_IDLE_MS
        return _USERNS_IDLE_MS if len(self._userns) < _KEPT_USERNS or self._launched else None

    def _prepare_one(self) -> None:
        """Use an idle moment: a sandbox that is asked for later starts that much sooner."""
        if len(self._embryos) < _PREPARED_EMBRYOS:
            self._embryos.append(self._conceive(self._written or ()))
        elif (
            self._written is None and self._launched and time.monotonic() > self._launched[1] + _LEARN_AFTER_S
        ):
            self._learn(self._launched[0])
        elif len(self._userns) < _KEPT_USERNS:
            self._userns.prepare_one()

    def _request(self) -> bool:
        """Serve one message; False when the service is gone."""
        try:
            data, fds = receive_fds(self._control, MAX_ORDER_BYTES)
        except ConnectionError:
            return False
        if not data or self._service_gone():
            return False  # what a service asked for before it was killed is nobody's any more
        kind, launch, slot, with_network = REQUEST.unpack_from(data)
        if kind == b"C":
            try:
                self._launch(data, launch, slot, with_network, fds[0])
            except OSError as error:
                self._nursery.tell_failure(launch, error)
            finally:
                for fd in fds:
                    os.close(fd)
        elif kind == b"G":
            fd = self._go_fds.pop(launch, -1)
            if fd >= 0:
                os.write(fd, b"1")
                os.close(fd)
        elif kind == b"R":
            self._nursery.remove(launch, data[REQUEST.size :].decode())
        return True

    def _service_gone(self) -> bool:
        poll = select.poll()
        poll.register(self._control.fileno(), select.POLLHUP)
        return any(events & select.POLLHUP for _, events in poll.poll(0))

    def _launch(self, data: bytes, launch: int, slot: int, with_network: bool, channel_fd: int) -> None:
        """Let a midwife make an embryo what the request asks for. All other work is theirs: after a fork, every page of
        memory that is touched here is copied."""
        userns_fd, kept = self._userns.get(slot)
        if not self._embryos:
            # Where one is asked for, more will be. Forks in a row cost less: after each, this process has to be given
            # anew the pages that it goes on to touch.
            self._embryos.extend(self._conceive() for _ in range(_CONCEIVED_TOGETHER))
        embryo = self._embryos.popleft()
        embryo.userns_fd = userns_fd
        go_read = -1
        try:
            if with_network:
                go_read, self._go_fds[launch] = os.pipe2(os.O_CLOEXEC)
            midwife.hand_over(self._requests, data, embryo, channel_fd, go_read)
            self._launches[embryo.pid] = launch
            if self._written is None and self._launched is None:
                self._launched = embryo.pid, time.monotonic()
        finally:
            embryo.close()
            if go_read >= 0:
                os.close(go_read)
            if not kept:
                os.close(userns_fd)

    def _learn(self, pid: int) -> None:
        """See what a newborn writes to: those to come can have it ready."""
        self._launched = None
        try:
            self._written = written_pages(pid)
        except OSError:
            return  # it has ended; the next one will do

    def _conceive(self, pages: Sequence[tuple[int, int]] = ()) -> Embryo:
        """Fork a process in namespaces of its own that waits to be told which sandbox it is to be, and meanwhile makes
        `pages` its own."""
        ours, theirs = _socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid, pidfd = kernel.clone3(_NAMESPACES)
        if pid == 0:
            be_born(self._nursery, theirs.fileno(), pages)
        theirs.close()
        return Embryo(pid, pidfd, ours)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._midwives:
                # What it was at is unknown. The service starts all anew, and tries again what was on its way.
                raise SystemExit(f"a midwife ended with status {status}")
            launch = self._launches.pop(pid, None)
            if launch is not None:
                fd = self._go_fds.pop(launch, -1)
                if fd >= 0:
                    os.close(fd)
                self._nursery.tell("exit", launch, code=os.waitstatus_to_exitcode(status))


def close_imports() -> None:
    """From here on nothing can be imported, in the agents above all: a module that an image planted at a path
    of this machine's library is never executed."""
    sys.path.clear()
    sys.path_hooks.clear()
    sys.meta_path.clear()
    sys.path_importer_cache.clear()
    sys.argv.clear()


def hide_command_line(title: bytes) -> None:
    """Overwrite this process' arguments: /proc/1/cmdline of a sandbox must not tell the machine's paths."""
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    prctl(PR_SET_NAME, title)
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, title[: end - start - 1], min(len(title), end - start - 1))


def _nursery(options: dict[str, Any]) -> Nursery:
    """Raises OSError when the machine lacks what it needs."""
    state_dir, control_fd = options["state_dir"], options["control_fd"]
    if "ordinary" in options:
        from orchard.env.runtimes.local.ordinary_nursery import OrdinaryNursery

        return OrdinaryNursery(state_dir, control_fd, options["instance"], options["ordinary"])
    return Nursery(state_dir, Cgroups.detect(options["instance"]), control_fd)


def main() -> None:
    default_signals()
    kernel.no_core_dumps()
    options = json.loads(sys.argv[1])
    nursery = _nursery(options)
    # An earlier zygote may still be at a request of a service that was killed: what it starts must be there to
    # be seen when our service looks for leftovers.
    lock_fd = os.open(f"{options['state_dir']}/zygote.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock_fd, fcntl.LOCK_EX)
    zygote = Zygote(nursery)
    try:
        nursery.enter()
        nursery.cgroups.prepare()
        nursery.cgroups.favour_moves()
        zygote.prepare_mounts()
    except OSError as error:
        nursery.control.send(
            json.dumps(
                {"event": "refused", "detail": str(error), "errno": error.errno or errno.EPERM}
            ).encode()
        )
        return
    zygote.rehearse()
    hide_command_line(b"orchard-agent")
    close_imports()
    gc.collect()
    gc.freeze()
    gc.disable()
    zygote.call_midwives()
    zygote.serve()
