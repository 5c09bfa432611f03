"""What the newborn process of a sandbox does before it becomes its agent.

It starts as real root in fresh mount, PID, network, IPC, UTS and cgroup namespaces (which therefore belong to
the machine, not to the sandbox: nothing inside ever holds a capability over them), builds the file tree, moves
into it, enters the user namespace, gives up what it does not need and never returns.
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
import resource
import signal
import socket
import stat
import struct

from orchard.env.agent import syscalls
from orchard.env.agent.containment import CgroupContainment
from orchard.env.agent.paths import make_directories
from orchard.env.agent.server import Agent
from orchard.env.runtimes.local import kernel, seccomp
from orchard.env.runtimes.local.spec import REQUEST, LaunchSpec

TYPE_CHECKING = False  # importing typing would cost every sandbox most of a megabyte
if TYPE_CHECKING:
    from typing import Any

    from orchard.env.runtimes.local.cgroups import Cgroups
    from orchard.env.runtimes.local.spec import NetworkSpec

KEPT_CAPABILITIES = frozenset((
    "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETPCAP", "NET_BIND_SERVICE",
    "SYS_CHROOT", "SETFCAP",
))  # fmt: skip
#: nosuid changes nothing that no_new_privs would not, but lets programs with file capabilities run, without them.
_IMAGE_ATTRIBUTES = kernel.MOUNT_ATTR_NODEV | kernel.MOUNT_ATTR_NOSUID
MAX_ORDER_BYTES = 1 << 20
_SHM_BYTES = 1 << 30
_DISK_INODES_PER_MIB = 64
_SIOCSIFFLAGS, _SIOCSIFADDR, _SIOCSIFNETMASK, _SIOCADDRT = 0x8914, 0x8916, 0x891C, 0x890B
_IFF_UP_RUNNING = 0x41


class Nursery:
    """What the zygote has ready for every newborn.

    scratch: the private tmpfs with mount points (`root`, `l0`…, `dev`, `disk`). control: where events are told to
    the service. lock_fd: held until the newborn can be found by its names.
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

    go_fd: a byte arrives when the network interface is there, or -1.
    """

    def __init__(self, nursery: Nursery, spec: LaunchSpec, userns_fd: int, go_fd: int) -> None:
        self.nursery = nursery
        self.scratch = nursery.scratch
        self.spec = spec
        self.userns_fd = userns_fd
        self.go_fd = go_fd
        self.home = f"{nursery.state_dir}/sandboxes/{spec.sandbox_id}"
        self.home_link = self.scratch_link = ""

    def settle(self) -> None:
        """Take the names by which the service finds this sandbox: its directory and its control groups."""
        nursery, spec = self.nursery, self.spec
        os.mkdir(self.home, 0o700)
        # The agent's own directory, by descriptor only: the path to it is closed to everybody but root.
        os.chown(self.home, spec.base_uid, spec.base_uid)
        image = json.dumps({"ref": spec.image_ref, "digest": spec.image_digest})
        fd = os.open(f"{self.home}/image.json", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.write(fd, image.encode())
        os.close(fd)
        nursery.cgroups.create(spec)
        _write(f"{nursery.cgroups.home_path(spec.sandbox_id)}/cgroup.procs", "0")
        # Its own group is the root of what it sees from here on.
        kernel.unshare(kernel.CLONE_NEWCGROUP)
        os.close(nursery.lock_fd)

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

    def listen(self) -> tuple[socket.socket, str, int]:
        """The agent's socket, its token and its log, where the service finds them."""
        token = os.urandom(32).hex()
        create = os.O_CREAT | os.O_CLOEXEC
        token_fd = os.open(f"{self.home}/token", os.O_WRONLY | os.O_EXCL | create, 0o600)
        os.write(token_fd, token.encode())
        os.close(token_fd)
        log_fd = os.open(f"{self.home}/agent.log", os.O_RDWR | os.O_APPEND | create, 0o600)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # By a relative name, since socket addresses end at 107 bytes.
        os.chdir(self.home)
        listener.bind("agent.sock")
        listener.listen(64)
        os.chdir("/")
        return listener, token, log_fd


def _shifted(birth: Birth, layer: str, attributes: int = 0) -> int:
    """A detached copy of the mount at `layer` whose owners are shifted to the sandbox's ids."""
    tree = kernel.open_tree(layer)
    kernel.mount_setattr(tree, attributes, birth.userns_fd)
    return tree


def _overlay(birth: Birth, layers: list[str], first_layer: int, upper_name: str | None) -> int:
    """A detached overlay over `layers`, topmost first; writable in a directory of its own if `upper_name` is given."""
    options: list[tuple[str, str | None]] = [("source", "orchard")]
    for number, layer in enumerate(layers, first_layer):
        _attach(_shifted(birth, layer), f"{birth.scratch}/l{number}")
        options.append(("lowerdir+", f"{birth.scratch_link}/l{number}"))
    if upper_name is None:
        return kernel.new_mount("overlay", options, _IMAGE_ATTRIBUTES | kernel.MOUNT_ATTR_RDONLY)
    spec = birth.spec
    upper_home = f"{birth.scratch_link}/disk" if spec.disk_bytes is not None else birth.home_link
    upper, work = f"{upper_home}/{upper_name}", f"{upper_home}/{upper_name}.work"
    os.mkdir(upper, 0o755)
    os.mkdir(work, 0o700)
    info = os.stat(layers[0])
    os.chmod(upper, info.st_mode & 0o7777)
    os.chown(upper, spec.base_uid + info.st_uid % 65536, spec.base_uid + info.st_gid % 65536)
    # volatile: no sync of the whole disk when a sandbox ends; its files end with it anyway.
    options += [("upperdir", upper), ("workdir", work), ("volatile", None)]
    return kernel.new_mount("overlay", options, _IMAGE_ATTRIBUTES)


def _disk(birth: Birth, size_bytes: int) -> None:
    """A bounded place for the upper directories: ENOSPC at the limit, in blocks and in inodes."""
    inodes = max(4096, (size_bytes >> 20) * _DISK_INODES_PER_MIB)
    fd = kernel.new_mount("tmpfs", [("size", str(size_bytes)), ("nr_inodes", str(inodes)), ("mode", "0700")])
    kernel.move_mount(fd, f"{birth.scratch}/disk")
    os.close(fd)


def _attach(fd: int, target: str) -> None:
    kernel.move_mount(fd, target)
    os.close(fd)


def _mount_point(root: str, name: str) -> str:
    """A directory of the new root to mount on; never through a link that the image planted."""
    path = f"{root}/{name}"
    try:
        os.mkdir(path, 0o755)
    except FileExistsError:
        if os.path.islink(path) or not os.path.isdir(path):
            raise OSError(f"the image's /{name} is not a directory") from None
    return path


def build_tree(birth: Birth) -> None:
    """Mount everything below `scratch/root` and make it this process' root."""
    spec = birth.spec
    base = spec.base_uid
    root = f"{birth.scratch}/root"
    # /proc/mounts shows the sandbox how its layers were named: by descriptor, not by this machine's paths.
    links = [os.open(path, os.O_PATH | os.O_CLOEXEC) for path in (birth.home, birth.scratch)]
    birth.home_link, birth.scratch_link = (f"/proc/self/fd/{fd}" for fd in links)
    # Mount points that images lack are made by and for the sandbox's root.
    old_mask = os.umask(0)
    if spec.disk_bytes is not None:
        _disk(birth, spec.disk_bytes)
    _attach(_overlay(birth, spec.layers, 0, "upper"), root)
    used = len(spec.layers)
    for number, (target, layers, read_only) in enumerate(spec.mounts):
        if read_only and len(layers) == 1:
            attributes = _IMAGE_ATTRIBUTES | kernel.MOUNT_ATTR_RDONLY
            _attach(_shifted(birth, layers[0], attributes), f"{root}{target}")
        else:
            _attach(
                _overlay(birth, layers, used, None if read_only else f"upper.{number}"), f"{root}{target}"
            )
            used += len(layers)
    nosuid = kernel.MOUNT_ATTR_NOSUID | kernel.MOUNT_ATTR_NODEV | kernel.MOUNT_ATTR_NOEXEC
    proc = _mount_point(root, "proc")
    _attach(kernel.new_mount("proc", [], nosuid), proc)
    _set_network_sysctls(f"{proc}/sys/net", spec.network)
    sysctl = kernel.open_tree(f"{proc}/sys")
    kernel.mount_setattr(sysctl, kernel.MOUNT_ATTR_RDONLY | nosuid)
    _attach(sysctl, f"{proc}/sys")
    dev = kernel.open_tree(f"{birth.scratch}/dev")
    kernel.mount_setattr(dev, kernel.MOUNT_ATTR_RDONLY | kernel.MOUNT_ATTR_NOSUID | kernel.MOUNT_ATTR_NOEXEC)
    target = _mount_point(root, "dev")
    _attach(dev, target)
    pts: list[tuple[str, str | None]] = [
        ("newinstance", None),
        ("ptmxmode", "0666"),
        ("mode", "0620"),
        ("gid", str(base + 5)),
    ]
    _attach(
        kernel.new_mount("devpts", pts, kernel.MOUNT_ATTR_NOSUID | kernel.MOUNT_ATTR_NOEXEC), f"{target}/pts"
    )
    size = _SHM_BYTES if spec.memory_bytes is None else min(_SHM_BYTES, spec.memory_bytes // 2)
    shm: list[tuple[str, str | None]] = [
        ("size", str(size)),
        ("mode", "1777"),
        ("uid", str(base)),
        ("gid", str(base)),
    ]
    _attach(
        kernel.new_mount("tmpfs", shm, kernel.MOUNT_ATTR_NOSUID | kernel.MOUNT_ATTR_NODEV), f"{target}/shm"
    )
    os.umask(old_mask)
    os.chdir(root)
    kernel.pivot_root_here()
    for fd in links:
        os.close(fd)


def _set_network_sysctls(net: str, network: NetworkSpec | None) -> None:
    """Low ports and ping for everyone, no IPv6 on eth0. `net` lies in the sandbox's own /proc: in the machine's,
    one name has an entry for every network namespace, and looking it up takes time in their number."""
    # The namespace belongs to the machine: capabilities inside do not count for ports below 1024.
    _write(f"{net}/ipv4/ip_unprivileged_port_start", "0")
    _write(f"{net}/ipv4/ping_group_range", "0 2147483647")
    if network is not None and os.path.exists(f"{net}/ipv6/conf/eth0/disable_ipv6"):
        _write(f"{net}/ipv6/conf/eth0/disable_ipv6", "1")


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _address(text: str) -> bytes:
    """A sockaddr_in with this IPv4 address."""
    return struct.pack("=HH4s8x", socket.AF_INET, 0, bytes(int(part) for part in text.split(".")))


def bring_up_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock.fileno(), _SIOCSIFFLAGS, struct.pack("=16sH22x", b"lo", _IFF_UP_RUNNING))


def bring_up_interface(network: NetworkSpec) -> None:
    """Address and state of eth0, and the default route."""
    mask = (0xFFFFFFFF << (32 - network.prefix_len)) & 0xFFFFFFFF
    dotted = ".".join(str(mask >> shift & 255) for shift in (24, 16, 8, 0))
    any_address = _address("0.0.0.0")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fd = sock.fileno()
        fcntl.ioctl(fd, _SIOCSIFADDR, struct.pack("=16s16s8x", b"eth0", _address(network.address)))
        fcntl.ioctl(fd, _SIOCSIFNETMASK, struct.pack("=16s16s8x", b"eth0", _address(dotted)))
        fcntl.ioctl(fd, _SIOCSIFFLAGS, struct.pack("=16sH22x", b"eth0", _IFF_UP_RUNNING))
        # struct rtentry: pad1, dst, gateway, genmask, flags (up | gateway), and fields that stay zero.
        route = struct.pack("=Q16s16s16sH", 0, any_address, _address(network.gateway), any_address, 0x3)
        fcntl.ioctl(fd, _SIOCADDRT, route.ljust(120, b"\0"))


def _etc_files(spec: LaunchSpec) -> None:
    """hosts, hostname and resolv.conf, where the image has none; as the sandbox's root, inside it."""
    hosts = f"127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n127.0.1.1\t{spec.sandbox_id}\n"
    network = spec.network
    nameservers = network.nameservers if network else []
    _etc("hosts", hosts, replace=False)
    if network is not None:
        _etc("resolv.conf", "".join(f"nameserver {server}\n" for server in nameservers), replace=True)


def _etc(name: str, text: str, *, replace: bool) -> None:
    """Write /etc/`name`, unless the image has made that impossible: then it keeps what it has."""
    raw = name.encode()
    if not replace and os.path.isfile(f"/etc/{name}") and os.path.getsize(f"/etc/{name}"):
        return
    try:
        folder = make_directories(b"/etc")
    except OSError:
        return
    try:
        info = _stat_of(raw, folder)
        if info is not None and (stat.S_ISLNK(info.st_mode) or not stat.S_ISREG(info.st_mode)):
            if not replace:
                return
            os.unlink(raw, dir_fd=folder)
        elif info is not None and info.st_size > 0 and not replace:
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(raw, flags, 0o644, dir_fd=folder)
        os.write(fd, text.encode())
        os.close(fd)
    except OSError:
        return
    finally:
        os.close(folder)


def _stat_of(name: bytes, folder: int) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None


def be_born(nursery: Nursery, order: socket.socket) -> None:
    """In a newly forked process: wait for the order, then become the sandbox that it asks for. Never returns."""
    launch = 0
    try:
        keep_only(nursery, order.fileno())
        bring_up_loopback()
        data, fds, _, _ = socket.recv_fds(order, MAX_ORDER_BYTES, 2)
        if not data:
            os._exit(0)  # the zygote is gone
        order.close()
        _, launch, _, _ = REQUEST.unpack_from(data)
        spec = LaunchSpec.from_wire(json.loads(data[REQUEST.size :]))
        become_agent(Birth(nursery, spec, fds[0], fds[1] if len(fds) > 1 else -1), launch)
    except BaseException as error:
        try:
            nursery.tell_failure(launch, error)
        finally:
            os._exit(70)
    os._exit(0)


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


def become_agent(birth: Birth, launch: int) -> None:
    """The whole way from a newborn process to the serving agent. Raises OSError on the way; never returns."""
    spec, nursery = birth.spec, birth.nursery
    birth.settle()
    containment = birth.containment()
    listener, token, log_fd = birth.listen()
    folder_fd = os.open(birth.home, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    nursery.tell("listening", launch)
    kernel.sethostname(spec.sandbox_id)
    if spec.network is not None:
        if os.read(birth.go_fd, 1) != b"1":
            raise OSError("the network interface did not come up")
        os.close(birth.go_fd)
        bring_up_interface(spec.network)
    build_tree(birth)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    enter_user_namespace(birth.userns_fd)
    _etc_files(spec)
    kernel.limit_capabilities(KEPT_CAPABILITIES, nursery.last_capability)
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
    kernel.install_seccomp(nursery.seccomp)
    os.close(nursery.control.detach())
    # What was there before the birth is frozen; what an agent makes has few cycles.
    gc.set_threshold(20_000, 20, 100)
    gc.enable()
    Agent(listener, token, containment, nursery.null_fd, log_fd, folder_fd).run()


def enter_user_namespace(userns_fd: int) -> None:
    """From here on root is the sandbox's root."""
    kernel.setns(userns_fd, kernel.CLONE_NEWUSER)
    os.close(userns_fd)
    os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    os.umask(0o022)
    os.setsid()
