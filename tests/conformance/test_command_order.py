"""Which commands wait for which."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from tests.conformance.conftest import NewBox
from tests.support.rest import Box
from tests.support.waiting import eventually


def test_commands_of_one_sandbox_run_in_arrival_order(fresh: Box) -> None:
    jobs = [fresh.start(f"sleep 0.0{9 - i}; echo {i} >> /tmp/order") for i in range(10)]
    assert fresh.rest.wait_job(jobs[-1])["status"] == "succeeded"
    assert fresh.out("cat /tmp/order").split() == [str(i) for i in range(10)]


def test_a_command_that_waits_is_queued(fresh: Box) -> None:
    first = fresh.running("sleep 30")
    second = fresh.start("echo second")
    assert fresh.rest.job(second)["status"] == "queued"
    assert fresh.rest.job(second)["started_at"] is None
    fresh.rest.delete(f"/jobs/{first}").expect(200)
    assert fresh.rest.wait_job(second)["stdout"] == "second\n"


def test_time_in_the_queue_is_reported(fresh: Box) -> None:
    fresh.start("sleep 1")
    job = fresh.run("true")
    assert 0.5 < job["queue_seconds"] < 30
    assert job["started_at"] - job["created_at"] > 0.5


def test_a_concurrent_command_does_not_wait(fresh: Box) -> None:
    first = fresh.running("sleep 30")
    assert fresh.out("echo hi", concurrent=True) == "hi\n"
    assert fresh.rest.job(first)["status"] == "running"


def test_a_concurrent_command_does_not_make_others_wait(fresh: Box) -> None:
    first = fresh.running("sleep 30", concurrent=True)
    assert fresh.out("echo hi") == "hi\n"
    assert fresh.rest.job(first)["status"] == "running"


def test_a_background_command_neither_waits_nor_makes_wait(fresh: Box) -> None:
    first = fresh.running("sleep 30")
    background = fresh.running("sleep 31", background=True)
    fresh.rest.delete(f"/jobs/{first}").expect(200)
    assert fresh.out("echo hi") == "hi\n"
    assert fresh.rest.job(background)["status"] == "running"


def test_a_background_command_has_no_default_timeout(new_box: NewBox) -> None:
    # The default timeout of other commands (600 s) is longer than this sandbox may live, so they are refused.
    fresh = new_box(ttl_seconds=120)
    background = fresh.running("sleep 300", background=True)
    assert fresh.rest.job(background)["status"] == "running"


def test_a_process_left_in_the_background_does_not_make_others_wait(fresh: Box) -> None:
    fresh.out("sleep 40 & echo started")
    assert fresh.out("echo next") == "next\n"


def test_sandboxes_do_not_wait_for_each_other(new_box: NewBox) -> None:
    one, other = new_box(), new_box()
    long = one.running("sleep 30")
    assert other.out("echo hi") == "hi\n"
    assert one.rest.job(long)["status"] == "running"


def test_many_concurrent_commands_keep_their_own_output(fresh: Box) -> None:
    def run(number: int) -> str:
        return fresh.out(f"echo {number}; sleep 0.05; echo {number}", concurrent=True)

    with ThreadPoolExecutor(16) as pool:
        results = list(pool.map(run, range(64)))
    assert results == [f"{n}\n{n}\n" for n in range(64)]


def test_a_queue_of_commands_survives_one_that_fails(fresh: Box) -> None:
    jobs = [fresh.start(command) for command in ("exit 3", ["no-such-program"], "sleep 30", "echo last")]
    eventually(lambda: fresh.rest.job(jobs[2])["status"] == "running", "the third runs")
    fresh.rest.delete(f"/jobs/{jobs[2]}").expect(200)
    assert fresh.rest.wait_job(jobs[3])["stdout"] == "last\n"
