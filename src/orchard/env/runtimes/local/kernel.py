"""Linux system calls of the launcher: namespaces, the new mount interface, capabilities, resource limits.

Numbers are those of the unified table (≥ 424), the same on every architecture, except where looked up.
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct

TYPE_CHECKING = False  # importing typing would cost every sandbox most of a megabyte
if TYPE_CHECKING:
    from collections.abc import Sequence

from orchard.env.agent import syscalls
from orchard.env.agent.syscalls import checked

_libc = ctypes.PyDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long
# Looked up here, once: a look-up in a newborn would cost it as much as the call.
_setns, _unshare, _sethostname, _mount, _umount2, _prctl, _setrlimit = (
    _libc.setns, _libc.unshare, _libc.sethostname, _libc.mount, _libc.umount2, _libc.prctl,
    _libc.setrlimit,
)  # fmt: skip

madvise = _libc.madvise

_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}.get(os.uname().machine, -1)
_CAPSET = {"x86_64": 126, "aarch64": 91}.get(os.uname().machine, -1)
_SECCOMP = {"x86_64": 317, "aarch64": 277}.get(os.uname().machine, -1)
_OPEN_TREE, _MOVE_MOUNT, _FSOPEN, _FSCONFIG, _FSMOUNT = 428, 429, 430, 431, 432
_CLONE3, _MOUNT_SETATTR = 435, 442

CLONE_NEWNS = 0x00020000
_CLONE_PIDFD = 0x00001000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

AT_FDCWD = -100
_AT_EMPTY_PATH = 0x1000
_AT_RECURSIVE = 0x8000
_OPEN_TREE_CLONE = 1
_MOVE_MOUNT_F_EMPTY_PATH = 4
_FSCONFIG_SET_FLAG, _FSCONFIG_SET_STRING, _FSCONFIG_CMD_CREATE = 0, 1, 6
MOUNT_ATTR_RDONLY = 0x1
MOUNT_ATTR_NOSUID = 0x2
MOUNT_ATTR_NODEV = 0x4
MOUNT_ATTR_NOEXEC = 0x8
_MOUNT_ATTR_IDMAP = 0x00100000

PROC_ATTRIBUTES = MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC

_RLIMIT_CORE = 4

MS_REC = 0x4000
MS_PRIVATE = 1 << 18
MS_SLAVE = 1 << 19
MNT_DETACH = 2

CAP_NAMES = (  # in the order of their numbers
    "CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETPCAP",
    "LINUX_IMMUTABLE", "NET_BIND_SERVICE", "NET_BROADCAST", "NET_ADMIN", "NET_RAW", "IPC_LOCK",
    "IPC_OWNER", "SYS_MODULE", "SYS_RAWIO", "SYS_CHROOT", "SYS_PTRACE", "SYS_PACCT", "SYS_ADMIN",
    "SYS_BOOT", "SYS_NICE", "SYS_RESOURCE", "SYS_TIME", "SYS_TTY_CONFIG", "MKNOD", "LEASE", "AUDIT_WRITE",
    "AUDIT_CONTROL", "SETFCAP", "MAC_OVERRIDE", "MAC_ADMIN", "SYSLOG", "WAKE_ALARM", "BLOCK_SUSPEND",
    "AUDIT_READ", "PERFMON", "BPF", "CHECKPOINT_RESTORE",
)  # fmt: skip


def clone3(flags: int) -> tuple[int, int]:
    """fork(2) into new namespaces: pid and pidfd in the parent, (0, -1) in the child.

    Only for a process with one thread: the interpreter's own fork hooks do not run.
    """
    pidfd = ctypes.c_int(-1)
    args = struct.pack(
        "<11Q", flags | _CLONE_PIDFD, ctypes.addressof(pidfd), 0, 0, signal.SIGCHLD, 0, 0, 0, 0, 0, 0
    )
    pid = checked(_syscall(_CLONE3, args, len(args)), "clone3")
    return pid, pidfd.value if pid else -1


def write_control(path: str, text: str) -> None:
    """One write to a file by which the kernel is controlled."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def setns(fd: int, kind: int = 0) -> None:
    checked(_setns(fd, kind), "setns")


def unshare(flags: int) -> None:
    checked(_unshare(flags), "unshare")


def sethostname(name: str) -> None:
    raw = name.encode()
    checked(_sethostname(raw, ctypes.c_size_t(len(raw))), "sethostname")


def mount(source: str, target: str, kind: str | None, flags: int = 0, data: str | None = None) -> None:
    """mount(2), where the old interface is the simpler one."""
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, kind, data)]
    checked(_mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3]), f"mount {target}")


_MS_REMOUNT = 32
_MOUNT_FLAGS = {"ro": 1, "nosuid": 2, "nodev": 4, "noexec": 8, "noatime": 1 << 10, "relatime": 1 << 21}


def remount(target: str, attributes: str, options: str) -> None:
    """Change the options of a mounted file system; `attributes` as in /proc/self/mountinfo are kept."""
    flags = sum(_MOUNT_FLAGS.get(name, 0) for name in attributes.split(","))
    mount("none", target, None, _MS_REMOUNT | flags, options)


def umount(target: str, flags: int = 0) -> None:
    checked(_umount2(os.fsencode(target), flags), f"umount {target}")


def open_tree(path: str, *, recursive: bool = False) -> int:
    """A detached copy of the mount at `path`, as a descriptor."""
    flags = _OPEN_TREE_CLONE | os.O_CLOEXEC | (_AT_RECURSIVE if recursive else 0)
    return checked(_syscall(_OPEN_TREE, AT_FDCWD, os.fsencode(path), flags), f"open_tree {path}")


def mount_setattr(fd: int, attributes: int, userns_fd: int = -1) -> None:
    """Set attributes of a detached mount; with `userns_fd` its owners are shifted through that mapping."""
    if userns_fd >= 0:
        attributes |= _MOUNT_ATTR_IDMAP
    attr = struct.pack("<4Q", attributes, 0, 0, max(userns_fd, 0))
    checked(_syscall(_MOUNT_SETATTR, fd, b"", _AT_EMPTY_PATH, attr, len(attr)), "mount_setattr")


def move_mount(fd: int, target: str) -> None:
    """Attach a detached mount at `target`."""
    checked(
        _syscall(_MOVE_MOUNT, fd, b"", AT_FDCWD, os.fsencode(target), _MOVE_MOUNT_F_EMPTY_PATH),
        f"move_mount {target}",
    )


def attach(fd: int, target: str) -> None:
    """Attach a detached mount at `target`, and close its descriptor."""
    try:
        move_mount(fd, target)
    finally:
        os.close(fd)


def relocate(source: str, target: str) -> None:
    """Move the mount at `source`, and all that is mounted below it, to `target`."""
    paths = os.fsencode(source), os.fsencode(target)
    checked(_syscall(_MOVE_MOUNT, AT_FDCWD, paths[0], AT_FDCWD, paths[1], 0), f"move_mount {source}")


def new_mount(kind: str, options: Sequence[tuple[str, str | None]], attributes: int = 0) -> int:
    """A new, detached mount of file system `kind`; options as (name, value) or (flag, None)."""
    fs = checked(_syscall(_FSOPEN, kind.encode(), 1), f"fsopen {kind}")
    try:
        for name, value in options:
            command = _FSCONFIG_SET_FLAG if value is None else _FSCONFIG_SET_STRING
            text = None if value is None else os.fsencode(value)
            checked(_syscall(_FSCONFIG, fs, command, name.encode(), text, 0), f"{kind} option {name}")
        checked(_syscall(_FSCONFIG, fs, _FSCONFIG_CMD_CREATE, None, None, 0), f"create {kind}")
        return checked(_syscall(_FSMOUNT, fs, 1, attributes), f"fsmount {kind}")
    finally:
        os.close(fs)


def pivot_root_here() -> None:
    """Make the current directory the root and drop everything else."""
    checked(_syscall(_PIVOT_ROOT, b".", b"."), "pivot_root")
    umount(".", MNT_DETACH)
    os.chdir("/")


def no_core_dumps() -> None:
    """For this process and all that descend from it."""
    checked(_setrlimit(_RLIMIT_CORE, struct.pack("<2Q", 0, 0)), "setrlimit")


def last_capability() -> int:
    """The highest capability number that this kernel knows."""
    with open("/proc/sys/kernel/cap_last_cap") as file:
        return int(file.read())


def limit_capabilities(keep: frozenset[str], last: int) -> None:
    """This process, and whatever it will execute, has at most `keep` (names without CAP_).

    To be called after entering a user namespace, which fills all sets anew; the agent executes nothing itself,
    so dropping from its bounding set leaves its own capabilities alone. last: `last_capability()`.
    """
    mask = 0
    for number in range(last + 1):
        if number < len(CAP_NAMES) and CAP_NAMES[number] in keep:
            mask |= 1 << number
        else:
            checked(_prctl(syscalls.PR_CAPBSET_DROP, number, 0, 0, 0), "prctl")
    low, high = mask & 0xFFFFFFFF, mask >> 32
    header = struct.pack("<II", 0x20080522, 0)
    data = struct.pack("<6I", low, low, 0, high, high, 0)
    checked(_syscall(_CAPSET, header, data), "capset")


class SeccompFilter:
    """A compiled BPF program, ready to be installed."""

    def __init__(self, program: bytes) -> None:
        self._buffer = ctypes.create_string_buffer(program, len(program))
        self._fprog = struct.pack("<HxxxxxxQ", len(program) // 8, ctypes.addressof(self._buffer))

    def install(self) -> None:
        """Make it this thread's filter, inherited by all children."""
        checked(_syscall(_SECCOMP, 1, 0, self._fprog), "seccomp")
