"""Attempts to reach the machine through the kernel: each is real code inside, and must be refused."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.inside import REFUSED, inside
from tests.support.machine import mounts
from tests.support.rest import Box

#: Settings of the machine that no attempt may change.
WATCHED = ("/proc/sys/kernel/core_pattern", "/proc/sys/kernel/hostname", "/proc/sys/kernel/domainname",
           "/proc/sys/vm/overcommit_memory", "/proc/sys/kernel/modprobe", "/proc/swaps", "/proc/modules")  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def unharmed(box: Box) -> Iterator[None]:
    """After all attempts the machine is as it was and the sandbox still works."""
    before = {path: Path(path).read_text() for path in WATCHED if Path(path).exists()}
    mounted = {line.split(" ", 1)[1] for line in mounts()}
    yield
    assert {path: Path(path).read_text() for path in before} == before
    assert {line.split(" ", 1)[1] for line in mounts()} - mounted == set()
    assert socket.gethostname() == before["/proc/sys/kernel/hostname"].strip()
    assert box.alive()


MOUNTING = {
    "mount a tmpfs": 'call("mount", "none", "/tmp", "tmpfs", 0, None)',
    "mount proc": 'call("mount", "proc", "/tmp", "proc", 0, None)',
    "mount sysfs": 'call("mount", "sysfs", "/tmp", "sysfs", 0, None)',
    "mount cgroup2": 'call("mount", "none", "/tmp", "cgroup2", 0, None)',
    "mount overlay": 'call("mount", "o", "/tmp", "overlay", 0, "lowerdir=/usr:/etc")',
    "bind mount": 'call("mount", "/etc", "/tmp", None, 4096, None)',
    "remount /proc/sys writable": 'call("mount", "none", "/proc/sys", None, 32 | 4096, None)',
    "change propagation": 'call("mount", "none", "/", None, (1 << 20) | 16384, None)',
    "unmount /proc": 'call("umount2", "/proc", 2)',
    "unmount /proc/sys": 'call("umount2", "/proc/sys", 2)',
    "unmount /dev": 'call("umount2", "/dev", 2)',
    "unmount the root": 'call("umount2", "/", 2)',
    "fsopen": 'call("fsopen", "tmpfs", 1)',
    "fspick": 'call("fspick", -100, "/", 0)',
    "open_tree clone": 'call("open_tree", -100, "/", 1)',
    "move_mount": 'call("move_mount", -100, "/proc", -100, "/tmp", 0)',
    "mount_setattr": 'call("mount_setattr", -100, "/", 0, struct.pack("QQQQ", 0, 1, 0, 0), 32)',
    "pivot_root": 'call("pivot_root", "/", "/tmp")',
}

NAMESPACES = {
    "unshare user": 'call("unshare", NEWUSER)',
    "unshare mount": 'call("unshare", NEWNS)',
    "unshare user and mount": 'call("unshare", NEWUSER | NEWNS)',
    "unshare pid": 'call("unshare", NEWPID)',
    "unshare net": 'call("unshare", NEWNET)',
    "unshare uts": 'call("unshare", NEWUTS)',
    "unshare ipc": 'call("unshare", NEWIPC)',
    "unshare cgroup": 'call("unshare", NEWCGROUP)',
    "clone user": 'call("clone", NEWUSER | 17, None, None, None, None)',
    "clone user and net": 'call("clone", NEWUSER | NEWNET | 17, None, None, None, None)',
    "clone3 user": 'call("clone3", struct.pack("Q" * 11, NEWUSER, 0, 0, 0, 17, 0, 0, 0, 0, 0, 0), 88)',
    "setns to process 1": '(lambda fd: fd if isinstance(fd, str) else call("setns", fd, 0))'
    '(attempt(lambda: os.open("/proc/1/ns/mnt", 0)))',
    "setns to oneself": 'call("setns", os.open("/proc/self/ns/net", 0), 0)',
}

SYSTEM_CALLS = {
    "bpf": 'call("bpf", 0, bytes(128), 128)',
    "bpf program": 'call("bpf", 5, bytes(128), 128)',
    "perf_event_open": 'call("perf_event_open", struct.pack("II", 1, 128) + bytes(120), 0, -1, -1, 0)',
    "io_uring_setup": 'call("io_uring_setup", 8, bytes(120))',
    "userfaultfd": 'call("userfaultfd", 1)',
    "keyctl": 'call("keyctl", 0, -3, 1)',
    "add_key": 'call("add_key", "user", "x", b"y", 1, -3)',
    "request_key": 'call("request_key", "user", "x", None, -3)',
    "open_by_handle_at": 'call("open_by_handle_at", -100, struct.pack("IiQ", 8, 1, 2), 0)',
    "init_module": 'call("init_module", b"x" * 64, 64, "")',
    "finit_module": 'call("finit_module", 0, "", 0)',
    "delete_module": 'call("delete_module", "loop", 0)',
    "kexec_load": 'call("kexec_load", 0, 0, None, 0)',
    "kexec_file_load": 'call("kexec_file_load", 0, 0, 0, "", 8)',
    "reboot": 'call("reboot", 0xfee1dead, 672274793, 0, None)',
    "swapon": 'call("swapon", "/tmp", 0)',
    "swapoff": 'call("swapoff", "/tmp")',
    "settimeofday": 'call("settimeofday", struct.pack("qq", 1, 0), None)',
    "clock_settime": 'call("clock_settime", 0, struct.pack("qq", 1, 0))',
    "adjtimex": 'call("adjtimex", struct.pack("I", 1) + bytes(400))',
    "sethostname": 'call("sethostname", b"owned", 5)',
    "setdomainname": 'call("setdomainname", b"owned", 5)',
    "syslog": 'call("syslog", 3, bytes(4096), 4096)',
    "acct": 'call("acct", "/tmp/acct")',
    "quotactl": 'call("quotactl", 0x800002 << 8, "/dev/vda", 0, bytes(256))',
    "iopl": 'call("iopl", 3)',
    "ioperm": 'call("ioperm", 0x70, 2, 1)',
    "fanotify_init": 'call("fanotify_init", 0, 0)',
    "vhangup": 'call("vhangup")',
    "kcmp": 'call("kcmp", 1, os.getpid(), 2, 0, 0)',
    "uselib": 'call("uselib", "/bin/true")',
    "lookup_dcookie": 'call("lookup_dcookie", 1, bytes(100), 100)',
    "raise real-time priority": 'call("sched_setscheduler", 0, 1, struct.pack("i", 50))',
    "raise priority": 'call("setpriority", 0, 0, -10)',
    "raise a hard limit": 'call("prlimit64", 0, 7, struct.pack("QQ", 1 << 30, 1 << 30), None)',
}

SOCKETS = {
    "raw": "socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)",
    "raw tcp": "socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_TCP)",
    "raw v6": "socket.socket(socket.AF_INET6, socket.SOCK_RAW, 58)",
    "packet": "socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0x0300)",
    "packet datagram": "socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, 0x0300)",
    "old packet": "socket.socket(socket.AF_INET, 10, 0x0300)",
    "vsock": "socket.socket(40, socket.SOCK_STREAM)",
    "vsock datagram": "socket.socket(40, socket.SOCK_DGRAM)",
    "alg": "socket.socket(38, socket.SOCK_SEQPACKET)",
    "netlink audit": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 9)",
    "netlink netfilter": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 12)",
    "bluetooth": "socket.socket(31, socket.SOCK_RAW, 0)",
    "can": "socket.socket(29, socket.SOCK_RAW, 1)",
    "xdp": "socket.socket(44, socket.SOCK_RAW, 0)",
    "key": "socket.socket(15, socket.SOCK_RAW, 2)",
}

KERNEL_FILES = ("/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe", "/proc/sys/kernel/hostname",
                "/proc/sys/vm/overcommit_memory", "/proc/sys/vm/drop_caches", "/proc/sys/fs/file-max",
                "/proc/sys/kernel/panic", "/proc/sys/kernel/randomize_va_space",
                "/proc/sys/fs/binfmt_misc/register", "/proc/sys/user/max_user_namespaces", "/proc/sysrq-trigger",
                "/proc/1/oom_score_adj", "/proc/timer_list", "/proc/irq/0/smp_affinity",
                "/sys/kernel/uevent_helper", "/sys/power/state", "/sys/fs/cgroup/release_agent",
                "/sys/fs/cgroup/cgroup.procs", "/sys/fs/cgroup/unified/cgroup.procs", "/sys/kernel/mm/ksm/run",
                "/sys/module/kernel/parameters/panic")  # fmt: skip

SECRET_FILES = ("/proc/kcore", "/proc/kmsg", "/dev/mem", "/dev/kmem", "/dev/port", "/dev/kmsg", "/dev/kvm", "/dev/vda",
                "/dev/sda", "/dev/loop0", "/dev/loop-control", "/dev/fuse", "/dev/net/tun", "/dev/vhost-net",
                "/dev/vsock", "/dev/dri/card0", "/dev/hwrng", "/dev/btrfs-control", "/dev/autofs", "/dev/ttyS0",
                "/dev/tty0", "/dev/vcs", "/dev/input/event0", "/dev/userfaultfd", "/dev/mapper/control", "/dev/cpu/0/msr",
                "/sys/kernel/debug/tracing/trace", "/sys/kernel/security/lsm", "/sys/firmware/efi/efivars")  # fmt: skip


def refused(box: Box, expression: str, also: frozenset[str] = frozenset(), user: str | None = None) -> None:
    answer = inside(box, f"report({expression})", **({"user": user} if user else {}))
    assert answer in REFUSED | also, answer


@pytest.mark.unprivileged
@pytest.mark.parametrize("user", ["root", "nobody"])
@pytest.mark.parametrize("name", MOUNTING)
def test_mounting_is_refused(box: Box, name: str, user: str) -> None:
    refused(box, MOUNTING[name], user=user)


@pytest.mark.unprivileged
@pytest.mark.parametrize("user", ["root", "nobody"])
@pytest.mark.parametrize("name", NAMESPACES)
def test_new_and_other_namespaces_are_refused(box: Box, name: str, user: str) -> None:
    refused(box, NAMESPACES[name], user=user)


@pytest.mark.parametrize("name", SYSTEM_CALLS)
def test_dangerous_system_calls_are_refused(box: Box, name: str) -> None:
    refused(box, SYSTEM_CALLS[name])


@pytest.mark.parametrize("name", SOCKETS)
def test_sockets_below_or_beside_ip_are_refused(box: Box, name: str) -> None:
    expression = f'attempt(lambda: ({SOCKETS[name]}, "OK")[1])'
    refused(box, expression, frozenset({"EAFNOSUPPORT", "EPROTONOSUPPORT", "ESOCKTNOSUPPORT", "EINVAL"}))


def test_ordinary_sockets_work(box: Box) -> None:
    program = "report([attempt(lambda: (socket.socket(f, t), 'OK')[1]) for f in (1, 2, 10) for t in (1, 2)])"
    assert inside(box, program) == ["OK"] * 6


@pytest.mark.parametrize("path", KERNEL_FILES)
def test_kernel_settings_are_not_writable(box: Box, path: str) -> None:
    refused(box, f"written({path!r})", frozenset({"ENOENT", "EINVAL"}))


@pytest.mark.parametrize("path", SECRET_FILES)
def test_memory_and_devices_of_the_machine_are_not_readable(box: Box, path: str) -> None:
    refused(box, f"opened({path!r}, os.O_RDONLY)", frozenset({"ENOENT", "ENXIO", "ENODEV"}))


@pytest.mark.parametrize("path", SECRET_FILES)
def test_memory_and_devices_of_the_machine_are_not_writable(box: Box, path: str) -> None:
    refused(box, f"opened({path!r}, os.O_WRONLY)", frozenset({"ENOENT", "ENXIO", "ENODEV", "EISDIR"}))


@pytest.mark.parametrize(("kind", "major", "minor"), [("S_IFCHR", 1, 1), ("S_IFBLK", 253, 0), ("S_IFBLK", 8, 0),
                                                      ("S_IFCHR", 10, 232), ("S_IFBLK", 7, 0)])  # fmt: skip
def test_devices_cannot_be_made(box: Box, kind: str, major: int, minor: int) -> None:
    path = f"/tmp/dev-{kind}-{major}-{minor}"
    expression = (
        f"attempt(lambda: (os.mknod({path!r}, 0o666 | stat.{kind}, os.makedev({major}, {minor})), 'OK')[1])"
    )
    answer = inside(box, f"r = {expression}\nreport(r if r != 'OK' else opened({path!r}, os.O_RDONLY))")
    assert answer in REFUSED


def test_only_harmless_devices_exist(box: Box) -> None:
    names = set(box.ls("/dev"))
    assert names <= {"null", "zero", "full", "random", "urandom", "tty", "fd", "stdin", "stdout", "stderr", "ptmx",
                     "pts", "shm", "mqueue", "console"}, names  # fmt: skip


def test_the_device_directory_cannot_be_changed(box: Box) -> None:
    assert inside(box, "report(attempt(lambda: (open('/dev/planted', 'w'), 'OK')[1]))") in REFUSED


def test_a_chroot_breakout_reaches_nothing(box: Box, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret of the machine")
    program = f"""
os.makedirs("/tmp/jail", exist_ok=True)
try:
    keep = os.open("/", os.O_RDONLY)
    os.chroot("/tmp/jail")
    os.fchdir(keep)
    for _ in range(200): os.chdir("..")
    os.chroot(".")
except OSError: pass
report([os.path.exists({str(tmp_path / "secret")!r}), os.path.exists("/usr"), os.path.realpath("/proc/self/cwd")])
"""
    assert inside(box, program)[:2] == [False, True]


def test_setuid_programs_gain_nothing(box: Box) -> None:
    """no_new_privs: a set-user-id copy of a program runs with the caller's own id."""
    box.out("cp /usr/bin/id /tmp/suid-id && chmod 4755 /tmp/suid-id")
    assert "euid=0" not in box.out("/tmp/suid-id", user="nobody")
    assert box.out("grep NoNewPrivs /proc/self/status").split() == ["NoNewPrivs:", "1"]


def test_file_capabilities_gain_nothing(box: Box) -> None:
    program = """
import shutil
shutil.copy("/usr/bin/python3", "/tmp/capable")
everything = struct.pack("<5I", 0x02000001, 0xffffffff, 0, 0x1ff, 0)
report(attempt(lambda: (os.setxattr("/tmp/capable", "security.capability", everything), "OK")[1]))
"""
    inside(box, program)
    status = box.out(["/tmp/capable", "-I", "-c", "print(open('/proc/self/status').read())"], user="nobody")
    assert "CapEff:\t0000000000000000" in status


def test_dangerous_capabilities_are_gone_for_good(box: Box) -> None:
    dangerous = {"sys_admin": 21, "sys_module": 16, "sys_rawio": 17, "sys_ptrace": 19, "sys_boot": 22, "sys_time": 25,
                 "net_admin": 12, "net_raw": 13, "mknod": 27, "audit_control": 30, "mac_admin": 33, "syslog": 34,
                 "bpf": 39, "perfmon": 38, "checkpoint_restore": 40, "dac_read_search": 2, "linux_immutable": 9,
                 "sys_pacct": 20, "sys_resource": 24, "wake_alarm": 35, "block_suspend": 36, "ipc_owner": 15}  # fmt: skip
    status = dict(
        line.split(":\t") for line in box.out("cat /proc/self/status").splitlines() if line.startswith("Cap")
    )
    for kind in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        held = int(status[kind], 16)
        assert [name for name, bit in dangerous.items() if held >> bit & 1] == [], kind


def test_a_filter_of_system_calls_is_in_force(box: Box) -> None:
    assert box.out("grep Seccomp: /proc/self/status").split() == ["Seccomp:", "2"]


def test_the_32_bit_interface_is_no_way_around(box: Box) -> None:
    """int 0x80 with number 21 is mount on 32-bit x86; x32 numbers carry bit 30."""
    program = """
import mmap
if os.uname().machine != "x86_64": report(["ENOSYS", "ENOSYS"])
code = mmap.mmap(-1, 4096, prot=7)
# mov eax, 20 (getpid); int 0x80; ret
code.write(bytes.fromhex("b814000000cd80c3"))
pid = os.fork()
if pid == 0:
    function = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))
    os._exit(1 if function() == os.getpid() else 0)
status = os.waitpid(pid, 0)[1]
ctypes.set_errno(0)
x32 = _libc.syscall(ctypes.c_long(0x40000000 + 39))
report(["OK" if status == 256 else "ENOSYS", "OK" if x32 > 0 else errno.errorcode[ctypes.get_errno()]])
"""
    assert inside(box, program) == ["ENOSYS", "ENOSYS"]


def test_the_machines_core_pattern_is_not_used_as_a_way_out(box: Box) -> None:
    before = Path("/proc/sys/kernel/core_pattern").read_text()
    box.run("echo '|/tmp/owned' > /proc/sys/kernel/core_pattern; kill -SEGV $$")
    assert Path("/proc/sys/kernel/core_pattern").read_text() == before


def test_terminal_input_cannot_be_injected(box: Box) -> None:
    program = """
import fcntl, pty
master, slave = os.openpty()
report(attempt(lambda: (fcntl.ioctl(slave, 0x5412, b"x"), "OK")[1]))
"""
    assert inside(box, program) in REFUSED
