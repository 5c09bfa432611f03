"""The zygote: a small, warm, single-threaded process from which every sandbox is forked.

It is executed before any key is loaded and holds no secret: a sandbox's token is made by the sandbox itself.
Everything an agent will ever import is imported here, since after its birth the import system is closed.
Run as a program with one argument, the JSON of `{state_dir, instance, control_fd}`; it serves requests on the
control socket (one JSON message each) and ends when the service closes it. Sandboxes go on without it.
"""

from __future__ import annotations

import ctypes

# Preloaded for the agents: what the standard library would import lazily inside them.
import encodings.ascii
import encodings.idna
import encodings.latin_1
import encodings.punycode
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

from orchard.env.agent import containment, server
from orchard.env.agent.syscalls import PR_SET_NAME, close_range, prctl
from orchard.env.runtimes.local import kernel, seccomp
from orchard.env.runtimes.local.cgroups import Cgroups
from orchard.env.runtimes.local.sandbox_init import Birth, become_agent
from orchard.env.runtimes.local.spec import UIDS_PER_SANDBOX, LaunchSpec, base_uid

TYPE_CHECKING = False  # importing typing would cost every sandbox most of a megabyte
if TYPE_CHECKING:
    from typing import Any

_PRELOADED = (encodings.ascii, encodings.idna, encodings.latin_1, encodings.punycode, encodings.utf_8, server)
_MAX_LAYERS = 128
#: User namespaces made in idle moments, and how many are kept (every one is a descriptor to copy in each fork).
_PREPARED_USERNS = 32
_KEPT_USERNS = 64
_NAMESPACES = (
    kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC
    | kernel.CLONE_NEWUTS | kernel.CLONE_NEWCGROUP
)  # fmt: skip
_DEVICES = {
    "null": (1, 3),
    "zero": (1, 5),
    "full": (1, 7),
    "random": (1, 8),
    "urandom": (1, 9),
    "tty": (5, 0),
}
_MAX_MESSAGE = 1 << 20


class UserNamespaces:
    """User namespaces by slot: a mapping of 65,536 ids each, made once and used again.

    Inside, no further user namespace can be made (`max_user_namespaces` is 0 there), whatever call asks.
    """

    def __init__(self) -> None:
        self._fds: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._fds)

    def get(self, slot: int) -> tuple[int, bool]:
        """The namespace of a slot, and whether it is kept (else the caller closes it)."""
        fd = self._fds.get(slot)
        if fd is not None:
            return fd, True
        fd = self._make(base_uid(slot))
        if slot < _KEPT_USERNS:
            self._fds[slot] = fd
        return fd, slot < _KEPT_USERNS

    def prepare_one(self) -> None:
        """Make the lowest one that is not there yet."""
        self.get(next(slot for slot in range(_KEPT_USERNS) if slot not in self._fds))

    def _make(self, root_uid: int) -> int:
        ready_read, ready_write = os.pipe2(os.O_CLOEXEC)
        hold_read, hold_write = os.pipe2(os.O_CLOEXEC)
        pid = kernel.clone3(kernel.CLONE_NEWUSER)
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
                    file.write(f"0 {root_uid} {UIDS_PER_SANDBOX}")
            return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.close(ready_read)
            os.close(hold_write)
            os.waitpid(pid, 0)


class Zygote:
    """See the module's docstring."""

    def __init__(self, state_dir: str, instance: str, control: socket.socket) -> None:
        self._state_dir = state_dir
        self._control = control
        self._cgroups = Cgroups.detect(instance)
        self._cgroups.prepare()
        self._userns = UserNamespaces()
        self._children: dict[int, LaunchSpec] = {}
        self._go_fds: dict[str, int] = {}
        self._seccomp = seccomp.build()
        self._last_capability = kernel.last_capability()
        self._null_fd = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        self._scratch = f"{state_dir}/mnt"
        self._home_fds = [
            os.open(f"{self._cgroups.own_v1(root)}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
            for root in self._cgroups.v1.values()
        ]
        self._v1_home = dict(zip(self._cgroups.v1, self._home_fds, strict=True))

    # --------------------------------------------------------------------------------------------- set-up

    def prepare_mounts(self) -> None:
        """A mount namespace of our own with a scratch tmpfs: mount points and the sandboxes' /dev."""
        kernel.unshare(kernel.CLONE_NEWNS)
        kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
        os.makedirs(self._scratch, mode=0o700, exist_ok=True)
        kernel.mount("orchard", self._scratch, "tmpfs", 0, "mode=0700,size=1m")
        for name in ("root", "disk", "dev", *(f"l{n}" for n in range(_MAX_LAYERS))):
            os.mkdir(f"{self._scratch}/{name}", 0o755)
        mask = os.umask(0)
        dev = f"{self._scratch}/dev"
        for name, (major, minor) in _DEVICES.items():
            os.mknod(f"{dev}/{name}", stat.S_IFCHR | 0o666, os.makedev(major, minor))
        for name, target in {"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1",
                             "stderr": "/proc/self/fd/2", "ptmx": "pts/ptmx"}.items():  # fmt: skip
            os.symlink(target, f"{dev}/{name}")
        os.mkdir(f"{dev}/pts", 0o755)
        os.mkdir(f"{dev}/shm", 0o1777)
        os.umask(mask)

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
        gc.collect()
        gc.freeze()
        gc.disable()
        self._send({"event": "ready"})
        while True:
            idle = 0 if len(self._userns) < _PREPARED_USERNS else None
            ready = dict(poll.poll(idle))
            if not ready:
                self._userns.prepare_one()
            if wake_read in ready:
                os.read(wake_read, 4096)
                self._reap()
            if self._control.fileno() in ready and not self._request():
                return

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._control.send(json.dumps(message).encode())
        except ConnectionError:
            raise SystemExit(0) from None  # the service is gone; its next one has a zygote of its own

    def _tell(self, event: str, spec: LaunchSpec, **facts: Any) -> None:
        self._send({"event": event, "sandbox_id": spec.sandbox_id, "launch": spec.launch, **facts})

    def _tell_failure(self, spec: LaunchSpec, error: BaseException) -> None:
        detail = f"{type(error).__name__}: {error}"
        self._tell("failed", spec, detail=detail, errno=getattr(error, "errno", None))

    def _request(self) -> bool:
        try:
            data = self._control.recv(_MAX_MESSAGE)
        except ConnectionError:
            return False
        if not data:
            return False
        message = json.loads(data)
        if message["op"] == "create":
            spec = LaunchSpec.from_wire(message["spec"])
            try:
                pid = self._launch(spec)
                self._tell("forked", spec, pid=pid)
            except Exception as error:
                self._tell_failure(spec, error)
        elif message["op"] == "go":
            fd = self._go_fds.pop(message["sandbox_id"], -1)
            if fd >= 0:
                os.write(fd, b"1")
                os.close(fd)
        return True

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            spec = self._children.pop(pid, None)
            if spec is not None:
                fd = self._go_fds.pop(spec.sandbox_id, -1)
                if fd >= 0:
                    os.close(fd)
                code = os.waitstatus_to_exitcode(status)
                self._tell("exit", spec, code=code)

    # ------------------------------------------------------------------------------------------ launching

    def _launch(self, spec: LaunchSpec) -> int:
        """Fork the sandbox; its pid. On failure nothing is left but what the service's delete removes."""
        home = f"{self._state_dir}/sandboxes/{spec.sandbox_id}"
        os.mkdir(home, 0o700)
        with open(f"{home}/image.json", "w") as file:
            json.dump({"ref": spec.image_ref, "digest": spec.image_digest}, file)
        self._cgroups.create(spec)
        opened: list[int] = []
        try:
            birth = self._birth(spec, home, opened)
            cgroup_fd = os.open(self._cgroups.home_path(spec.sandbox_id), os.O_RDONLY | os.O_CLOEXEC)
            opened.append(cgroup_fd)
            go_read = -1
            if spec.network is not None:
                go_read, go_write = os.pipe2(os.O_CLOEXEC)
                opened.append(go_read)
                birth.go_fd = go_read
                self._go_fds[spec.sandbox_id] = go_write
            pid = kernel.clone3(_NAMESPACES, cgroup_fd)
            if pid == 0:
                self._child(birth)
            self._children[pid] = spec
            return pid
        finally:
            for fd in opened:
                os.close(fd)

    def _birth(self, spec: LaunchSpec, home: str, opened: list[int]) -> Birth:
        def opening(path: str, flags: int, mode: int = 0o600) -> int:
            fd = os.open(path, flags | os.O_CLOEXEC, mode)
            opened.append(fd)
            return fd

        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        opened.append(listener.detach())
        listener_fd = opened[-1]
        self._bind(listener_fd, home)
        v2_home = self._cgroups.home_path(spec.sandbox_id)
        oom_file = self._cgroups.oom_file(spec.sandbox_id)
        pairs = [
            (opening(f"{path}/{spec.sandbox_id}/cgroup.procs", os.O_WRONLY), self._v1_home[name])
            for name, path in self._cgroups.v1.items()
            if os.path.isdir(f"{path}/{spec.sandbox_id}")
        ]
        held = containment.CgroupContainment(
            box_fd=opening(f"{self._cgroups.v2}/{spec.sandbox_id}/box", os.O_RDONLY | os.O_DIRECTORY),
            home_fd=opening(f"{v2_home}/cgroup.procs", os.O_WRONLY),
            limit_fds=pairs,
            oom_fd=opening(oom_file, os.O_RDONLY) if oom_file else -1,
        )
        userns_fd, kept = self._userns.get(spec.slot)
        if not kept:
            opened.append(userns_fd)
        return Birth(
            spec=spec, home=home, scratch=self._scratch, userns_fd=userns_fd,
            listener_fd=listener_fd, null_fd=self._null_fd, control_fd=self._control.fileno(),
            token_fd=opening(f"{home}/token", os.O_WRONLY | os.O_CREAT | os.O_EXCL),
            log_fd=opening(f"{home}/agent.log", os.O_RDWR | os.O_CREAT | os.O_APPEND),
            containment=held, seccomp=self._seccomp, last_capability=self._last_capability,
        )  # fmt: skip

    def _bind(self, listener_fd: int, home: str) -> None:
        """Listen on `home`/agent.sock; by a relative name, since socket addresses end at 107 bytes."""
        sock = socket.socket(fileno=listener_fd)
        try:
            os.chdir(home)
            sock.bind("agent.sock")
            sock.listen(64)
        finally:
            os.chdir("/")
            sock.detach()

    def _child(self, birth: Birth) -> None:
        """In the newborn process: never returns."""
        try:
            self._keep_only(birth)
            become_agent(birth)
        except BaseException as error:
            try:
                self._tell_failure(birth.spec, error)
            finally:
                os._exit(70)
        os._exit(0)

    def _keep_only(self, birth: Birth) -> None:
        """Close every descriptor that is not this sandbox's; the control socket goes when the agent runs."""
        held = birth.containment
        for standard in range(3):
            os.dup2(birth.null_fd, standard)
        keep = {0, 1, 2, birth.userns_fd, birth.listener_fd, birth.null_fd, birth.token_fd, birth.log_fd, held.box_fd,
                held.home_fd, held.oom_fd, birth.go_fd, birth.control_fd}  # fmt: skip
        keep.update(fd for pair in held.limit_fds for fd in pair)
        keep.discard(-1)
        last = -1
        for fd in sorted(keep):
            if fd > last + 1:
                close_range(last + 1, fd - 1)
            last = fd
        close_range(last + 1, 0xFFFFFFFF)
        signal.set_wakeup_fd(-1)


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


def main() -> None:
    options = json.loads(sys.argv[1])
    control = socket.socket(fileno=options["control_fd"])
    control.set_inheritable(False)
    # An earlier zygote may still be at a request of a service that was killed: what it starts must be there to
    # be seen when our service looks for leftovers.
    lock_fd = os.open(f"{options['state_dir']}/zygote.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock_fd, fcntl.LOCK_EX)
    zygote = Zygote(options["state_dir"], options["instance"], control)
    try:
        zygote.prepare_mounts()
    except OSError as error:
        control.send(
            json.dumps(
                {"event": "refused", "detail": str(error), "errno": error.errno or errno.EPERM}
            ).encode()
        )
        return
    hide_command_line(b"orchard-agent")
    close_imports()
    zygote.serve()
