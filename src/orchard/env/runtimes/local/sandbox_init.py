"""What the newborn process of a sandbox does before it becomes its agent.

It starts as real root in fresh mount, PID, network, IPC, UTS and cgroup namespaces (which therefore belong to
the machine, not to the sandbox: nothing inside ever holds a capability over them), builds the file tree, moves
into it, enters the user namespace, gives up what it does not need and never returns.
"""

from __future__ import annotations

import fcntl
import gc
import os
import resource
import socket
import struct

from orchard.env.agent import syscalls
from orchard.env.agent.server import Agent
from orchard.env.runtimes.local import kernel

TYPE_CHECKING = False  # importing typing would cost every sandbox most of a megabyte
if TYPE_CHECKING:
    from orchard.env.agent.containment import CgroupContainment
    from orchard.env.runtimes.local.spec import LaunchSpec, NetworkSpec

KEPT_CAPABILITIES = frozenset((
    "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETPCAP", "NET_BIND_SERVICE",
    "SYS_CHROOT", "SETFCAP",
))  # fmt: skip
#: nosuid changes nothing that no_new_privs would not, but lets programs with file capabilities run, without them.
_IMAGE_ATTRIBUTES = kernel.MOUNT_ATTR_NODEV | kernel.MOUNT_ATTR_NOSUID
_SHM_BYTES = 1 << 30
_DISK_INODES_PER_MIB = 64
_SIOCSIFFLAGS, _SIOCSIFADDR, _SIOCSIFNETMASK, _SIOCADDRT = 0x8914, 0x8916, 0x891C, 0x890B
_IFF_UP_RUNNING = 0x41


class Birth:
    """Descriptors and paths that the zygote hands to a newborn.

    scratch: the private tmpfs with mount points (`root`, `l0`…, `dev`, `disk`). control_fd: where a failure is
    told to the service. go_fd: a byte arrives when the network interface is there, or -1.
    """

    def __init__(
        self, *, spec: LaunchSpec, home: str, scratch: str, userns_fd: int, listener_fd: int, null_fd: int,
        token_fd: int, log_fd: int, containment: CgroupContainment, seccomp: bytes, last_capability: int,
        control_fd: int, go_fd: int = -1,
    ) -> None:  # fmt: skip
        self.spec = spec
        self.scratch = scratch
        self.home = home
        self.home_link = self.scratch_link = ""
        self.userns_fd = userns_fd
        self.listener_fd = listener_fd
        self.null_fd = null_fd
        self.token_fd = token_fd
        self.log_fd = log_fd
        self.containment = containment
        self.seccomp = seccomp
        self.last_capability = last_capability
        self.control_fd = control_fd
        self.go_fd = go_fd


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


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _address(text: str) -> bytes:
    """A sockaddr_in with this IPv4 address."""
    return struct.pack("=HH4s8x", socket.AF_INET, 0, bytes(int(part) for part in text.split(".")))


def bring_up_network(network: NetworkSpec | None) -> None:
    """Loopback, low ports and ping for everyone; with `network` also eth0 and the default route."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        fcntl.ioctl(sock.fileno(), _SIOCSIFFLAGS, struct.pack("=16sH22x", b"lo", _IFF_UP_RUNNING))
        # The namespace belongs to the machine: capabilities inside do not count for ports below 1024.
        _write("/proc/sys/net/ipv4/ip_unprivileged_port_start", "0")
        _write("/proc/sys/net/ipv4/ping_group_range", "0 2147483647")
        if network is None:
            return
        if os.path.exists("/proc/sys/net/ipv6/conf/eth0/disable_ipv6"):
            _write("/proc/sys/net/ipv6/conf/eth0/disable_ipv6", "1")
        mask = (0xFFFFFFFF << (32 - network.prefix_len)) & 0xFFFFFFFF
        dotted = ".".join(str(mask >> shift & 255) for shift in (24, 16, 8, 0))
        fcntl.ioctl(sock.fileno(), _SIOCSIFADDR, struct.pack("=16s16s8x", b"eth0", _address(network.address)))
        fcntl.ioctl(sock.fileno(), _SIOCSIFNETMASK, struct.pack("=16s16s8x", b"eth0", _address(dotted)))
        fcntl.ioctl(sock.fileno(), _SIOCSIFFLAGS, struct.pack("=16sH22x", b"eth0", _IFF_UP_RUNNING))
        any_address = _address("0.0.0.0")
        # struct rtentry: pad1, dst, gateway, genmask, flags (up | gateway), and fields that stay zero.
        route = struct.pack("=Q16s16s16sH", 0, any_address, _address(network.gateway), any_address, 0x3)
        fcntl.ioctl(sock.fileno(), _SIOCADDRT, route.ljust(120, b"\0"))
    finally:
        sock.close()


def _etc_files(spec: LaunchSpec) -> None:
    """hosts, hostname and resolv.conf, where the image has none; as the sandbox's root, inside it."""
    hosts = f"127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n127.0.1.1\t{spec.sandbox_id}\n"
    network = spec.network
    nameservers = network.nameservers if network else []
    _etc("hosts", hosts, replace=False)
    if network is not None:
        _etc("resolv.conf", "".join(f"nameserver {server}\n" for server in nameservers), replace=True)


def _etc(name: str, text: str, *, replace: bool) -> None:
    try:
        os.mkdir("/etc", 0o755)
    except OSError:
        pass  # it is there, or cannot be: the open below tells
    try:
        if os.path.islink(f"/etc/{name}") and replace:
            os.unlink(f"/etc/{name}")
        if not replace and os.path.exists(f"/etc/{name}") and os.stat(f"/etc/{name}").st_size > 0:
            return
        fd = os.open(
            f"/etc/{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644
        )
    except OSError:
        return  # an image that makes this impossible keeps what it has
    os.write(fd, text.encode())
    os.close(fd)


def become_agent(birth: Birth) -> None:
    """The whole way from a newborn process to the serving agent. Raises OSError on the way; never returns."""
    spec = birth.spec
    token = os.urandom(32).hex()
    os.write(birth.token_fd, token.encode())
    os.close(birth.token_fd)
    kernel.sethostname(spec.sandbox_id)
    if birth.go_fd >= 0:
        if os.read(birth.go_fd, 1) != b"1":
            raise OSError("the network interface did not come up")
        os.close(birth.go_fd)
    bring_up_network(spec.network)
    build_tree(birth)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    kernel.setns(birth.userns_fd, kernel.CLONE_NEWUSER)
    os.close(birth.userns_fd)
    os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    os.umask(0o022)
    os.setsid()
    _etc_files(spec)
    kernel.limit_capabilities(KEPT_CAPABILITIES, birth.last_capability)
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
    kernel.install_seccomp(birth.seccomp)
    listener = socket.socket(fileno=birth.listener_fd)
    os.close(birth.control_fd)
    gc.enable()
    Agent(listener, token, birth.containment, birth.null_fd, birth.log_fd).run()
