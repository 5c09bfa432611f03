"""A timeout ends everything that its command started, in time, and nothing else."""

from __future__ import annotations

import pytest

from tests.conformance.conftest import NewBox
from tests.support.rest import Box
from tests.support.waiting import Stopwatch, eventually

pytestmark = pytest.mark.unprivileged

#: `exec` returns at the latest at its timeout plus 2 s; tests leave five times that.
SLACK_S = 10.0

ESCAPING_CHILDREN = {
    "in the background": "sleep {n} & wait",
    "in a new session": "setsid sleep {n} & wait",
    "double forked": "( ( setsid sleep {n} & ) & ); sleep {n}",
    "orphaned before": "(setsid nohup sleep {n} >/dev/null 2>&1 &) ; sleep {n}",
    "ignoring TERM": "trap '' TERM HUP INT; sleep {n} & sleep {n}",
    "a pipeline": "sleep {n} | sleep {n} | sleep {n}",
    "stopped": "sleep {n} & kill -STOP $!; wait",
}


def count(box: Box, argument: str) -> int:
    """Processes inside with `argument` on their command line, the counting ones not counted."""
    code = (
        "import glob,sys\n"
        "n=0\n"
        "for p in glob.glob('/proc/[0-9]*/cmdline'):\n"
        "    try: words=open(p,'rb').read().split(b'\\0')\n"
        "    except OSError: continue\n"
        "    n+=words[0].endswith(b'sleep') and sys.argv[1].encode() in words\n"
        "print(n)"
    )
    return int(box.python(code, argument, concurrent=True)["stdout"])


def test_a_timeout_ends_the_command_in_time(box: Box) -> None:
    watch = Stopwatch()
    job = box.run("sleep 60; echo x", timeout_seconds=1)
    assert 1.0 <= watch.seconds < 1 + SLACK_S
    assert (job["timed_out"], job["status"], job["stdout"]) == (True, "failed", "")


def test_a_timeout_is_told_by_its_own_field_with_exit_code_124(box: Box) -> None:
    job = box.run("sleep 60", timeout_seconds=0.3)
    assert (job["timed_out"], job["exit_code"], job["error_code"]) == (True, 124, "timeout")
    assert "0.3" in job["error"]


def test_output_before_the_timeout_is_kept(box: Box) -> None:
    job = box.run("echo before; echo err >&2; sleep 60", timeout_seconds=0.5)
    assert (job["stdout"], job["stderr"]) == ("before\n", "err\n")


def test_the_sandbox_and_its_agent_survive_a_timeout(box: Box) -> None:
    before = box.agent_start()
    box.run("sleep 60", timeout_seconds=0.3)
    assert box.agent_start() == before


@pytest.mark.parametrize(
    ("seconds", "command"),
    [(f"30{i}.25", text) for i, text in enumerate(ESCAPING_CHILDREN.values())],
    ids=[name.replace(" ", "-") for name in ESCAPING_CHILDREN],
)
def test_a_timeout_kills_children(box: Box, seconds: str, command: str) -> None:
    job = box.run(command.format(n=seconds), timeout_seconds=0.7)
    assert job["timed_out"]
    assert count(box, seconds) == 0


def test_a_timeout_spares_what_an_earlier_command_left_running(fresh: Box) -> None:
    fresh.out("sleep 311.5 & setsid sleep 312.5 & (setsid sleep 313.5 &)")
    assert fresh.run("sleep 314.5 & sleep 314.5", timeout_seconds=0.5)["timed_out"]
    assert [count(fresh, f"{n}.5") for n in (311, 312, 313, 314)] == [1, 1, 1, 0]


def test_a_timeout_spares_concurrent_commands(fresh: Box) -> None:
    other = fresh.running("sleep 1.5; echo done", concurrent=True)
    assert fresh.run("sleep 60", timeout_seconds=0.3, concurrent=True)["timed_out"]
    assert fresh.rest.wait_job(other)["stdout"] == "done\n"


def test_a_fork_storm_does_not_outrun_the_timeout(new_box: NewBox) -> None:
    fresh = new_box(pids=300)
    code = "import os\nwhile True:\n try: os.fork()\n except OSError: pass"
    watch = Stopwatch()
    assert fresh.python(code, timeout_seconds=1)["timed_out"]
    assert watch.seconds < 1 + SLACK_S
    assert fresh.out("ps -e --no-headers | grep -c python3 || true").strip() == "0"


def test_without_a_grace_the_command_is_killed_at_once(box: Box) -> None:
    job = box.run("trap 'echo terminated; exit 0' TERM; while :; do sleep 0.05; done", timeout_seconds=0.5)
    assert (job["timed_out"], job["signal"], job["stdout"]) == (True, "KILL", "")


def test_with_a_grace_the_command_may_clean_up_after_sigterm(box: Box) -> None:
    command = "trap 'echo cleaned; exit 5' TERM; while :; do sleep 0.05; done"
    job = box.run(command, timeout_seconds=0.5, grace_seconds=20)
    assert (job["timed_out"], job["stdout"]) == (True, "cleaned\n")


def test_a_command_that_ignores_sigterm_is_killed_after_the_grace(box: Box) -> None:
    watch = Stopwatch()
    job = box.run("trap '' TERM; while :; do sleep 0.05; done", timeout_seconds=0.5, grace_seconds=0.5)
    assert watch.seconds < 1 + SLACK_S
    assert (job["timed_out"], job["signal"]) == (True, "KILL")


def test_children_that_outlive_the_grace_are_killed_too(box: Box) -> None:
    command = (
        "(trap '' TERM; sleep 321.5 & wait; sleep 321.5) & trap 'exit 0' TERM; while :; do sleep 0.05; done"
    )
    assert box.run(command, timeout_seconds=0.5, grace_seconds=0.5)["timed_out"]
    assert eventually(lambda: count(box, "321.5") == 0, "no child is left")


def test_time_in_the_queue_does_not_count_against_the_timeout(fresh: Box) -> None:
    fresh.start("sleep 1.5")
    job = fresh.run("echo ran", timeout_seconds=1)
    assert (job["timed_out"], job["stdout"]) == (False, "ran\n")
    assert job["queue_seconds"] >= 0.5


@pytest.mark.parametrize("timeout", [0, -1, "x", True])
def test_a_senseless_timeout_is_refused(box: Box, timeout: object) -> None:
    assert box.post_exec("true", timeout_seconds=timeout).status == 422


def test_fractions_of_a_second_are_fine(box: Box) -> None:
    job = box.run("sleep 60", timeout_seconds=0.25)
    assert 0.25 <= job["duration_seconds"] < 0.25 + SLACK_S
