"""The zygote rehearses what sandboxes will do, before the first fork: being born, and running commands.

The interpreter adapts code to how it is used while it runs, by writing into it and into its caches. Done here once,
that is there for every sandbox: its birth and its first commands take less time, and it copies fewer pages of memory
for itself.
"""

from __future__ import annotations

import _socket
import copy
import ctypes
import json
import os
import socket

from orchard.env.agent import syscalls
from orchard.env.agent.wire import FrameReader, frame
from orchard.env.runtimes.local import kernel, newborn
from orchard.env.runtimes.local.descriptors import receive_fds
from orchard.env.runtimes.local.midwife import MAX_ORDER_BYTES, Embryo, Midwife
from orchard.env.runtimes.local.nursery import CONTROL_FD, ORDER_FD
from orchard.env.runtimes.local.spec import REQUEST, LaunchSpec

TYPE_CHECKING = False  # importing typing would cost every sandbox most of a megabyte
if TYPE_CHECKING:
    from typing import Any

    from orchard.env.agent.server import Agent
    from orchard.env.runtimes.local.nursery import Nursery

#: The interpreter adapts a function after some eight calls.
_BIRTHS = 12
_COMMANDS = 2
_NAME = "rehearsal"
_NAMESPACES = {
    "mnt": kernel.CLONE_NEWNS,
    "net": kernel.CLONE_NEWNET,
    "ipc": kernel.CLONE_NEWIPC,
    "uts": kernel.CLONE_NEWUTS,
    "cgroup": kernel.CLONE_NEWCGROUP,
}
_GETPID = {"x86_64": 39, "aarch64": 172}.get(os.uname().machine, -1)
_SMALL_LIMIT_BYTES = 256 << 20
_STUCK_TURNS = 2000


def rehearse(nursery: Nursery, userns_fd: int) -> None:
    """Be born some times and run some commands, as real as it can be undone: in namespaces and groups of its own,
    left afterwards.

    What cannot be undone (entering a user namespace, giving up capabilities, the filter) is gone through without the
    system call. Where something fails, that is left to the sandboxes to tell.
    """
    if _GETPID < 0:
        return
    stage = copy.copy(nursery)
    stage.state_dir = f"{nursery.scratch}/{_NAME}"
    spec = _spec(stage.state_dir)
    try:
        for _ in range(_BIRTHS):
            with _Undone(stage):
                _live(stage, spec, userns_fd)
    except OSError:
        return


def _spec(folder: str) -> LaunchSpec:
    """An image like `host`: a root with links, and the machine's programs mounted into it."""
    layer = f"{folder}/layer"
    os.makedirs(f"{layer}/usr", exist_ok=True)
    os.mkdir(f"{layer}/opt")
    os.mkdir(f"{folder}/more")
    os.mkdir(f"{folder}/sandboxes")
    for name in ("bin", "lib", "lib64"):
        os.symlink(f"usr/{name}", f"{layer}/{name}")
    mounts = [("/usr", [f"{folder}/more", "/usr"], True), ("/opt", [f"{folder}/more"], True)]
    return LaunchSpec(
        sandbox_id=_NAME, slot=0, layers=[layer], mounts=mounts, image_ref=_NAME, image_digest=_NAME,
        memory_bytes=_SMALL_LIMIT_BYTES, pids=64,
    )  # fmt: skip


def _live(stage: Nursery, spec: LaunchSpec, userns_fd: int) -> None:
    """One life: delivery and birth in one process, with a service at the other end that asks for commands."""
    request = REQUEST.pack(b"C", 0, 0, False) + json.dumps(spec.to_wire()).encode()
    order, midwifes = _socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    service, agents = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    stage.control, events = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    os.dup2(stage.control.fileno(), ORDER_FD, inheritable=False)
    stage.order = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, fileno=ORDER_FD)
    midwife = Midwife(stage, os.getpid())
    embryo = Embryo(os.getpid(), os.pidfd_open(os.getpid()), midwifes, userns_fd)
    mutes = _mute()
    try:
        score_fd = newborn.prepare(stage, order.fileno())
        _unmute(mutes)
        midwife.deliver(request, embryo, agents.fileno(), -1)
        told, fds = receive_fds(stage.order, MAX_ORDER_BYTES)
        mutes = _mute()
        agent = newborn.wake(stage, json.loads(told), fds, score_fd)
    finally:
        _unmute(mutes)
        midwife.close()
        embryo.close()
        for end in (order, agents, stage.control, events):
            end.close()
    try:
        _command(agent, service)
    finally:
        service.close()
        _bury(agent, fds[3])
        os.dup2(CONTROL_FD, ORDER_FD, inheritable=False)  # so that the number stays taken


def _command(agent: Agent, service: socket.socket) -> None:
    reader = FrameReader()
    configure = {"env": {"A": "b"}, "working_dir": "/", "user": "root"}
    requests: list[dict[str, Any]] = [{"op": "hello", "configure": configure}]
    requests += [
        {"op": "exec", "job_id": f"r{number}", "command": ["true"], "wait": True, "timeout_s": 9}
        for number in range(_COMMANDS)
    ]
    for number, request in enumerate(requests):
        service.sendall(frame({"id": number, **request}))
        for _ in range(_STUCK_TURNS):
            agent.loop.turn(0.0005)
            agent.jobs.reap()
            try:
                data = service.recv(65536, socket.MSG_DONTWAIT)
            except BlockingIOError:
                continue
            if reader.feed(data):
                break


def _bury(agent: Agent, folder_fd: int) -> None:
    for connection in list(agent.connections):
        connection.close()
    agent.close()
    agent.containment.close()
    os.close(folder_fd)


def _mute() -> list[tuple[Any, str, Any]]:
    """Let what would bind this process for ever ask for its pid instead; the real values."""
    getpid = ctypes.PyDLL(None).getpid
    muted = [
        (kernel, "_setns", getpid), (kernel, "_prctl", getpid), (syscalls, "_prctl", getpid),
        (kernel, "_CAPSET", _GETPID), (kernel, "_SECCOMP", _GETPID), (syscalls, "SYS_CLOSE_RANGE", _GETPID),
    ]  # fmt: skip
    real = [(module, name, getattr(module, name)) for module, name, _ in muted]
    _unmute(muted)
    return real


def _unmute(values: list[tuple[Any, str, Any]]) -> None:
    for module, name, value in values:
        setattr(module, name, value)


class _Undone:
    """Within it this process is in namespaces of its own; afterwards it is where it was, and nothing is left of the
    sandbox."""

    def __init__(self, stage: Nursery) -> None:
        self._stage = stage

    def __enter__(self) -> None:
        flags = os.O_RDONLY | os.O_CLOEXEC
        self._group = self._stage.cgroups.own_group()
        self._homes = {name: os.open(f"/proc/self/ns/{name}", flags) for name in _NAMESPACES}
        self._standard = [os.dup(fd) for fd in range(3)]
        self._mask = os.umask(0o022)
        kernel.unshare(sum(kind for name, kind in _NAMESPACES.items() if name != "cgroup"))

    def __exit__(self, *_: object) -> None:
        for name, fd in self._homes.items():
            kernel.setns(fd, _NAMESPACES[name])
        for fd, copied in enumerate(self._standard):
            os.dup2(copied, fd)
        for fd in (*self._homes.values(), *self._standard):
            os.close(fd)
        os.umask(self._mask)
        kernel.write_control(self._group, "0")
        self._stage.cgroups.remove(_NAME)
        _remove_tree(f"{self._stage.state_dir}/sandboxes/{_NAME}")


def _remove_tree(path: str) -> None:
    for entry in os.scandir(path):
        if entry.is_dir(follow_symlinks=False):
            os.chmod(entry.path, 0o700)
            _remove_tree(entry.path)
        else:
            os.unlink(entry.path)
    os.rmdir(path)
