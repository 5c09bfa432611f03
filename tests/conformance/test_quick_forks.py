"""Programs whose first act is to fork, double fork and leave their session: still part of their command."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conformance.conftest import NewBox
from tests.conformance.runtimes import RuntimeCase
from tests.support.rest import Box
from tests.support.waiting import Stopwatch, eventually

pytestmark = pytest.mark.unprivileged

#: argv: children, grandchildren of each, MiB that each takes, seconds that each lives; then "stay", or "hop" for a process
#: that forks and exits, again and again
SOURCE = r"""
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>
static void live(int mib, int seconds) {
    setsid();
    if (mib) { char *p = malloc((size_t)mib << 20); if (p) memset(p, 1, (size_t)mib << 20); }
    for (int i = 0; i < seconds; i++) sleep(1);
    _exit(0);
}
int main(int argc, char **argv) {
    int children = atoi(argv[1]), grandchildren = atoi(argv[2]), mib = atoi(argv[3]), seconds = atoi(argv[4]);
    for (int i = 0; i < children; i++)
        if (fork() == 0) {
            for (int j = 0; j < grandchildren; j++) if (fork() == 0) live(mib, seconds);
            _exit(0);
        }
    if (argc > 5 && !strcmp(argv[5], "hop")) for (;;) if (fork() > 0) _exit(0);
    if (argc > 5) for (;;) pause();
    return 0;
}
"""


@pytest.fixture(scope="module")
def forker(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A static program: it runs within microseconds of its start, before anything is loaded."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise AssertionError(
            "a C compiler is needed to build the forking program: apt-get install gcc libc6-dev"
        )
    folder: Path = tmp_path_factory.mktemp("forker")
    (folder / "f.c").write_text(SOURCE)
    subprocess.run(
        [compiler, "-O1", "-static", "-o", str(folder / "forker"), str(folder / "f.c")], check=True
    )
    return (folder / "forker").read_bytes()


@pytest.fixture
def box(runtime: RuntimeCase, new_box: NewBox, forker: bytes) -> Box:
    made = new_box(pids=400) if runtime.ordinary else new_box(memory="96Mi", pids=400)
    made.write("/forker", forker, mode="0755")
    return made


@pytest.fixture
def busy(box: Box) -> None:
    """Every processor is taken, so that the agent is often interrupted between two steps."""
    box.start("for i in 1 2 3 4; do (while :; do :; done) & done; sleep 60", background=True)


def count(box: Box) -> int:
    return int(box.out("pgrep -c -x forker || true", concurrent=True))


@pytest.mark.usefixtures("busy")
def test_their_timeout_ends_all_of_them(box: Box) -> None:
    for _ in range(15):
        job = box.run(["/forker", "5", "5", "0", "60", "stay"], timeout_seconds=0.3, concurrent=True)
        assert job["timed_out"]
        assert eventually(lambda: count(box) == 0, "none is left", 20)


@pytest.mark.usefixtures("busy")
def test_cancel_ends_all_of_them(box: Box) -> None:
    for _ in range(10):
        job_id = box.running(["/forker", "5", "5", "0", "60", "stay"], concurrent=True)
        box.rest.delete(f"/jobs/{job_id}").expect(200)
        box.rest.wait_job(job_id)
        assert eventually(lambda: count(box) == 0, "none is left", 20)


@pytest.mark.usefixtures("busy")
def test_a_timeout_spares_those_of_other_commands(box: Box) -> None:
    for _ in range(5):
        box.run(["/forker", "2", "2", "0", "60"], concurrent=True)
    assert box.run(["/forker", "5", "5", "0", "60", "stay"], timeout_seconds=0.3, concurrent=True)[
        "timed_out"
    ]
    assert count(box) == 20


def test_a_process_that_is_never_the_same_for_long_is_ended_too(new_box: NewBox, forker: bytes) -> None:
    """There is no moment in which it could be looked up; another command forks all the while, and is spared."""
    box = new_box(pids=2000)
    box.write("/forker", forker, mode="0755")
    other = box.running("while :; do /bin/true; done", background=True)
    for _ in range(3):
        command = "for i in 1 2 3; do setsid /forker 0 0 0 0 hop & done; sleep 60"
        assert box.run(command, timeout_seconds=0.3, concurrent=True)["timed_out"]
    assert box.rest.job(other)["status"] == "running"
    box.rest.delete(f"/jobs/{other}").expect(200)
    # Nothing forks any more: the last pid that was given away stays the same but for this command's own.
    first, second = box.out("cut -d' ' -f5 /proc/loadavg; sleep 0.5; cut -d' ' -f5 /proc/loadavg").split()
    assert int(second) - int(first) < 10


@pytest.mark.unprivileged(False)
def test_their_memory_counts(box: Box) -> None:
    """Twenty processes of 30 MiB: the limit of 96 MiB is never passed, whoever has to die for it."""
    for _ in range(5):
        box.run(["/forker", "4", "5", "30", "2"], concurrent=True)
        stats = box.rest.get(f"{box.path}/stats").expect(200)
        assert stats["memory_bytes"] <= 96 << 20
    resident = box.out("ps -C forker -o rss= || true", concurrent=True).split()
    assert sum(map(int, resident)) < 120 << 10


def test_their_number_is_limited(box: Box) -> None:
    """From their first instruction: the command itself, and nothing that it forked before, may come on top."""
    for _ in range(5):
        box.run(["/forker", "40", "40", "0", "2"], concurrent=True, timeout_seconds=10)
        assert box.rest.get(f"{box.path}/stats").expect(200)["pids"] <= 401


def test_a_sandbox_full_of_processes_can_be_cleared_from_inside(box: Box) -> None:
    box.run(["/forker", "1", "600", "0", "60"], concurrent=True, timeout_seconds=10)
    assert eventually(
        lambda: box.rest.get(f"{box.path}/stats").expect(200)["pids"] >= 399, "the sandbox is full"
    )
    assert box.run(["pkill", "-x", "forker"], concurrent=True)["exit_code"] == 0
    assert eventually(lambda: count(box) == 0, "none is left", 20)


def test_a_bomb_from_the_first_instruction_is_ended(box: Box) -> None:
    watch = Stopwatch()
    box.run(["/forker", "400", "10", "0", "60", "stay"], timeout_seconds=1, concurrent=True)
    assert watch.seconds < 11
    assert eventually(
        lambda: box.run(["/bin/true"], concurrent=True)["exit_code"] == 0, "commands run again", 10
    )
    assert count(box) == 0
