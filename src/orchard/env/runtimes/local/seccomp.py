"""The system call filter of every sandbox, as a classic BPF program.

Whatever is not needed to develop, build, test or browse and has been a way out of containers is refused:
mounting, namespaces, kernel modules, bpf, perf, io_uring, userfaultfd, keyrings, handles, clocks, raw, packet
and vsock sockets, terminal injection. Numbers above the newest call known here answer ENOSYS, so that a newer
kernel does not widen the sandbox. Calls that could slow or limit the agent (process 1) are refused too.
"""

from __future__ import annotations

import errno
import os
import struct

TYPE_CHECKING = False  # importing typing would cost every sandbox most of a megabyte
if TYPE_CHECKING:
    from collections.abc import Callable

    _Rule = Callable[["_Assembler", str], None]

_LD, _JA, _JEQ, _JGE, _JSET, _ALU_AND, _RET = 0x20, 0x05, 0x15, 0x35, 0x45, 0x54, 0x06
_ALLOW = 0x7FFF0000
_ERRNO = 0x00050000
_NR, _ARCH, _ARGS = 0, 4, 16

#: Highest call number that was weighed when this table was written (setxattrat … removexattrat).
_LAST_KNOWN = 466

# name: (x86_64, aarch64); None where the architecture lacks it. From the kernel's own tables.
_DENIED: dict[str, tuple[int | None, int | None]] = {
    "acct": (163, 89), "add_key": (248, 217), "bpf": (321, 280), "clock_adjtime": (305, 266),
    "clock_settime": (227, 112), "create_module": (174, None), "delete_module": (176, 106),
    "fanotify_init": (300, 262), "finit_module": (313, 273), "get_kernel_syms": (177, None),
    "init_module": (175, 105), "ioperm": (173, None), "iopl": (172, None), "kcmp": (312, 272),
    "kexec_file_load": (320, 294), "kexec_load": (246, 104), "keyctl": (250, 219),
    "lookup_dcookie": (212, 18), "mount": (165, 40), "mount_setattr": (442, 442), "move_mount": (429, 429),
    "move_pages": (279, 239), "migrate_pages": (256, 238), "fsopen": (430, 430), "fsconfig": (431, 431),
    "fsmount": (432, 432), "fspick": (433, 433), "open_tree": (428, 428), "nfsservctl": (180, 42),
    "open_by_handle_at": (304, 265), "perf_event_open": (298, 241), "pivot_root": (155, 41),
    "query_module": (178, None), "quotactl": (179, 60), "quotactl_fd": (443, 443), "reboot": (169, 142),
    "request_key": (249, 218), "setns": (308, 268), "settimeofday": (164, 170), "swapoff": (168, 225),
    "swapon": (167, 224), "sysfs": (139, None), "_sysctl": (156, None), "syslog": (103, 116),
    "umount2": (166, 39), "uselib": (134, None), "userfaultfd": (323, 282), "vhangup": (153, 58),
}  # fmt: skip
#: Answered as if the kernel did not know them, so that programs fall back.
_UNKNOWN: dict[str, tuple[int | None, int | None]] = {
    "clone3": (435, 435), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
}  # fmt: skip
_CALLS: dict[str, tuple[int, int]] = {
    "clone": (56, 220), "unshare": (272, 97), "socket": (41, 198), "ioctl": (16, 29), "personality": (135, 92),
    "prlimit64": (302, 261), "sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118), "sched_setattr": (314, 274), "setpriority": (141, 140), "ioprio_set": (251, 30),
}  # fmt: skip

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_NEW_NAMESPACES = 0x7E020000
_NEW_TIME = 0x80
_AF_UNIX, _AF_INET, _AF_INET6, _AF_NETLINK = 1, 2, 10, 16
_SOCK_RAW = 3
_NETLINK_ALLOWED = (0, 4, 15, 16)  # route, sock_diag, kobject_uevent, generic
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
_PERSONALITIES = (0x0, 0x8, 0x20000, 0x20008, 0x40000, 0xFFFFFFFF)
_AGENT_PID = 1
_SETRLIMIT = (160, 164)
_RLIMIT_LOCKS = 10


class _Assembler:
    """Instructions with forward jumps only, by label."""

    def __init__(self) -> None:
        self.code: list[tuple[int, str | int, str | int, int]] = []
        self.labels: dict[str, int] = {}

    def emit(self, op: int, k: int, yes: str | int = 0, no: str | int = 0) -> None:
        self.code.append((op, yes, no, k & 0xFFFFFFFF))

    def label(self, name: str) -> None:
        self.labels[name] = len(self.code)

    def load_arg(self, index: int) -> None:
        self.emit(_LD, _ARGS + 8 * index)

    def ret(self, number: int) -> None:
        self.emit(_RET, _ERRNO | number if number else _ALLOW)

    def jump(self, label: str) -> None:
        """Unconditional, and of any distance."""
        self.code.append((_JA, label, 0, 0))

    def assemble(self) -> bytes:
        out = bytearray()
        for at, (op, yes, no, k) in enumerate(self.code):
            if op == _JA and isinstance(yes, str):
                out += struct.pack("<HBBI", op, 0, 0, self.labels[yes] - at - 1)
                continue
            jumps = []
            for jump in (yes, no):
                distance = self.labels[jump] - at - 1 if isinstance(jump, str) else jump
                if not 0 <= distance <= 255:
                    raise AssertionError(f"jump to {jump} too far: {distance}")
                jumps.append(distance)
            out += struct.pack("<HBBI", op, jumps[0], jumps[1], k)
        return bytes(out)


def build(machine: str | None = None, words: tuple[int, int] | None = None) -> bytes:
    """The filter for `machine` (default: this one) as an array of sock_filter. KeyError if not supported.

    words: where the limit of file locks is a mark (`orchard.env.agent.marks`), prlimit64 sets it only when its fifth
    and sixth argument, which the kernel does not use, are these.
    """
    machine = machine or os.uname().machine
    column = ("x86_64", "aarch64").index(machine) if machine in _AUDIT_ARCH else -1
    if column < 0:
        raise KeyError(f"no system call table for {machine}")
    a = _Assembler()
    a.emit(_LD, _ARCH)
    a.emit(_JEQ, _AUDIT_ARCH[machine], 1, 0)
    a.ret(errno.ENOSYS)  # another ABI (32-bit) has other numbers: none of it
    a.emit(_LD, _NR)
    a.emit(_JGE, _LAST_KNOWN + 1, 0, 1)  # the x32 numbers lie above too
    a.ret(errno.ENOSYS)
    targets = {numbers[column]: "denied" for numbers in _DENIED.values()}
    targets.update({numbers[column]: "unknown" for numbers in _UNKNOWN.values()})
    targets.update({numbers[column]: f"rule {name}" for name, numbers in _CALLS.items()})
    if words is not None:
        targets[_SETRLIMIT[column]] = "rule setrlimit"
    _search(a, sorted((nr, label) for nr, label in targets.items() if nr is not None))
    a.label("denied")
    a.ret(errno.EPERM)
    a.label("unknown")
    a.ret(errno.ENOSYS)
    rules = {
        "clone": _rule_flags(_NEW_NAMESPACES), "unshare": _rule_flags(_NEW_NAMESPACES | _NEW_TIME),
        "socket": _rule_socket, "ioctl": _rule_ioctl, "personality": _rule_personality,
        "setpriority": _rule_priority(0, 1, 2), "ioprio_set": _rule_priority(1, 2, 3),
        **dict.fromkeys(("prlimit64", "sched_setaffinity", "sched_setscheduler", "sched_setparam", "sched_setattr"),
                        _rule_not_the_agent),
    }  # fmt: skip
    if words is not None:
        rules["setrlimit"] = _rule_setrlimit
        rules["prlimit64"] = _rule_prlimit(words)
    for name, rule in rules.items():
        a.label(f"rule {name}")
        rule(a, name)
    return a.assemble()


def _search(a: _Assembler, targets: list[tuple[int, str]]) -> None:
    """Binary search over the call number. The kernel runs a filter once for every known call when it is
    installed, to learn which are always allowed: a linear one would cost each sandbox a third of a millisecond."""
    if len(targets) <= 2:
        for nr, label in targets:
            a.emit(_JEQ, nr, 0, 1)
            a.jump(label)
        a.ret(0)
        return
    middle = len(targets) // 2
    right = f"from {targets[middle][0]}"
    a.emit(_JGE, targets[middle][0], right, 0)
    _search(a, targets[:middle])
    a.label(right)
    _search(a, targets[middle:])


def _rule_flags(mask: int) -> _Rule:
    def rule(a: _Assembler, _name: str) -> None:
        a.load_arg(0)
        a.emit(_JSET, mask, 0, 1)
        a.ret(errno.EPERM)
        a.ret(0)

    return rule


def _rule_socket(a: _Assembler, name: str) -> None:
    a.load_arg(0)
    a.emit(_JEQ, _AF_UNIX, f"{name} ok", 0)
    a.emit(_JEQ, _AF_NETLINK, f"{name} netlink", 0)
    a.emit(_JEQ, _AF_INET, f"{name} ip", 0)
    a.emit(_JEQ, _AF_INET6, f"{name} ip", 0)
    a.ret(errno.EAFNOSUPPORT)
    a.label(f"{name} ip")
    a.load_arg(1)
    a.emit(_ALU_AND, 0xF)
    a.emit(_JEQ, _SOCK_RAW, 0, f"{name} ok")
    a.ret(errno.EPERM)
    a.label(f"{name} netlink")
    a.load_arg(2)
    for protocol in _NETLINK_ALLOWED:
        a.emit(_JEQ, protocol, f"{name} ok", 0)
    a.ret(errno.EPROTONOSUPPORT)
    a.label(f"{name} ok")
    a.ret(0)


def _rule_ioctl(a: _Assembler, name: str) -> None:
    a.load_arg(1)
    a.emit(_JEQ, _TIOCSTI, f"{name} no", 0)
    a.emit(_JEQ, _TIOCLINUX, f"{name} no", 0)
    a.ret(0)
    a.label(f"{name} no")
    a.ret(errno.EPERM)


def _rule_personality(a: _Assembler, name: str) -> None:
    a.load_arg(0)
    for value in _PERSONALITIES:
        a.emit(_JEQ, value, f"{name} ok", 0)
    a.ret(errno.EPERM)
    a.label(f"{name} ok")
    a.ret(0)


def _rule_not_the_agent(a: _Assembler, _name: str) -> None:
    a.load_arg(0)
    a.emit(_JEQ, _AGENT_PID, 0, 1)
    a.ret(errno.EPERM)
    a.ret(0)


def _rule_setrlimit(a: _Assembler, _name: str) -> None:
    a.load_arg(0)
    a.emit(_JEQ, _RLIMIT_LOCKS, 0, 1)
    a.ret(errno.EPERM)
    a.ret(0)


def _rule_prlimit(words: tuple[int, int]) -> _Rule:
    """Not of the agent, and the limit of file locks only for who knows the words."""

    def rule(a: _Assembler, name: str) -> None:
        a.load_arg(0)
        a.emit(_JEQ, _AGENT_PID, f"{name} no", 0)
        a.load_arg(1)
        a.emit(_JEQ, _RLIMIT_LOCKS, 0, f"{name} ok")
        for half in (0, 4):  # a limit to set is given at all
            a.emit(_LD, _ARGS + 8 * 2 + half)
            a.emit(_JEQ, 0, 0, f"{name} set")
        a.label(f"{name} ok")
        a.ret(0)
        a.label(f"{name} set")
        for index, word in enumerate(words, 4):
            for half in (0, 4):
                a.emit(_LD, _ARGS + 8 * index + half)
                a.emit(_JEQ, word >> 8 * half & 0xFFFFFFFF, 0, f"{name} no")
        a.ret(0)
        a.label(f"{name} no")
        a.ret(errno.EPERM)

    return rule


def _rule_priority(process: int, group: int, user: int) -> _Rule:
    """Priorities by user would include the agent, which has the same one; by process or group only process 1."""

    def rule(a: _Assembler, name: str) -> None:
        a.load_arg(0)
        a.emit(_JEQ, user, f"{name} no", 0)
        a.emit(_JEQ, process, f"{name} who", 0)
        a.emit(_JEQ, group, f"{name} who", 0)
        a.ret(0)
        a.label(f"{name} who")
        a.load_arg(1)
        a.emit(_JEQ, _AGENT_PID, f"{name} no", 0)
        a.ret(0)
        a.label(f"{name} no")
        a.ret(errno.EPERM)

    return rule
