"""The service of an ordinary user: what is weaker is said and refused, what holds holds without any privilege.

The suite's marked tests run against such a service with a range of ids (see conftest.py). Here are those that only
concern one: with nothing but its own id, with files of other users, with a control group of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from tests.conformance.conftest import end_and_check
from tests.conformance.runtimes import RUNTIMES
from tests.conformance.test_pty import Pty
from tests.support.machine import pids_with_argument, status_field
from tests.support.ordinary import FIRST_SUBID, ordinary_folder, prefix
from tests.support.rest import Box, new_id
from tests.support.service import Service
from tests.support.waiting import eventually

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, which only root can")

Serve = Callable[..., Service]


@pytest.fixture(scope="module")
def group() -> Iterator[Path]:
    """A version 2 control group that belongs to the user."""
    lines = Path("/proc/self/mounts").read_text().splitlines()
    root = next(Path(line.split()[1]) for line in lines if line.split()[2] == "cgroup2")
    folder = root / f"orchard-test-{new_id()}"
    folder.mkdir()
    for path in (folder, folder / "cgroup.procs", folder / "cgroup.subtree_control"):
        os.chown(path, 65534, 65534)
    yield folder
    for path, _, _ in os.walk(folder, topdown=False):
        with suppress(FileNotFoundError):
            Path(path).rmdir()


@pytest.fixture(scope="module")
def serve(group: Path) -> Iterator[Serve]:
    """Starts services as an ordinary user (some in `group`); `options` as of `prefix`. Nothing of them may be left."""
    servers: list[Service] = []
    with ordinary_folder() as folder:

        def start(**options: object) -> Service:
            wrapper = prefix(folder, **options)  # type: ignore[arg-type]
            server = Service(folder / f"state{len(servers)}", prefix=wrapper)
            servers.append(server)
            return server.start()

        yield start
        for server in servers:
            if not server.running:
                server.start()
            end_and_check(server, RUNTIMES["ordinary"])


@pytest.fixture(scope="module")
def single(serve: Serve) -> Service:
    """Of a user with its own id and nothing else."""
    return serve()


@pytest.fixture
def box(single: Service) -> Iterator[Box]:
    with single.rest.sandbox("host") as made:
        yield made


def run(command: list[str], folder: Path, **options: object) -> subprocess.CompletedProcess[str]:
    """`orchard …` as that user."""
    wrapper = prefix(folder, **options)  # type: ignore[arg-type]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("ORCHARD_", "SANDBOX_"))}
    return subprocess.run(
        [*wrapper, sys.executable, "-m", "orchard", *command],
        capture_output=True, text=True, env=environment, timeout=120, check=False,
    )  # fmt: skip


# -- what is weaker is said


def test_the_log_says_at_start_what_is_weaker(single: Service) -> None:
    for text in (
        "weaker: no users but root inside",
        "memory or cpu is refused",
        "block_network=false is refused",
    ):
        assert text in single.log()


@pytest.mark.parametrize(
    ("fields", "what"),
    [({"memory": "1Gi"}, "memory"), ({"cpu": "1"}, "cpu"), ({"block_network": False}, "network")],
)
def test_what_cannot_be_kept_is_refused_with_what_to_do(
    single: Service, fields: dict[str, object], what: str
) -> None:
    made = single.rest.submit("host", **fields)
    info = single.rest.get(f"{made.path}/wait").expect(200)
    assert info["status"] == "failed"
    assert what in info["status_message"]
    assert "root" in info["status_message"]


def test_doctor_tells_what_is_weaker_and_how_to_get_it() -> None:
    with ordinary_folder() as folder:
        done = run(["doctor", "--json"], folder)
        assert not (folder / ".local").exists()
    report = json.loads(done.stdout)
    checks = {check["name"]: check for check in report["checks"]}
    assert (done.returncode, report["local_runtime_works"]) == (0, True)
    for name in ("namespaces", "user namespaces", "overlayfs", "seccomp", "proc", "blocked network"):
        assert checks[name]["status"] == "ok", checks[name]
    assert "Delegate=yes" in checks["memory limit"]["hint"]
    assert "/etc/subuid" in checks["more ids"]["hint"]
    for name in (
        "root",
        "more ids",
        "control group",
        "memory limit",
        "cpu limit",
        "pids limit",
        "open network",
    ):
        assert checks[name]["status"] == "weak", checks[name]


def test_a_machine_that_hides_parts_of_proc_is_refused_at_start() -> None:
    """As container engines do; the kernel then mounts no other /proc for an ordinary user."""
    with ordinary_folder() as folder:
        hidden = {"before": "mount -t tmpfs none /proc/bus"}
        served = run(["serve", "--port", "0", "--state-dir", str(folder / "state")], folder, **hidden)
        doctor = run(["doctor", "--json"], folder, **hidden)
    assert served.returncode == 1
    assert "no new /proc can be mounted" in served.stderr
    assert "Traceback" not in served.stderr
    (check,) = (each for each in json.loads(doctor.stdout)["checks"] if each["name"] == "proc")
    assert (doctor.returncode, check["status"]) == (1, "missing")


# -- with one id


def test_there_is_root_and_nobody_else(box: Box) -> None:
    assert box.out("id -u; id -g; echo $HOME") == "0\n0\n/root\n"
    answer = box.post_exec("true", user="1000", wait=True)
    assert (answer.status, answer.code) == (400, "user_not_found")
    assert "/etc/subuid" in answer.json["detail"]


def test_the_machines_programs_are_read_only_and_the_rest_is_writable(box: Box) -> None:
    assert box.run("touch /usr/bin/x")["exit_code"] != 0
    box.out("for d in /tmp /root /etc /var/tmp /home /srv /opt /dev/shm; do echo x > $d/x || exit 1; done")
    assert box.run("cd /etc && mv hosts moved && rm moved")["exit_code"] == 0


def test_a_terminal_works_without_a_group_for_it(single: Service, box: Box) -> None:
    with closing(Pty(single.rest, box.id)) as pty:
        pty.start("sh", "-c", "tty; exit 3")
        assert pty.exit() == 3
        assert b"/dev/pts/" in pty.shown


def test_nothing_hides_a_process_from_its_timeout(box: Box) -> None:
    tag = f"{os.getpid()}.{new_id()[2:6].translate(str.maketrans('abcdef', '012345'))}"
    hidden = f"env -i setsid bash -c '(env -i setsid sleep {tag} &) & exec -a x sleep {tag}'"
    job = box.run(f"({hidden}) & env -i bash -c 'exec -a y sleep {tag}'", timeout_seconds=1)
    assert job["timed_out"]
    assert pids_with_argument(tag) == []


def test_the_mark_of_a_command_cannot_be_changed(box: Box) -> None:
    code = """
import ctypes, resource, os
libc = ctypes.CDLL(None, use_errno=True)
mark = resource.getrlimit(10)
def refused(*call):
    ctypes.set_errno(0)
    return libc.syscall(*call) == -1 and ctypes.get_errno() == 1
limit = (ctypes.c_ulong * 2)(5, 5)
prlimit, setrlimit = {"x86_64": (302, 160), "aarch64": (261, 164)}[os.uname().machine]
print(refused(prlimit, 0, 10, limit, None, 0, 0), refused(prlimit, os.getppid(), 10, limit, None, 1, 1))
print(refused(setrlimit, 10, limit), resource.getrlimit(10) == mark, mark[0] == mark[1] < 1 << 40)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
"""
    assert box.python(code)["stdout"] == "True True\nTrue True True\n"


def test_killing_everything_from_inside_ends_neither_the_agent_nor_the_sandbox(box: Box) -> None:
    before = box.agent_start()
    box.run("kill -9 -1; kill -9 1; kill -STOP 1; kill -TERM 1")
    assert box.agent_start() == before


def test_two_sandboxes_count_their_processes_apart(single: Service) -> None:
    with single.rest.sandbox("host", pids=30) as full, single.rest.sandbox("host", pids=30) as other:
        full.start("for i in $(seq 60); do sleep 60 & done; wait", background=True)
        eventually(lambda: full.rest.get(f"{full.path}/stats").expect(200)["pids"] >= 30, "it is full")
        assert other.out("for i in $(seq 20); do sleep 1 & done; wait; echo fine") == "fine\n"


def test_a_killed_service_comes_back_to_its_sandboxes(serve: Serve) -> None:
    service = serve()
    kept, dead = service.rest.create("host"), service.rest.create("host")
    before = kept.agent_start()
    job_id = kept.running("sleep 2; echo done")
    tag = f"{os.getpid()}.625"
    dead.out(f"sleep {tag} & exit 0")
    (pid,) = eventually(lambda: pids_with_argument(tag), "a process to know it by")
    service.kill()
    os.kill(_parent(pid), 9)
    service.start()
    kept = Box(service.rest, kept.id)
    assert service.rest.wait_job(job_id)["stdout"] == "done\n"
    assert kept.agent_start() == before
    assert service.rest.get(f"/sandboxes/{dead.id}/stats").code == "sandbox_dead"


def _parent(pid: int) -> int:
    return int(status_field(pid, "PPid") or 0)


# -- with a range of ids


def test_files_of_a_sandboxs_other_users_go_with_it(serve: Serve) -> None:
    service = serve(subids=True)
    box = service.rest.create("host")
    box.out("mkdir -p /tmp/d/e && touch /tmp/d/e/f && chown -R 1000:1000 /tmp/d && chmod 0 /tmp/d/e /tmp/d")
    tag = f"{os.getpid()}.875"
    box.run(f"sleep {tag} & exit 0", user="1000")
    (pid,) = eventually(lambda: pids_with_argument(tag), "a process of that user")
    assert (status_field(pid, "Uid") or "").split()[0] == str(FIRST_SUBID + 999)
    box.delete()
    assert list((service.state_dir / "sandboxes").iterdir()) == []


# -- with a control group


def test_a_delegated_group_is_used_and_left_empty(serve: Serve, group: Path) -> None:
    service = serve(subids=True, before=f"echo $$ > {group}/cgroup.procs")
    assert "by a mark" not in service.log()
    with service.rest.sandbox("host") as box:
        assert list(group.rglob(box.id))
        box.start("sleep 300", background=True)
        assert box.run("setsid sleep 301 & sleep 302", timeout_seconds=1)["timed_out"]
        assert box.out("pgrep -xc sleep") == "1\n"
    assert not list(group.rglob(box.id))


def test_sandboxes_of_a_group_are_found_by_a_service_without_it(group: Path) -> None:
    with ordinary_folder() as folder:
        first = Service(folder / "state", prefix=prefix(folder, before=f"echo $$ > {group}/cgroup.procs"))
        box = first.start().rest.create("host")
        first.kill()
        second = Service(folder / "state", prefix=prefix(folder), api_key=first.api_key).start()
        box = Box(second.rest, box.id)
        tag = f"{os.getpid()}.375"
        box.out(f"setsid sleep {tag} & exit 0")
        eventually(lambda: pids_with_argument(tag), "a process to know it by")
        box.delete()
        assert pids_with_argument(tag) == []
        assert second.stop() == 0, second.log()


# -- the command line


def test_run_brings_its_own_service() -> None:
    with ordinary_folder() as folder:
        done = run(["run", "host", "--", "sh", "-c", "id -u; exit 7"], folder, subids=True)
        assert (done.stdout, done.returncode) == ("0\n", 7), done.stderr
        shutil.rmtree(folder / ".local")
        assert [path.name for path in folder.iterdir() if path.name not in ("stage", "subids")] == []


def test_what_a_build_cannot_read_is_not_left_out_in_silence() -> None:
    with ordinary_folder() as folder:
        recipe = folder / "recipe.yaml"
        recipe.write_text("base: host\nrun:\n  - mkdir /opt/open /opt/shut; chmod 0 /opt/shut\n")
        recipe.chmod(0o644)
        done = run(["images", "build", str(recipe), "--tag", "mine:1"], folder)
        assert done.returncode == 1
        assert "shut cannot be read" in done.stderr
        assert "Traceback" not in done.stderr
