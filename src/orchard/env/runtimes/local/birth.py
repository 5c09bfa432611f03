"""What the newborn process of a sandbox does before it becomes its agent.

It starts as real root in fresh mount, PID, network, IPC, UTS and cgroup namespaces (which therefore belong to
the machine, not to the sandbox: nothing inside ever holds a capability over them), builds the file tree, moves
into it, enters the user namespace, gives up what it does not need and never returns.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import socket

from orchard.env.agent import syscalls
from orchard.env.agent.containment import CgroupContainment
from orchard.env.agent.server import Agent
from orchard.env.runtimes.local import kernel, seccomp
from orchard.env.runtimes.local.etc import write_etc_files
from orchard.env.runtimes.local.interfaces import bring_up_interface, bring_up_loopback
from orchard.env.runtimes.local.spec import REQUEST, LaunchSpec
from orchard.env.runtimes.local.tree import build_tree

TYPE_CHECKING = False  # importing typing would cost every sandbox most of a megabyte
if TYPE_CHECKING:
    from typing import Any

    from orchard.env.runtimes.local.cgroups import Cgroups

KEPT_CAPABILITIES = frozenset((
    "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETPCAP", "NET_BIND_SERVICE",
    "SYS_CHROOT", "SETFCAP",
))  # fmt: skip
MAX_ORDER_BYTES = 1 << 20


class Nursery:
    """What the zygote has ready for every newborn.

    scratch: the private tmpfs with mount points (`root`, `l0`…, `dev`, `disk`). control: where events are told to
    the service. lock_fd: held until the newborn can be found by its names, or -1.
    """

    def __init__(self, state_dir: str, cgroups: Cgroups, control: socket.socket, lock_fd: int) -> None:
        self.state_dir = state_dir
        self.scratch = f"{state_dir}/mnt"
        self.cgroups = cgroups
        self.control = control
        self.lock_fd = lock_fd
        self.seccomp = seccomp.build()
        self.last_capability = kernel.last_capability()
        self.null_fd = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)

    def tell(self, event: str, launch: int, **facts: Any) -> None:
        """One event about a launch, to the service. SystemExit when that is gone; its next one has its own zygote."""
        try:
            self.control.send(json.dumps({"event": event, "launch": launch, **facts}).encode())
        except ConnectionError:
            raise SystemExit(0) from None

    def tell_failure(self, launch: int, error: BaseException) -> None:
        self.tell(
            "failed", launch, detail=f"{type(error).__name__}: {error}", errno=getattr(error, "errno", None)
        )


class Birth:
    """One newborn: what it was asked to be, and what it holds on the way there.

    channel_fd: its connection to the service. go_fd: a byte arrives when the network interface is there, or -1.
    """

    def __init__(
        self, nursery: Nursery, spec: LaunchSpec, channel_fd: int, userns_fd: int, go_fd: int = -1
    ) -> None:
        self.nursery = nursery
        self.scratch = nursery.scratch
        self.spec = spec
        self.channel_fd = channel_fd
        self.userns_fd = userns_fd
        self.go_fd = go_fd
        self.home = f"{nursery.state_dir}/sandboxes/{spec.sandbox_id}"
        self.home_fd = -1
        self.home_link = self.scratch_link = ""

    def settle(self) -> str:
        """Take the names by which the service finds this sandbox: its directory and its control groups.

        Returns the agent's token: who connects later must bring it.
        """
        nursery, spec = self.nursery, self.spec
        os.mkdir(self.home, 0o700)
        # The agent's own directory, by descriptor only: the path to it is closed to everybody but root.
        os.chown(self.home, spec.base_uid, spec.base_uid)
        self.home_fd = os.open(self.home, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        token = os.urandom(32).hex()
        note = json.dumps({"ref": spec.image_ref, "digest": spec.image_digest, "token": token})
        fd = self._create("sandbox.json", os.O_WRONLY)
        os.write(fd, note.encode())
        os.close(fd)
        nursery.cgroups.create(spec)
        kernel.write_control(f"{nursery.cgroups.home_path(spec.sandbox_id)}/cgroup.procs", "0")
        # Its own group is the root of what it sees from here on.
        kernel.unshare(kernel.CLONE_NEWCGROUP)
        if nursery.lock_fd >= 0:
            os.close(nursery.lock_fd)
        return token

    def _create(self, name: str, flags: int) -> int:
        return os.open(name, flags | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=self.home_fd)

    def open_log(self) -> int:
        return self._create("agent.log", os.O_RDWR | os.O_APPEND)

    def containment(self) -> CgroupContainment:
        cgroups, sandbox_id = self.nursery.cgroups, self.spec.sandbox_id
        oom_file = cgroups.oom_file(sandbox_id)
        home, flags = f"{cgroups.v2}/{sandbox_id}", os.O_CLOEXEC
        return CgroupContainment(
            box_fd=os.open(f"{home}/box", os.O_RDONLY | os.O_DIRECTORY | flags),
            home_fd=os.open(f"{cgroups.home_path(sandbox_id)}/cgroup.procs", os.O_WRONLY | flags),
            spawn_fd=os.open(f"{home}/spawn/cgroup.procs", os.O_RDWR | flags),
            spawn_kill_fd=os.open(f"{home}/spawn/cgroup.kill", os.O_WRONLY | flags),
            limit_fds=[
                os.open(f"{path}/{sandbox_id}/cgroup.procs", os.O_WRONLY | flags)
                for path in cgroups.v1.values()
            ],
            oom_fd=os.open(oom_file, os.O_RDONLY | flags) if oom_file else -1,
            score_fd=os.open("/proc/self/oom_score_adj", os.O_WRONLY | flags),
        )

    def listen(self) -> socket.socket:
        """The agent's socket, for a service that comes back: it finds it in the sandbox's directory."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # By a relative name, since socket addresses end at 107 bytes.
        os.chdir(self.home)
        listener.bind("agent.sock")
        listener.listen(64)
        os.chdir("/")
        return listener


def be_born(nursery: Nursery, order: socket.socket) -> None:
    """In a newly forked process: wait for the order, then become the sandbox that it asks for. Never returns."""
    launch = 0
    try:
        prepare(nursery, order)
        message = receive_order(order)
        if message is None:
            os._exit(0)  # the zygote is gone
        order.close()
        launch, birth = read_order(nursery, *message)
        grow_up(birth).run()
    except BaseException as error:
        try:
            nursery.tell_failure(launch, error)
        finally:
            os._exit(70)
    os._exit(0)


def prepare(nursery: Nursery, order: socket.socket) -> None:
    """What can be done before it is known which sandbox this is to be."""
    keep_only(nursery, order.fileno())
    bring_up_loopback()


def keep_only(nursery: Nursery, order_fd: int) -> None:
    """Close the zygote's descriptors that are no business of a sandbox, the standard streams among them."""
    for standard in range(3):
        os.dup2(nursery.null_fd, standard)
    keep = {0, 1, 2, nursery.null_fd, nursery.lock_fd, nursery.control.fileno(), order_fd}
    last = -1
    for fd in sorted(keep):
        if fd > last + 1:
            syscalls.close_range(last + 1, fd - 1)
        last = fd
    syscalls.close_range(last + 1)
    signal.set_wakeup_fd(-1)


def receive_order(order: socket.socket) -> tuple[bytes, list[int]] | None:
    """The message of the zygote and its descriptors; None when the zygote has ended."""
    data, fds, _, _ = socket.recv_fds(order, MAX_ORDER_BYTES, 3)
    return (data, fds) if data else None


def read_order(nursery: Nursery, data: bytes, fds: list[int]) -> tuple[int, Birth]:
    """The number of the launch, and what is to be born."""
    launch: int = REQUEST.unpack_from(data)[1]
    return launch, Birth(nursery, LaunchSpec.from_wire(json.loads(data[REQUEST.size :])), *fds)


def grow_up(birth: Birth) -> Agent:
    """The whole way from a newborn process to its agent. Raises OSError on the way."""
    spec, nursery = birth.spec, birth.nursery
    token = birth.settle()
    containment = birth.containment()
    listener, log_fd = birth.listen(), birth.open_log()
    kernel.sethostname(spec.sandbox_id)
    if spec.network is not None:
        if os.read(birth.go_fd, 1) != b"1":
            raise OSError("the network interface did not come up")
        os.close(birth.go_fd)
        bring_up_interface(spec.network)
    build_tree(birth)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    enter_user_namespace(birth.userns_fd)
    write_etc_files(spec)
    kernel.limit_capabilities(KEPT_CAPABILITIES, nursery.last_capability)
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
    kernel.install_seccomp(nursery.seccomp)
    os.close(nursery.control.detach())
    # What was there before the birth is frozen; what an agent makes has few cycles.
    gc.set_threshold(20_000, 20, 100)
    gc.enable()
    agent = Agent(listener, token, containment, nursery.null_fd, log_fd, birth.home_fd)
    # With its type told, the socket object need not ask the kernel.
    agent.attach(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, fileno=birth.channel_fd))
    return agent


def enter_user_namespace(userns_fd: int) -> None:
    """From here on root is the sandbox's root."""
    kernel.setns(userns_fd, kernel.CLONE_NEWUSER)
    os.close(userns_fd)
    os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    os.umask(0o022)
    if os.getsid(0) != os.getpid():
        os.setsid()
