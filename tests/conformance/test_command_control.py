"""Cancel, signals, lost connections, and requests that are repeated."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.conformance.conftest import NewBox
from tests.support.rest import Box, new_id
from tests.support.waiting import eventually


def lost_exec(box: Box, body: str) -> None:
    """Sends an exec that waits, and drops the connection without reading the answer."""
    connection = box.rest.connect()
    headers = {**box.rest.headers(), "Content-Type": "application/json"}
    connection.request("POST", f"{box.path}/exec", body.encode(), headers)
    job_ids = eventually(
        lambda: [
            j["job_id"]
            for j in box.rest.get(f"{box.path}/jobs").expect(200)["jobs"]
            if j["status"] == "running"
        ],
        "the command runs",
    )
    assert job_ids
    assert connection.sock is not None
    connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()


# -- cancel


def test_cancel_ends_a_running_command(fresh: Box) -> None:
    job_id = fresh.running("echo begun; touch /tmp/up; sleep 300")
    fresh.until("test -e /tmp/up")
    fresh.rest.delete(f"/jobs/{job_id}").expect(200)
    job = fresh.rest.wait_job(job_id)
    assert (job["status"], job["error_code"], job["timed_out"]) == ("failed", "cancelled", False)
    assert job["error"]
    assert job["stdout"] == "begun\n"


@pytest.mark.unprivileged
def test_cancel_kills_everything_that_the_command_started(fresh: Box) -> None:
    job_id = fresh.running(
        "setsid sleep 331.5 & (trap '' TERM; setsid sleep 331.5 &) ; touch /tmp/up; sleep 331.5"
    )
    fresh.until("test -e /tmp/up")
    fresh.rest.delete(f"/jobs/{job_id}").expect(200)
    fresh.rest.wait_job(job_id)
    assert fresh.run("pgrep -xf 'sleep 331.5'")["exit_code"] == 1


def test_cancel_of_a_queued_command_means_that_it_never_runs(fresh: Box) -> None:
    first = fresh.running("sleep 30")
    second = fresh.start("touch /tmp/ran")
    fresh.rest.delete(f"/jobs/{second}").expect(200)
    job = fresh.rest.wait_job(second)
    assert (job["status"], job["error_code"], job["started_at"]) == ("failed", "cancelled", None)
    fresh.rest.delete(f"/jobs/{first}").expect(200)
    assert fresh.run(["/bin/ls", "/tmp/ran"])["exit_code"] != 0


def test_cancel_gives_the_grace_of_the_command(fresh: Box) -> None:
    command = "trap 'echo cleaned; exit 0' TERM; echo up; touch /tmp/up; while :; do sleep 0.05; done"
    job_id = fresh.running(command, grace_seconds=30)
    fresh.until("test -e /tmp/up")
    fresh.rest.delete(f"/jobs/{job_id}").expect(200)
    job = fresh.rest.wait_job(job_id)
    assert (job["stdout"], job["error_code"]) == ("up\ncleaned\n", "cancelled")


def test_cancel_of_a_finished_command_changes_nothing(fresh: Box) -> None:
    job = fresh.run("echo done")
    assert fresh.rest.delete(f"/jobs/{job['job_id']}").status in (200, 409)
    assert fresh.rest.job(job["job_id"])["status"] == "succeeded"


def test_cancel_of_an_unknown_job_is_404(box: Box) -> None:
    answer = box.rest.delete(f"/jobs/{new_id()}")
    assert (answer.status, answer.code) == (404, "job_not_found")


# -- signals


@pytest.mark.parametrize("name", ["USR1", "SIGUSR1"])
def test_a_signal_reaches_the_command(fresh: Box, name: str) -> None:
    job_id = fresh.running(
        "trap 'echo caught; exit 3' USR1; echo up; touch /tmp/up; while :; do sleep 0.05; done"
    )
    fresh.until("test -e /tmp/up")
    fresh.rest.post(f"/jobs/{job_id}/signal", {"signal": name}).expect(200)
    job = fresh.rest.wait_job(job_id)
    assert (job["stdout"], job["exit_code"], job["error"]) == ("up\ncaught\n", 3, None)


def test_a_fatal_signal_is_reported_as_such(fresh: Box) -> None:
    job_id = fresh.running(["/bin/sleep", "300"])
    fresh.rest.post(f"/jobs/{job_id}/signal", {"signal": "INT"}).expect(200)
    job = fresh.rest.wait_job(job_id)
    assert (job["exit_code"], job["signal"], job["timed_out"]) == (130, "INT", False)


@pytest.mark.unprivileged
def test_a_signal_reaches_all_of_the_job(fresh: Box) -> None:
    job_id = fresh.running("setsid sleep 341.5 & touch /tmp/up; wait; echo gone; sleep 0.1")
    fresh.until("test -e /tmp/up")
    fresh.rest.post(f"/jobs/{job_id}/signal", {"signal": "TERM"}).expect(200)
    fresh.rest.wait_job(job_id)
    eventually(lambda: fresh.run("pgrep -xf 'sleep 341.5'")["exit_code"] == 1, "the child is gone")


@pytest.mark.parametrize("name", ["NOSUCH", "", "99999", "TERM; id"])
def test_a_signal_that_does_not_exist_is_refused(fresh: Box, name: str) -> None:
    job_id = fresh.running(["/bin/sleep", "300"])
    assert fresh.rest.post(f"/jobs/{job_id}/signal", {"signal": name}).status == 422
    assert fresh.rest.job(job_id)["status"] == "running"


def test_a_signal_to_a_finished_command_is_refused(fresh: Box) -> None:
    job_id = fresh.run("true")["job_id"]
    answer = fresh.rest.post(f"/jobs/{job_id}/signal", {"signal": "TERM"})
    assert (answer.status, answer.code) == (409, "job_not_running")


# -- repeated requests


def test_a_repeated_request_with_a_job_id_does_not_run_again(fresh: Box) -> None:
    job_id = new_id("job")
    results = [fresh.run("echo x >> /tmp/n; wc -l < /tmp/n", job_id=job_id) for _ in range(3)]
    assert {job["job_id"] for job in results} == {job_id}
    assert {job["stdout"] for job in results} == {"1\n"}
    assert fresh.out("wc -l < /tmp/n") == "1\n"


def test_simultaneous_requests_with_one_job_id_run_once(fresh: Box) -> None:
    job_id = new_id("job")

    def run(_: int) -> str:
        return fresh.run("echo x >> /tmp/n; sleep 0.2; wc -l < /tmp/n", job_id=job_id)["stdout"]

    with ThreadPoolExecutor(12) as pool:
        assert set(pool.map(run, range(12))) == {"1\n"}
    assert fresh.out("wc -l < /tmp/n") == "1\n"


def test_a_job_id_with_another_command_is_a_conflict(fresh: Box) -> None:
    job_id = new_id("job")
    fresh.run("echo one", job_id=job_id)
    answer = fresh.post_exec("echo two", job_id=job_id, wait=True)
    assert (answer.status, answer.code) == (409, "conflict")
    assert fresh.rest.job(job_id)["stdout"] == "one\n"


def test_a_job_id_in_use_in_another_sandbox_is_a_conflict(new_box: NewBox) -> None:
    one, other = new_box(), new_box()
    job_id = new_id("job")
    one.run("echo one", job_id=job_id)
    answer = other.post_exec("echo one", job_id=job_id, wait=True)
    assert (answer.status, answer.code) == (409, "conflict")


@pytest.mark.parametrize("job_id", ["../x", "A", "a_b", "-a", "a" * 64, ""])
def test_a_malformed_job_id_is_refused(box: Box, job_id: str) -> None:
    assert box.post_exec("true", job_id=job_id).status == 422


# -- lost connections


def test_a_lost_connection_neither_ends_nor_loses_the_command(fresh: Box) -> None:
    lost_exec(
        fresh, '{"command": "echo x >> /tmp/n; sleep 1; echo result", "wait": true, "job_id": "lost-keep"}'
    )
    job = fresh.rest.wait_job("lost-keep")
    assert (job["stdout"], job["exit_code"]) == ("result\n", 0)
    assert fresh.out("wc -l < /tmp/n") == "1\n"


def test_a_lost_connection_keeps_the_command_when_asked_to(fresh: Box) -> None:
    job_id = new_id("job")
    body = f'{{"command": "sleep 303.5", "wait": true, "job_id": "{job_id}", "on_disconnect": "keep"}}'
    lost_exec(fresh, body)
    assert fresh.run("sleep 3; pgrep -xf 'sleep 303.5'", concurrent=True)["exit_code"] == 0
    listed = fresh.rest.get(f"{fresh.path}/jobs").expect(200)["jobs"]
    assert [j["status"] for j in listed if j["job_id"] == job_id] == ["running"]


@pytest.mark.unprivileged
def test_a_lost_connection_kills_the_command_when_asked_to(fresh: Box) -> None:
    job_id = new_id("job")
    body = f'{{"command": "sleep 304.5", "wait": true, "job_id": "{job_id}", "on_disconnect": "kill"}}'
    lost_exec(fresh, body)
    eventually(lambda: fresh.rest.job(job_id)["status"] == "failed", "the command is killed", 30)
    assert fresh.rest.job(job_id)["error_code"] == "cancelled"
    assert fresh.run("pgrep -xf 'sleep 304.5'", concurrent=True)["exit_code"] == 1


def test_a_waiter_may_come_back_by_job_id(fresh: Box) -> None:
    job_id = fresh.start("sleep 0.5; echo late")
    assert fresh.rest.wait_job(job_id)["stdout"] == "late\n"
    assert fresh.rest.wait_job(job_id)["stdout"] == "late\n"
