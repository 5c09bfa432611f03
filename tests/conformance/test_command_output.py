"""Output is bytes first, complete up to a stated bound, and never a reason to hang."""

from __future__ import annotations

from tests.conformance.conftest import NewBox
from tests.conformance.runtimes import RuntimeCase
from tests.support.machine import namespace_init, pids_with_argument, resident_bytes
from tests.support.rest import Box
from tests.support.waiting import Stopwatch, eventually

MIB = 1 << 20


def test_both_streams_are_kept_apart(box: Box) -> None:
    job = box.run("echo out; echo err >&2")
    assert (job["stdout"], job["stderr"]) == ("out\n", "err\n")


def test_exec_returns_when_the_command_ends_although_a_child_holds_its_output(fresh: Box) -> None:
    watch = Stopwatch()
    job = fresh.run("sleep 30.5 & echo hi", timeout_seconds=60)
    assert watch.seconds < 10
    assert (job["stdout"], job["exit_code"], job["timed_out"]) == ("hi\n", 0, False)
    assert fresh.run("pgrep -xf 'sleep 30.5'")["exit_code"] == 0, "the child lives on"


def test_a_child_in_another_session_that_holds_the_output_does_not_delay_it(fresh: Box) -> None:
    watch = Stopwatch()
    job = fresh.run("(setsid sh -c 'sleep 31.5' &) ; echo hi; exit 7", timeout_seconds=60)
    assert watch.seconds < 10
    assert (job["stdout"], job["exit_code"]) == ("hi\n", 7)


def test_a_child_that_keeps_writing_does_not_delay_the_result(fresh: Box) -> None:
    watch = Stopwatch()
    job = fresh.run("yes flood & echo $! > /tmp/flood; exit 0", timeout_seconds=60)
    assert watch.seconds < 20
    assert job["exit_code"] == 0
    fresh.out("kill -9 $(cat /tmp/flood)")


def test_output_written_just_before_the_end_is_not_lost(box: Box) -> None:
    for _ in range(20):
        assert box.out("head -c 70000 /dev/zero | tr '\\0' a; sleep 5 & exit 0") == "a" * 70_000
    box.run("pkill -x sleep")


def test_undecodable_bytes_are_replaced(box: Box) -> None:
    job = box.run(["/usr/bin/printf", r"a\xff\xfeb"])
    assert job["stdout"] == "a��b"
    assert job["stdout_bytes"] == 4


def test_nul_bytes_are_kept(box: Box) -> None:
    assert box.out(["/usr/bin/printf", r"a\0b\0"]) == "a\0b\0"


def test_characters_of_several_bytes_are_kept(box: Box) -> None:
    assert box.out(["/bin/echo", "ünïcode ☃ 你好 🌳"]) == "ünïcode ☃ 你好 🌳\n"


def test_carriage_returns_and_escapes_are_kept(box: Box) -> None:
    assert box.out(["/usr/bin/printf", r"a\r\nb\033[1m"]) == "a\r\nb\x1b[1m"


def test_a_mebibyte_is_returned_whole(box: Box) -> None:
    job = box.run(f"head -c {MIB} /dev/zero | tr '\\0' a")
    assert (job["stdout"], job["stdout_truncated"], job["stdout_bytes"]) == ("a" * MIB, False, MIB)


def test_more_than_the_default_keeps_head_and_tail_and_counts_all(box: Box) -> None:
    job = box.run("echo head; head -c 3000000 /dev/zero | tr '\\0' a; echo; echo tail")
    assert job["stdout_truncated"]
    assert job["stdout_bytes"] == 5 + 3_000_000 + 6
    assert job["stdout"].startswith("head\naaa")
    assert job["stdout"].endswith("aaa\ntail\n")
    assert len(job["stdout"]) < MIB + 10_000


def test_three_megabytes_are_exact_when_asked_for(box: Box) -> None:
    job = box.run("head -c 3000000 /dev/zero | tr '\\0' a", max_output_bytes=4 * MIB)
    assert (job["stdout"], job["stdout_truncated"]) == ("a" * 3_000_000, False)


def test_the_bound_holds_for_each_stream(box: Box) -> None:
    job = box.run("seq 1000; seq 2000 >&2", max_output_bytes=4_000)
    assert (job["stdout_truncated"], job["stderr_truncated"]) == (False, True)
    assert job["stdout_bytes"] == 3893
    assert job["stderr_bytes"] == 8893


def test_no_output_may_be_asked_for(box: Box) -> None:
    job = box.run("echo hello", max_output_bytes=0)
    assert job["stdout_truncated"]
    assert job["stdout_bytes"] == 6
    assert "hello" not in job["stdout"]


def test_a_truncated_character_is_no_error(box: Box) -> None:
    job = box.run("for i in $(seq 1000); do printf '☃'; done", max_output_bytes=100)
    assert job["stdout_truncated"]
    assert job["stdout_bytes"] == 3000
    assert "☃☃" in job["stdout"]


def test_two_gigabytes_of_output_leave_agent_and_service_small(runtime: RuntimeCase, new_box: NewBox) -> None:
    fresh = new_box()
    tag = "86399.125"
    fresh.out(f"sleep {tag} & exit 0")
    job_id = fresh.start("yes | head -c 2147483648", timeout_seconds=240)
    agent = namespace_init(pids_with_argument(tag)[0]) if runtime.on_this_machine else None
    largest = 0

    def finished() -> bool:
        nonlocal largest
        largest = max(largest, resident_bytes(agent)) if agent else 0
        assert fresh.rest.get("/health").status == 200
        return fresh.rest.job(job_id)["status"] == "succeeded"

    eventually(finished, "2 GiB are written", 300, every_s=0.2)
    job = fresh.rest.job(job_id)
    assert (job["stdout_bytes"], job["stdout_truncated"]) == (2 << 30, True)
    assert job["stdout"].startswith("y\ny\n")
    assert largest < 200 * MIB


def test_endless_output_without_a_newline_ends_at_the_timeout(box: Box) -> None:
    job = box.run("tr '\\0' a < /dev/zero", timeout_seconds=1)
    assert job["timed_out"]
    assert job["stdout_truncated"]
    assert box.alive()


def test_output_to_a_closed_stream_is_the_commands_own_matter(box: Box) -> None:
    job = box.run("exec >&-; echo lost; echo $? >&2")
    assert job["stdout"] == ""
    assert job["stderr"].endswith("1\n")
