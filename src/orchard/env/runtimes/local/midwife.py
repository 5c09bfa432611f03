"""The midwife: a process that makes everything a sandbox needs, and never forks.

A newborn is a fresh copy of the zygote: whatever it does, it does for the first time, page by page and fault by fault,
so it does little. Directories, control groups, the socket, the loopback interface and the whole file tree are made by a
process that has done it before. It enters the newborn's namespaces for that, before anything of the sandbox runs, and
never again.
"""

from __future__ import annotations

# Without the enumerations that `socket` makes of every property.
import _socket
import json
import os
import socket
import struct
import time

from orchard.env.agent.syscalls import PR_SET_NAME, prctl
from orchard.env.runtimes.local import kernel
from orchard.env.runtimes.local.cgroups import DEFAULT_PIDS
from orchard.env.runtimes.local.descriptors import receive_fds, send_fds
from orchard.env.runtimes.local.interfaces import bring_up_loopback, set_network_sysctls
from orchard.env.runtimes.local.nursery import NULL_FD
from orchard.env.runtimes.local.spec import REQUEST, LaunchSpec
from orchard.env.runtimes.local.tree import build_tree

TYPE_CHECKING = False  # importing typing would cost every sandbox most of a megabyte
if TYPE_CHECKING:
    from orchard.env.runtimes.local.nursery import Nursery

#: The room for a message of 128 layers with long paths. (More would be mapped and unmapped for each message.)
MAX_ORDER_BYTES = 96 << 10
#: What is entered of a newborn, and left again.
_ENTERED = kernel.CLONE_NEWNS | kernel.CLONE_NEWNET | kernel.CLONE_NEWUTS
_PID = struct.Struct("<I")
_LAST_GID = 2147483647


class Embryo:
    """A process of the zygote that waits to be told which sandbox it is to be.

    pid, pidfd: of the process. order: where it is told; a byte comes from there when it is prepared. userns_fd: the
    user namespace it is to enter.
    """

    __slots__ = ("order", "pid", "pidfd", "userns_fd")

    def __init__(self, pid: int, pidfd: int, order: _socket.socket, userns_fd: int = -1) -> None:
        self.pid = pid
        self.pidfd = pidfd
        self.order = order
        self.userns_fd = userns_fd

    def close(self) -> None:
        """Let go of it; one that was not told anything ends then."""
        os.close(self.pidfd)
        self.order.close()


class Midwife:
    """Delivers one sandbox after the other. home: a process in the namespaces to come back to."""

    def __init__(self, nursery: Nursery, home: int) -> None:
        self._nursery = nursery
        self._home_fd = os.pidfd_open(home)

    def close(self) -> None:
        os.close(self._home_fd)

    def deliver(self, request: bytes, embryo: Embryo, channel_fd: int, go_fd: int) -> None:
        """Make what the request asks for around `embryo`, and tell it to live. Raises OSError on the way.

        channel_fd: its connection to the service. go_fd: a byte arrives when its network interface is there, or -1.
        """
        spec = LaunchSpec.from_wire(json.loads(request[REQUEST.size :]))
        home = f"{self._nursery.state_dir}/sandboxes/{spec.sandbox_id}"
        token = os.urandom(32).hex()
        opened: list[int] = []
        try:
            groups = self._settle(spec, home, token, embryo.pid, opened)
            if not embryo.order.recv(1):
                raise OSError("the newborn ended before it was delivered")
            told = {
                "launch": REQUEST.unpack_from(request)[1],
                "token": token,
                "sandbox_id": spec.sandbox_id,
                "network": spec.network and spec.network.to_wire(),
                "groups": groups,
            }
            if spec.ids:
                told["ids"], told["pids"] = spec.ids, spec.pids or DEFAULT_PIDS
            fds = [channel_fd, embryo.userns_fd, go_fd if go_fd >= 0 else NULL_FD, *opened]
            if spec.ids:
                # Without real root, nobody can enter the namespaces of a process that has given up its rights.
                self._build(home, spec, embryo)
            send_fds(embryo.order, json.dumps(told).encode(), fds)
            if not spec.ids:
                # While it enters its user namespace and gives up its rights, on another core.
                self._build(home, spec, embryo)
            embryo.order.send(b"1")
        finally:
            for fd in opened:
                os.close(fd)

    def _build(self, home: str, spec: LaunchSpec, embryo: Embryo) -> None:
        """Make the newborn's host name, loopback interface and file tree, in its namespaces."""
        kernel.setns(embryo.pidfd, _ENTERED)
        try:
            kernel.sethostname(spec.sandbox_id)
            bring_up_loopback()
            _finish_proc(f"{self._nursery.scratch}/proc", spec.ids - 1 if spec.ids else _LAST_GID)
            build_tree(self._nursery.scratch, home, spec, embryo.userns_fd)
        finally:
            self._come_home()

    def _come_home(self) -> None:
        """Leave the newborn's namespaces; never go on from within."""
        try:
            kernel.setns(self._home_fd, _ENTERED)
        except OSError:
            os._exit(70)  # the zygote has ended, and with it what midwives are for

    def _settle(self, spec: LaunchSpec, home: str, token: str, pid: int, opened: list[int]) -> list[str]:
        """Take the names by which the service finds this sandbox: its directory and its control groups.

        Appends descriptors to `opened`: of the directory, the agent's log, its socket, and what its containment works
        with, whose names are returned.
        """
        cgroups = self._nursery.cgroups
        os.mkdir(home, 0o700)
        # The agent's own directory, by descriptor only: the path to it is closed to everybody but root.
        if not spec.ids:
            os.chown(home, spec.base_uid, spec.base_uid)
        flags = os.O_CLOEXEC | os.O_CREAT | os.O_EXCL
        home_fd = os.open(home, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        opened.append(home_fd)
        note = {"ref": spec.image_ref, "digest": spec.image_digest, "token": token, **self._nursery.note(pid)}
        fd = os.open("sandbox.json", os.O_WRONLY | flags, 0o600, dir_fd=home_fd)
        try:
            os.write(fd, json.dumps(note).encode())
        finally:
            os.close(fd)
        log_fd = os.open("agent.log", os.O_RDWR | os.O_APPEND | flags, 0o600, dir_fd=home_fd)
        opened.append(log_fd)
        os.write(log_fd, b"%.3f the agent is process %d of the machine\n" % (time.time(), pid))
        opened.append(_listen(home))
        cgroups.create(spec)
        cgroups.settle(spec.sandbox_id, pid)
        return cgroups.open_containment(spec.sandbox_id, opened)


def _finish_proc(proc: str, last_gid: int) -> None:
    """Set what a sandbox cannot set itself, and make it read-only."""
    set_network_sysctls(f"{proc}/sys/net", last_gid)
    sysctl = kernel.open_tree(f"{proc}/sys")
    kernel.mount_setattr(sysctl, kernel.MOUNT_ATTR_RDONLY | kernel.PROC_ATTRIBUTES)
    kernel.attach(sysctl, f"{proc}/sys")


def _listen(home: str) -> int:
    """The agent's socket, for a service that comes back: it finds it in the sandbox's directory."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # By a relative name, since socket addresses end at 107 bytes.
    os.chdir(home)
    try:
        listener.bind("agent.sock")
        listener.listen(64)
    finally:
        os.chdir("/")
    return listener.detach()


def serve(nursery: Nursery, requests: socket.socket) -> None:
    """In a process of its own: deliver what the zygote sends (`hand_over`) until it is gone. Never returns."""
    try:
        prctl(PR_SET_NAME, b"orchard-midwife")
        midwife = Midwife(nursery, os.getppid())
        while True:
            data, fds = receive_fds(requests, MAX_ORDER_BYTES)
            if not data:
                break
            _serve_one(nursery, midwife, data, fds)
    finally:
        os._exit(0)


def hand_over(requests: socket.socket, request: bytes, embryo: Embryo, channel_fd: int, go_fd: int) -> None:
    """Let a midwife deliver. Raises OSError when there is none."""
    fds = [
        embryo.order.fileno(),
        embryo.pidfd,
        embryo.userns_fd,
        channel_fd,
        *([go_fd] if go_fd >= 0 else []),
    ]
    send_fds(requests, _PID.pack(embryo.pid) + request, fds)


def _serve_one(nursery: Nursery, midwife: Midwife, data: bytes, fds: list[int]) -> None:
    request = data[_PID.size :]
    order = _socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, fileno=fds[0])
    embryo = Embryo(_PID.unpack_from(data)[0], fds[1], order, fds[2])
    try:
        midwife.deliver(request, embryo, fds[3], fds[4] if len(fds) > 4 else -1)
        nursery.tell("delivered", REQUEST.unpack_from(request)[1], pid=embryo.pid)
    except Exception as error:
        nursery.tell_failure(REQUEST.unpack_from(request)[1], error)
    finally:
        embryo.close()
        for fd in fds[2:]:
            os.close(fd)
