"""The clocks of a sandbox, its end, and what is known of it afterwards."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import pytest

from tests.conformance.conftest import NewBox
from tests.conformance.runtimes import Images, RuntimeCase
from tests.support.machine import kill, namespace_init, pids_with_argument
from tests.support.rest import Box, Rest, new_id
from tests.support.service import Service
from tests.support.waiting import Stopwatch, eventually

#: Calls that a dead or deleted sandbox must answer with its reason.
LATER_CALLS = [
    ("POST", "/exec", {"command": "true", "wait": True}),
    ("POST", "/files", {"path": "/tmp/f", "content": ""}),
    ("GET", "/files?path=/etc/passwd", None),
    ("GET", "/files/list?path=/", None),
    ("POST", "/apply_patch", {"patch": "x"}),
    ("POST", "/heartbeat", None),
    ("GET", "/stats", None),
    ("PATCH", "", {"ttl_seconds": 10}),
]


def ended(box: Box, within_s: float = 30) -> dict:  # type: ignore[type-arg]
    """The error body with which the sandbox answers once it has ended."""
    return eventually(
        lambda: (a := box.post_exec("true")).status == 404 and a.json, f"{box.id} has ended", within_s
    )


def agent_of(box: Box) -> int:
    """The pid of the agent, seen from outside."""
    tag = f"{time.monotonic_ns() % 10**9 + 10**6}.5"
    box.out(f"sleep {tag} & exit 0")
    (pid,) = eventually(lambda: pids_with_argument(tag), "the tagged process")
    return namespace_init(pid)


# -- deletion


@pytest.mark.unprivileged
def test_a_deleted_sandbox_says_so_on_every_later_call(new_box: NewBox) -> None:
    box = new_box()
    box.delete()
    for method, path, body in LATER_CALLS:
        answer = box.rest.request(method, box.path + path, body)
        assert (answer.status, answer.code, answer.json["reason"]) == (404, "sandbox_deleted", "deleted"), (
            method,
            path,
        )
    assert box.rest.get(box.path).code == "sandbox_deleted"


def test_deleting_twice_is_fine(new_box: NewBox) -> None:
    box = new_box()
    assert [box.rest.delete(box.path).status for _ in range(3)] == [200] * 3


def test_deleting_an_id_never_seen_is_404(rest: Rest) -> None:
    assert rest.delete(f"/sandboxes/{new_id()}").code == "sandbox_not_found"


def test_the_id_of_a_deleted_sandbox_stays_taken(new_box: NewBox, images: Images) -> None:
    """The record of its end must stay readable; another sandbox under its id would shadow it."""
    box = new_box(sandbox_id=new_id())
    box.delete()
    answer = box.rest.post("/sandboxes", {"image": images.full, "sandbox_id": box.id})
    assert answer.status == 409 or box.rest.get(box.path).expect(200)["status"] in ("pending", "ready")
    box.delete()


@pytest.mark.unprivileged
def test_deleting_at_once_after_creation_leaves_nothing(
    rest: Rest, images: Images, runtime: RuntimeCase
) -> None:
    boxes = [rest.submit(images.full) for _ in range(10)]
    for box in boxes:
        rest.delete(box.path).expect(200)
    assert {rest.get(box.path).code for box in boxes} == {"sandbox_deleted"}


def test_a_wait_for_a_sandbox_ends_when_it_is_deleted(rest: Rest, images: Images) -> None:
    from concurrent.futures import ThreadPoolExecutor

    box = rest.create(images.full)
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(box.run, "sleep 60")
        eventually(lambda: rest.get(f"{box.path}/jobs").expect(200)["jobs"], "the command is there")
        watch = Stopwatch()
        box.delete()
        assert job.result(30)["status"] == "failed"
    assert watch.seconds < 20


# -- the maximum lifetime


@pytest.mark.unprivileged
def test_the_lifetime_ends_a_sandbox_with_that_reason(new_box: NewBox) -> None:
    box = new_box(ttl_seconds=1)
    body = ended(box)
    assert (body["code"], body["reason"], body["retryable"], body["infra"]) == (
        "sandbox_dead",
        "ttl",
        False,
        True,
    )
    for method, path, request in LATER_CALLS:
        assert box.rest.request(method, box.path + path, request).json["reason"] == "ttl", (method, path)


def test_the_lifetime_ends_it_not_before_its_time(new_box: NewBox) -> None:
    watch = Stopwatch()
    box = new_box(ttl_seconds=2)
    ended(box)
    assert 2 <= watch.seconds < 2 + 10


def test_the_default_lifetime_is_a_day(new_box: NewBox) -> None:
    info = new_box().info()
    assert info["ttl_seconds"] == 86400
    assert 86000 < info["expires_at"] - time.time() <= 86400


def test_a_job_that_runs_at_the_end_of_the_lifetime_ends_with_that_reason(new_box: NewBox) -> None:
    box = new_box(ttl_seconds=2)
    job_id = box.running("sleep 300", background=True)
    job = box.rest.wait_job(job_id)
    assert (job["status"], job["infra"], job["timed_out"]) == ("failed", True, False)
    assert "ttl" in job["error"] or "lifetime" in job["error"]


def test_a_command_longer_than_the_rest_of_the_lifetime_is_refused_at_once(new_box: NewBox) -> None:
    box = new_box(ttl_seconds=60)
    answer = box.post_exec("sleep 1", timeout_seconds=120, wait=True)
    assert (answer.status, answer.code) == (409, "lifetime_exceeded")
    assert box.rest.get(f"{box.path}/jobs").expect(200)["jobs"] == []
    assert box.out("echo ok", timeout_seconds=5) == "ok\n"


def test_patch_prolongs_the_lifetime_from_now(new_box: NewBox) -> None:
    box = new_box(ttl_seconds=30)
    info = box.rest.patch(box.path, {"ttl_seconds": 1000}).expect(200)
    assert 900 < info["expires_at"] - time.time() <= 1000
    assert box.out("echo ok", timeout_seconds=500) == "ok\n"


def test_patch_prolongs_the_lifetime_during_a_command(new_box: NewBox) -> None:
    box = new_box(ttl_seconds=4)
    job_id = box.running("sleep 6; echo survived", background=True)
    box.rest.patch(box.path, {"ttl_seconds": 100}).expect(200)
    assert box.rest.wait_job(job_id)["stdout"] == "survived\n"


def test_patch_shortens_the_lifetime(new_box: NewBox) -> None:
    box = new_box()
    box.rest.patch(box.path, {"ttl_seconds": 0.5}).expect(200)
    assert ended(box)["reason"] == "ttl"


def test_patch_replaces_the_labels(new_box: NewBox) -> None:
    box = new_box(labels={"a": "1", "b": "2"})
    assert box.rest.patch(box.path, {"labels": {"c": "3"}}).expect(200)["labels"] == {"c": "3"}
    assert box.info()["labels"] == {"c": "3"}


def test_patch_leaves_what_is_not_named(new_box: NewBox) -> None:
    box = new_box(labels={"a": "1"}, ttl_seconds=500)
    box.rest.patch(box.path, {"ttl_seconds": 700}).expect(200)
    assert box.info()["labels"] == {"a": "1"}
    box.rest.patch(box.path, {"labels": {}}).expect(200)
    assert (box.info()["labels"], box.info()["ttl_seconds"]) == ({}, 700)


# -- the lease


def test_without_a_heartbeat_there_is_no_lease(new_box: NewBox) -> None:
    assert new_box().info()["lease_expires_at"] is None


def test_a_lease_asked_for_at_creation_runs_from_there(new_box: NewBox) -> None:
    box = new_box(heartbeat_timeout=1)
    assert (
        eventually(lambda: (a := box.rest.get(box.path)).status == 404 and a.json, "it ends")["reason"]
        == "heartbeat"
    )


def test_heartbeats_keep_a_sandbox_alive(new_box: NewBox) -> None:
    box = new_box(heartbeat_timeout=2)
    watch = Stopwatch()
    while watch.seconds < 5:
        beat = box.rest.post(f"{box.path}/heartbeat").expect(200)
        assert 0 < beat["lease_expires_at"] - time.time() <= 2.5
        time.sleep(0.2)
    assert box.info()["status"] == "ready"


def test_the_lease_ends_a_sandbox_after_the_last_heartbeat(new_box: NewBox) -> None:
    box = new_box(heartbeat_timeout=1)
    box.rest.post(f"{box.path}/heartbeat").expect(200)
    assert (
        eventually(lambda: (a := box.rest.get(box.path)).status == 404 and a.json, "it ends")["reason"]
        == "heartbeat"
    )


def test_the_first_heartbeat_begins_a_lease(new_box: NewBox) -> None:
    box = new_box()
    beat = box.rest.post(f"{box.path}/heartbeat").expect(200)
    assert beat["lease_expires_at"] > time.time()
    assert box.info()["lease_expires_at"] is not None


def test_a_stalled_service_does_not_end_what_its_clients_kept_alive(
    own_service: Callable[..., Service],
) -> None:
    """Heartbeats that came while the service could not read them count."""
    service = own_service()
    box = service.rest.create("host", heartbeat_timeout=2)
    over = threading.Event()

    def beat() -> None:
        rest = Rest(service.base_url, service.api_key)
        while not over.wait(0.2):
            rest.post(f"{box.path}/heartbeat")

    client = threading.Thread(target=beat)
    client.start()
    try:
        eventually(lambda: box.info()["lease_expires_at"], "the lease has begun")
        os.kill(service.pid, signal.SIGSTOP)
        time.sleep(4)
        os.kill(service.pid, signal.SIGCONT)
        time.sleep(1)
        assert box.info()["status"] == "ready"
    finally:
        over.set()
        client.join(30)


# -- death


@pytest.fixture
def killed(runtime: RuntimeCase, new_box: NewBox) -> Box:
    """A sandbox whose agent was killed from outside, with a job that ran and one that had finished."""
    assert runtime.on_this_machine
    box = new_box()
    box.run("echo finished", job_id=f"{box.id[:40]}-finished")
    box.running("touch /tmp/up; sleep 300", job_id=f"{box.id[:40]}-running")
    box.until("test -e /tmp/up")
    kill(agent_of_running(box))
    return box


def agent_of_running(box: Box) -> int:
    tag = f"{time.monotonic_ns() % 10**9 + 10**6}.25"
    box.out(f"sleep {tag} & exit 0", concurrent=True)
    (pid,) = eventually(lambda: pids_with_argument(tag), "the tagged process")
    return namespace_init(pid)


@pytest.mark.unprivileged
def test_a_killed_agent_leaves_a_death_record(killed: Box) -> None:
    body = ended(killed)
    assert body["code"] == "sandbox_dead"
    assert body["reason"] in ("agent_lost", "runtime_error")
    death = body["death"]
    assert death["ended_at"] == pytest.approx(time.time(), abs=60)
    assert death.keys() >= {"reason", "exit_code", "peak_memory_bytes", "agent_log"}


def test_a_killed_agent_is_never_a_connection_error(killed: Box) -> None:
    codes = set()
    watch = Stopwatch()
    while watch.seconds < 3:
        answer = killed.post_exec("true", wait=True)
        assert answer.status in (404, 503) or answer.json["infra"], answer
        codes.add(answer.code)
    assert "sandbox_dead" in codes


def test_every_call_on_a_dead_sandbox_tells_the_reason(killed: Box) -> None:
    reason = ended(killed)["reason"]
    for method, path, body in LATER_CALLS:
        answer = killed.rest.request(method, killed.path + path, body)
        assert (answer.status, answer.code, answer.json["reason"]) == (404, "sandbox_dead", reason), (
            method,
            path,
        )


@pytest.mark.unprivileged
def test_the_running_job_of_a_dead_sandbox_ends_as_an_infrastructure_failure(killed: Box) -> None:
    job = killed.rest.wait_job(f"{killed.id[:40]}-running")
    assert (job["status"], job["infra"], job["timed_out"]) == ("failed", True, False)
    assert job["error"]
    assert job["exit_code"] is None


def test_the_finished_job_of_a_dead_sandbox_stays_readable(killed: Box) -> None:
    ended(killed)
    assert killed.rest.job(f"{killed.id[:40]}-finished")["stdout"] == "finished\n"


def test_a_dead_sandbox_may_be_deleted(killed: Box) -> None:
    ended(killed)
    killed.rest.delete(killed.path).expect(200)


@pytest.mark.unprivileged
def test_a_waiting_exec_ends_when_its_sandbox_dies(runtime: RuntimeCase, new_box: NewBox) -> None:
    from concurrent.futures import ThreadPoolExecutor

    box = new_box()
    pid = agent_of(box)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(box.post_exec, "sleep 300", wait=True)
        eventually(
            lambda: box.rest.get(f"{box.path}/jobs").expect(200)["jobs"][-1]["status"] == "running", "it runs"
        )
        kill(pid)
        answer = waiting.result(60)
    assert answer.status in (200, 404)
    assert answer.json["infra"] is True
    assert answer.json.get("status") == "failed" or answer.code == "sandbox_dead"


@pytest.mark.unprivileged
def test_the_death_of_one_sandbox_leaves_others_alone(runtime: RuntimeCase, new_box: NewBox) -> None:
    one, other = new_box(), new_box()
    kill(agent_of(one))
    ended(one)
    assert other.alive()
