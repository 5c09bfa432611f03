"""Attempts on the agent, on other sandboxes and on processes of the machine."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance.conftest import NewBox
from tests.conformance.runtimes import Images, RuntimeCase
from tests.support.inside import REFUSED, inside
from tests.support.machine import namespace_init, pids_with_argument, status_field
from tests.support.rest import Box, Rest
from tests.support.service import Service
from tests.support.waiting import eventually

pytestmark = pytest.mark.unprivileged

NAMESPACES = ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup")


@pytest.fixture(scope="module")
def tagged(runtime: RuntimeCase, box: Box) -> int:
    """The outside pid of a process of the shared sandbox."""
    assert runtime.on_this_machine
    tag = f"{time.monotonic_ns() % 10**9 + 10**6}.75"
    box.out(f"sleep {tag} & exit 0")
    (pid,) = eventually(lambda: pids_with_argument(tag), "the tagged process")
    return pid


@pytest.fixture
def agent_unchanged(box: Box) -> Iterator[None]:
    """The agent is the same process before and after, and answers."""
    before = box.agent_start()
    yield
    assert box.agent_start() == before


# -- seen from outside


@pytest.mark.parametrize("name", NAMESPACES)
def test_a_sandbox_has_namespaces_of_its_own(tagged: int, name: str) -> None:
    assert Path(f"/proc/{tagged}/ns/{name}").readlink() != Path(f"/proc/self/ns/{name}").readlink()


def test_root_inside_is_nobody_outside(tagged: int) -> None:
    assert all(int(uid) >= 1000 for uid in (status_field(tagged, "Uid") or "0").split())
    assert all(int(gid) >= 1000 for gid in (status_field(tagged, "Gid") or "0").split())


def test_the_agent_is_not_root_outside_either(tagged: int) -> None:
    assert all(int(uid) >= 1000 for uid in (status_field(namespace_init(tagged), "Uid") or "0").split())


def test_the_agent_keeps_no_dangerous_capability(tagged: int) -> None:
    held = int(status_field(namespace_init(tagged), "CapEff") or "0", 16)
    for bit in (12, 13, 16, 17, 19, 21, 22, 25, 27, 39):
        assert not held >> bit & 1


@pytest.mark.unprivileged(False)
def test_sandboxes_do_not_share_ids(new_box: NewBox) -> None:
    """A way out of one must not be a way into another."""
    owners = set()
    for _ in range(2):
        box, tag = new_box(), f"{time.monotonic_ns() % 10**9 + 10**6}.125"
        box.out(f"sleep {tag} & exit 0")
        (pid,) = eventually(lambda tag=tag: pids_with_argument(tag), "the tagged process")  # type: ignore[misc]
        owners.add(status_field(pid, "Uid"))
    assert len(owners) == 2


def test_the_hard_limits_of_processes_are_no_higher_than_the_services(tagged: int) -> None:
    assert "Max core file size        0" in Path(f"/proc/{tagged}/limits").read_text()


# -- seen from inside


def test_no_process_of_the_machine_is_visible(box: Box) -> None:
    assert str(os.getpid()) not in box.out("ps -e -o pid=").split() or os.getpid() < 1000
    assert "pytest" not in box.out("ps -e -o args=")
    assert "orchard.cli" not in box.out("cat /proc/*/cmdline | tr '\\0' ' '")


def test_the_machines_paths_are_not_told_by_the_agent(box: Box, service: Service) -> None:
    seen = box.out(
        "cat /proc/1/cmdline /proc/self/mountinfo /proc/self/cgroup /proc/1/cgroup 2>/dev/null | tr '\\0' ' '"
    )
    for word in (str(service.state_dir), sys.prefix, "site-packages", "/src/orchard"):
        assert word not in seen


@pytest.mark.parametrize("user", ["root", "nobody"])
@pytest.mark.parametrize("name", ["environ", "mem", "maps", "smaps", "auxv", "stack", "syscall", "fd", "map_files",
                                  "root/etc/passwd", "cwd/etc/passwd", "exe", "io", "personality", "pagemap",
                                  "task/1/mem", "task/1/environ", "ns/mnt"])  # fmt: skip
def test_the_agents_secrets_in_proc_are_not_readable(box: Box, name: str, user: str) -> None:
    program = f"""
def look():
    path = "/proc/1/{name}"
    if os.path.isdir(path): return "OK" if os.listdir(path) is not None else ""
    with open(path, "rb") as f: return "OK" if f.read(64) is not None else ""
report(attempt(look))
"""
    assert inside(box, program, user=user) in REFUSED


@pytest.mark.parametrize("user", ["root", "nobody"])
@pytest.mark.parametrize(
    "attempt",
    [
        'call("ptrace", 0x4206, 1, None, None)',
        'call("process_vm_readv", 1, struct.pack("QQ", 4096, 8), 1, struct.pack("QQ", 0x400000, 8), 1, 0)',
        'call("process_vm_writev", 1, struct.pack("QQ", 4096, 8), 1, struct.pack("QQ", 0x400000, 8), 1, 0)',
        '(lambda fd: call("pidfd_getfd", fd, 0, 0))(raw("pidfd_open", 1, 0)[0])',
        'call("kcmp", 1, os.getpid(), 0, 0, 0)',
        'call("move_pages", 1, 1, struct.pack("Q", 4096), struct.pack("i", 0), bytes(4), 4)',
        'call("migrate_pages", 1, 8, struct.pack("Q", 1), struct.pack("Q", 1))',
        'call("prlimit64", 1, 7, struct.pack("QQ", 0, 0), None)',
        'call("sched_setaffinity", 1, 8, struct.pack("Q", 1))',
        'call("sched_setscheduler", 1, 5, struct.pack("i", 0))',
        'call("setpriority", 0, 1, 19)',
        'call("setpriority", 2, 0, 19)',
        'call("ioprio_set", 1, 1, 3 << 13)',
    ],
    ids=lambda text: re.sub(r"[^a-z0-9_]+", "-", text.split('"')[1] + text[-8:]),
)
def test_the_agent_cannot_be_traced_or_slowed(
    box: Box, agent_unchanged: None, attempt: str, user: str
) -> None:
    answer = inside(box, f"report({attempt})", user=user)
    assert answer in REFUSED | {"ESRCH"}, answer


@pytest.mark.parametrize("user", ["root", "nobody"])
def test_no_signal_harms_the_agent(box: Box, agent_unchanged: None, user: str) -> None:
    program = """
import signal
for number in range(1, 65):
    attempt(lambda: os.kill(1, number))
    raw("tgkill", 1, 1, number)
report("sent")
"""
    assert inside(box, program, user=user) == "sent"
    time.sleep(0.2)


def test_killing_every_process_spares_the_agent(fresh: Box) -> None:
    before = fresh.agent_start()
    for number in (9, 15, 19):
        fresh.run(["/bin/kill", f"-{number}", "--", "-1"], timeout_seconds=5)
    assert fresh.agent_start() == before


def test_no_descriptor_is_leaked_into_commands(box: Box) -> None:
    for options in ({}, {"stdin": "x"}, {"stdin_open": None, "login_shell": True}, {"concurrent": True}):
        fds = box.out("ls -l /proc/self/fd | grep -v ' -> /proc/' | tail -n +2", **options)
        numbers = {line.split()[8] for line in fds.splitlines()}
        assert numbers <= {"0", "1", "2"}, fds


def test_descriptors_of_commands_do_not_lead_to_each_other(fresh: Box) -> None:
    one = fresh.running("sleep 60", concurrent=True, user="nobody")
    assert inside(fresh, "report(sorted({os.readlink(f'/proc/self/fd/{n}')[:5] for n in '012'}))") == [
        "/dev/",
        "pipe:",
    ]
    fresh.rest.delete(f"/jobs/{one}").expect(200)


def test_the_agent_does_not_listen_where_commands_can_reach_it(box: Box) -> None:
    """Neither a TCP port nor an abstract or named socket of the agent's may be connected to from inside."""
    program = """
found = []
for name in ("tcp", "tcp6"):
    found += [l.split()[1] for l in open(f"/proc/net/{name}").read().splitlines()[1:] if l.split()[3] == "0A"]
for line in open("/proc/net/unix").read().splitlines()[1:]:
    words = line.split()
    if int(words[3], 16) & 0x10000 and len(words) > 7:
        path = words[7]
        s = socket.socket(socket.AF_UNIX)
        address = "\\0" + path[1:] if path.startswith("@") else path
        found += [path] if attempt(lambda: (s.connect(address), "OK")[1]) == "OK" else []
report(found)
"""
    assert inside(box, program) == []


def test_the_token_is_nowhere_that_commands_can_read(
    service: Service, runtime: RuntimeCase, new_box: NewBox
) -> None:
    """Every secret-looking text of the sandbox's own state outside is searched for inside."""
    assert runtime.on_this_machine
    box = new_box(env={"OWN": "value"})
    files = [
        p
        for p in service.state_dir.rglob("*")
        if box.id in str(p) and p.is_file() and p.stat().st_size < 10_000
    ]
    secrets = {m for p in files for m in re.findall(rb"[0-9a-f]{32,}", p.read_bytes())}
    assert secrets, "the state directory holds the token that this test looks for"
    program = """
import glob
needles = sys.stdin.buffer.read().split()
found = []
paths = glob.glob("/proc/[0-9]*/environ") + glob.glob("/proc/[0-9]*/cmdline") + glob.glob("/proc/[0-9]*/maps")
paths += glob.glob("/proc/*", recursive=False)
for top in ("/etc", "/tmp", "/run", "/var", "/root", "/dev/shm", "/home"):
    for folder, _, names in os.walk(top): paths += [os.path.join(folder, n) for n in names]
for path in paths:
    try:
        if not stat.S_ISREG(os.stat(path).st_mode) or path.endswith("/kmsg"): continue
        data = open(path, "rb").read(1 << 20)
    except OSError: continue
    found += [path] if any(n in data for n in needles) else []
report(found)
"""
    assert inside(box, program, stdin=b" ".join(secrets).decode()) == []


def test_the_machines_abstract_sockets_are_out_of_reach(box: Box) -> None:
    name = f"orchard-test-{time.monotonic_ns()}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0" + name)
        listener.listen()
        program = f"report(attempt(lambda: (socket.socket(socket.AF_UNIX).connect('\\0{name}'), 'OK')[1]))"
        assert inside(box, program) == "ECONNREFUSED"


def test_system_v_and_posix_ipc_of_the_machine_are_out_of_reach(box: Box) -> None:
    done = subprocess.run(["ipcmk", "-M", "4096"], capture_output=True, text=True, check=True)
    number = done.stdout.split()[-1]
    try:
        assert len(box.out("cat /proc/sysvipc/shm").splitlines()) == 1
    finally:
        subprocess.run(["ipcrm", "-m", number], check=True)
    shared = Path("/dev/shm/orchard-test-visible")
    shared.touch()
    try:
        assert "orchard-test-visible" not in box.ls("/dev/shm")
    finally:
        shared.unlink()


def test_another_sandbox_is_invisible(new_box: NewBox) -> None:
    one, other = new_box(), new_box()
    one.out("echo secret > /tmp/secret; sleep 77.25 & exit 0")
    assert "77.25" not in other.out("cat /proc/*/cmdline | tr '\\0' ' '")
    assert other.ls("/tmp") == {}


def test_user_code_cannot_write_the_control_groups(box: Box, agent_unchanged: None) -> None:
    program = """
found = []
for top in ("/sys/fs/cgroup", "/sys"):
    for folder, _, names in os.walk(top):
        found += [os.path.join(folder, n) for n in names if os.access(os.path.join(folder, n), os.W_OK)]
report(found[:10])
"""
    assert inside(box, program) == []


# -- what the image `host` shows


@pytest.fixture(scope="module")
def planted(service: Service) -> Iterator[Path]:
    """Something secret in root's home on the machine."""
    path = Path("/root/.orchard-test-secret")
    path.write_text("secret of the machine")
    yield path
    path.unlink()


def test_homes_of_the_machine_are_not_shown(box: Box, planted: Path) -> None:
    assert box.run(["/bin/cat", str(planted)])["exit_code"] != 0
    assert (
        box.out("find /root /home -mindepth 1 2>/dev/null | grep -v -E '^/root/\\.(bashrc|profile)$' || true")
        == ""
    )


def test_password_hashes_and_keys_of_the_machine_are_not_shown(box: Box) -> None:
    shadow = box.run("cat /etc/shadow /etc/gshadow 2>/dev/null")["stdout"]
    assert not re.search(r":\$[0-9a-z]+\$", shadow)
    assert box.out("ls /etc/ssh/ssh_host_*_key /etc/ssl/private/* 2>/dev/null || true") == ""


def test_the_services_data_is_not_shown(box: Box, service: Service) -> None:
    assert box.run(["/bin/ls", str(service.state_dir)])["exit_code"] != 0
    assert box.run(["/bin/ls", "/var/lib/orchard"])["exit_code"] != 0
    (service.state_dir.parent / "seen").touch()
    assert box.run(["/bin/ls", str(service.state_dir.parent / "seen")])["exit_code"] != 0


def test_the_machines_temporary_and_run_files_are_not_shown(box: Box) -> None:
    for folder in ("/run", "/var/run", "/mnt", "/media", "/srv", "/var/tmp", "/var/lib/docker", "/boot"):
        names = {path.name for path in Path(folder).iterdir()} if Path(folder).is_dir() else set()
        inside_names = set(box.run(["/bin/ls", "-A", folder])["stdout"].split())
        assert not (inside_names & names) - {"lock", "shm"}, folder


def test_logs_of_the_machine_are_not_shown(box: Box) -> None:
    assert box.run("find /var/log -type f -size +0 2>/dev/null")["stdout"] == ""


def test_the_system_directories_of_the_machine_are_not_changed(box: Box) -> None:
    before = Path("/usr/bin/env").stat()
    box.run(
        "rm -f /usr/bin/env; echo x > /usr/bin/planted; echo x > /etc/planted; chmod 777 /usr; rm -rf /usr/share/doc"
    )
    after = Path("/usr/bin/env").stat()
    assert (before.st_ino, before.st_mtime, before.st_ctime) == (after.st_ino, after.st_mtime, after.st_ctime)
    assert not Path("/usr/bin/planted").exists()
    assert not Path("/etc/planted").exists()
    assert Path("/usr/share/doc").is_dir()


def test_another_sandbox_of_the_same_image_does_not_see_the_changes(rest: Rest, images: Images) -> None:
    with rest.sandbox(images.full) as one, rest.sandbox(images.full) as other:
        one.out("echo changed > /etc/motd; rm /usr/bin/env; touch /planted")
        assert other.run("ls /usr/bin/env && ! ls /planted")["exit_code"] == 0
