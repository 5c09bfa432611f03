"""The job object, and where to find it again."""

from __future__ import annotations

import time

from tests.conformance.conftest import NewBox
from tests.support.rest import Box, Rest, new_id
from tests.support.waiting import Stopwatch

PUBLISHED_FIELDS = {
    "job_id", "sandbox_id", "command", "status", "stdout", "stderr", "exit_code", "created_at", "started_at",
    "completed_at", "error",
}  # fmt: skip
ADDED_FIELDS = {
    "timed_out", "signal", "stdout_bytes", "stderr_bytes", "stdout_truncated", "stderr_truncated",
    "duration_seconds", "oom_killed",
}  # fmt: skip


def test_a_job_has_the_published_fields_and_ours(box: Box) -> None:
    assert box.run("true").keys() >= PUBLISHED_FIELDS | ADDED_FIELDS


def test_a_queued_job_has_the_published_fields_too(fresh: Box) -> None:
    fresh.running("sleep 30")
    assert fresh.rest.job(fresh.start("true")).keys() >= PUBLISHED_FIELDS | ADDED_FIELDS


def test_times_are_in_order(box: Box) -> None:
    before = time.time()
    job = box.run("sleep 0.2")
    assert before - 1 <= job["created_at"] <= job["started_at"] <= job["completed_at"] <= time.time() + 1


def test_the_duration_is_that_of_the_command(box: Box) -> None:
    job = box.run("sleep 0.5")
    assert 0.5 <= job["duration_seconds"] < 5
    assert abs(job["completed_at"] - job["started_at"] - job["duration_seconds"]) < 0.5


def test_exec_without_wait_answers_at_once_with_the_job_id(fresh: Box) -> None:
    answer = fresh.post_exec("sleep 20").expect()
    assert answer["status"] in ("queued", "running")
    assert set(answer) >= {"job_id", "status"}
    assert fresh.rest.job(answer["job_id"])["status"] in ("queued", "running")


def test_exec_with_wait_answers_with_the_whole_job(box: Box) -> None:
    job = box.run("echo hi")
    assert job == box.rest.job(job["job_id"])


def test_waiting_for_a_job_returns_when_it_ends(fresh: Box) -> None:
    job_id = fresh.start("sleep 0.5; echo done")
    watch = Stopwatch()
    assert fresh.rest.wait_job(job_id, 60)["stdout"] == "done\n"
    assert watch.seconds < 30


def test_a_wait_that_ends_first_is_408_and_leaves_the_job(fresh: Box) -> None:
    job_id = fresh.start("sleep 20")
    watch = Stopwatch()
    answer = fresh.rest.get(f"/jobs/{job_id}/wait", timeout=0.5)
    assert (answer.status, answer.code, answer.json["retryable"]) == (408, "wait_timeout", True)
    assert watch.seconds < 10
    assert fresh.rest.job(job_id)["status"] == "running"


def test_many_may_wait_for_one_job(fresh: Box) -> None:
    from concurrent.futures import ThreadPoolExecutor

    job_id = fresh.start("sleep 0.5; echo done")
    with ThreadPoolExecutor(8) as pool:
        assert {j["stdout"] for j in pool.map(lambda _: fresh.rest.wait_job(job_id), range(8))} == {"done\n"}


def test_a_client_may_choose_the_job_id(box: Box) -> None:
    job_id = new_id("mine")
    assert box.run("true", job_id=job_id)["job_id"] == job_id


def test_the_jobs_of_a_sandbox_are_listed(fresh: Box) -> None:
    one = fresh.run("echo one")["job_id"]
    two = fresh.running("sleep 20")
    jobs = {j["job_id"]: j for j in fresh.rest.get(f"{fresh.path}/jobs").expect(200)["jobs"]}
    assert {one, two} == set(jobs)
    assert (jobs[one]["status"], jobs[two]["status"]) == ("succeeded", "running")


def test_the_services_own_commands_are_not_listed(fresh: Box) -> None:
    fresh.out("mkdir /tmp/p")
    fresh.apply_patch("--- /dev/null\n+++ b/new\n@@ -0,0 +1 @@\n+x\n", cwd="/tmp/p").expect(200)
    commands = [j["command"] for j in fresh.rest.get(f"{fresh.path}/jobs").expect(200)["jobs"]]
    assert commands == ["mkdir /tmp/p"]


def test_an_unknown_job_is_404(rest: Rest) -> None:
    for path in (f"/jobs/{new_id()}", f"/jobs/{new_id()}/wait"):
        answer = rest.get(path)
        assert (answer.status, answer.code) == (404, "job_not_found")


def test_a_finished_job_stays_readable_after_its_sandbox_is_deleted(new_box: NewBox) -> None:
    box = new_box()
    job = box.run("echo kept")
    box.delete()
    assert box.rest.job(job["job_id"])["stdout"] == "kept\n"


def test_a_job_that_runs_when_its_sandbox_is_deleted_ends_with_a_reason(new_box: NewBox) -> None:
    box = new_box()
    job_id = box.running("echo begun; sleep 300")
    box.delete()
    job = box.rest.wait_job(job_id)
    assert (job["status"], job["timed_out"]) == ("failed", False)
    assert "deleted" in job["error"]


def test_a_job_that_waits_in_the_queue_when_its_sandbox_is_deleted_ends_too(new_box: NewBox) -> None:
    box = new_box()
    box.running("sleep 300")
    queued = box.start("echo never")
    box.delete()
    job = box.rest.wait_job(queued)
    assert (job["status"], job["stdout"]) == ("failed", "")
    assert "deleted" in job["error"]
