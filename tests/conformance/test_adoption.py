"""A service that stops, or is killed, and comes back with the same state directory."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

from tests.conformance.runtimes import RuntimeCase
from tests.support.machine import descendants, kill, namespace_init, pids_with_argument, runs
from tests.support.rest import Box, Rest, new_id
from tests.support.service import Service
from tests.support.waiting import eventually

IMAGE = "host"
Start = Callable[..., Service]

END = {"stopped": Service.stop, "killed": Service.kill}


@pytest.fixture(params=list(END))
def end(request: pytest.FixtureRequest) -> Callable[[Service], object]:
    """How the service ends."""
    return END[request.param]


def again(rest: Rest, box: Box) -> Box:
    return Box(rest, box.id)


def test_a_live_sandbox_is_there_again(own_service: Start, end: Callable[[Service], object]) -> None:
    service = own_service()
    box = service.rest.create(IMAGE, labels={"a": "b"}, env={"GIVEN": "x"}, working_dir="/srv")
    box.out("echo kept > /tmp/f; sleep 9000 & exit 0")
    before = box.agent_start()
    info = box.info()
    end(service)
    box = again(service.start().rest, box)
    assert box.info()["status"] == "ready"
    assert box.agent_start() == before
    assert box.out("cat /tmp/f; echo $GIVEN; pwd") == "kept\nx\n/srv\n"
    assert box.run("pgrep -xf 'sleep 9000'")["exit_code"] == 0
    kept = ("labels", "created_at", "ready_at", "image", "owner", "ttl_seconds", "working_dir")
    assert {k: box.info()[k] for k in kept} == {k: info[k] for k in kept}
    assert box.info()["expires_at"] == pytest.approx(info["expires_at"], abs=5)


def test_a_running_job_goes_on_and_its_result_is_read_afterwards(
    own_service: Start, end: Callable[[Service], object]
) -> None:
    service = own_service()
    box = service.rest.create(IMAGE)
    job_id = box.running("echo before; echo x >> /tmp/n; sleep 3; echo after; wc -l < /tmp/n")
    end(service)
    job = service.start().rest.wait_job(job_id)
    assert (job["stdout"], job["status"]) == ("before\nafter\n1\n", "succeeded")


def test_a_job_that_finished_meanwhile_is_read_afterwards(
    own_service: Start, end: Callable[[Service], object]
) -> None:
    service = own_service()
    box = service.rest.create(IMAGE)
    tag = f"{time.monotonic_ns() % 10**9 + 10**6}.5"
    job_id = box.running(f"sleep 0.5; echo done; sleep {tag} & exit 4")
    end(service)
    eventually(lambda: pids_with_argument(tag), "the command has ended, its child has begun")
    job = service.start().rest.wait_job(job_id)
    assert (job["stdout"], job["exit_code"]) == ("done\n", 4)


def test_a_finished_job_is_read_afterwards(own_service: Start, end: Callable[[Service], object]) -> None:
    service = own_service()
    job = service.rest.create(IMAGE).run("echo result; exit 3")
    end(service)
    assert service.start().rest.job(job["job_id"]) == job


def test_a_finished_job_of_a_deleted_sandbox_is_read_afterwards(
    own_service: Start, end: Callable[[Service], object]
) -> None:
    service = own_service()
    box = service.rest.create(IMAGE)
    job = box.run("echo result")
    box.delete()
    end(service)
    rest = service.start().rest
    assert rest.job(job["job_id"]) == job
    assert rest.get(box.path).code == "sandbox_deleted"


def test_a_queued_job_takes_its_turn_afterwards(own_service: Start, end: Callable[[Service], object]) -> None:
    service = own_service()
    box = service.rest.create(IMAGE)
    box.running("sleep 2; echo one >> /tmp/n")
    queued = box.start("echo two >> /tmp/n; cat /tmp/n")
    end(service)
    assert service.start().rest.wait_job(queued)["stdout"] == "one\ntwo\n"


def test_a_repeated_request_after_the_restart_does_not_run_again(
    own_service: Start, end: Callable[[Service], object]
) -> None:
    service = own_service()
    box = service.rest.create(IMAGE)
    job_id, key = new_id("job"), new_id("key")
    box.run("echo x >> /tmp/n", job_id=job_id)
    keyed = {"image": IMAGE, "idempotency_key": key}
    other = service.rest.post("/sandboxes", keyed).expect()["sandbox_id"]
    end(service)
    rest = service.start().rest
    box = again(rest, box)
    box.run("echo x >> /tmp/n", job_id=job_id)
    assert box.out("wc -l < /tmp/n") == "1\n"
    assert rest.post("/sandboxes", keyed).expect()["sandbox_id"] == other
    assert rest.post("/sandboxes", {**keyed, "labels": {"x": "y"}}).status == 409


def test_the_lifetime_goes_on_counting(own_service: Start, end: Callable[[Service], object]) -> None:
    service = own_service()
    box = service.rest.create(IMAGE, ttl_seconds=4)
    end(service)
    rest = service.start().rest
    answer = eventually(lambda: (a := rest.get(box.path)).status == 404 and a, "its lifetime ends", 20)
    assert answer.json["reason"] == "ttl"


def test_a_sandbox_that_died_meanwhile_has_a_death_record(
    own_service: Start, end: Callable[[Service], object], runtime: RuntimeCase
) -> None:
    service = own_service()
    box, spared = service.rest.create(IMAGE), service.rest.create(IMAGE)
    tag = f"{time.monotonic_ns() % 10**9 + 10**6}.5"
    finished = box.run(f"sleep {tag} & echo done; exit 0")["job_id"]
    running = box.running("sleep 300")
    agent = namespace_init(pids_with_argument(tag)[0])
    end(service)
    kill(agent)
    eventually(lambda: not runs(agent), "the agent is dead")
    rest = service.start().rest
    answer = box.rest.with_key(service.api_key)
    answer = rest.post(f"{box.path}/exec", {"command": "true"})
    assert (answer.status, answer.code) == (404, "sandbox_dead")
    assert answer.json["reason"] in ("agent_lost", "runtime_error")
    job = rest.wait_job(running)
    assert (job["status"], job["infra"]) == ("failed", True)
    assert rest.job(finished)["stdout"] == "done\n"
    assert again(rest, spared).alive()


def test_a_sandbox_with_a_network_has_it_afterwards(
    own_service: Start, end: Callable[[Service], object]
) -> None:
    service = own_service()
    box = service.rest.create(IMAGE, block_network=False)
    end(service)
    box = again(service.start().rest, box)
    assert "eth0" in box.out("cat /proc/net/dev")
    other = service.rest.create(IMAGE, block_network=False)
    assert "eth0" in other.out("cat /proc/net/dev")


def test_new_sandboxes_beside_adopted_ones_disturb_neither(
    own_service: Start, end: Callable[[Service], object]
) -> None:
    service = own_service()
    old = [service.rest.create(IMAGE) for _ in range(3)]
    old[1].delete()
    end(service)
    rest = service.start().rest
    new = [rest.create(IMAGE) for _ in range(3)]
    boxes = [again(rest, old[0]), again(rest, old[2]), *new]
    for number, box in enumerate(boxes):
        box.out(f"echo {number} > /tmp/mine")
    assert [box.out("cat /tmp/mine") for box in boxes] == [f"{n}\n" for n in range(5)]


def test_a_cancel_after_the_restart_kills_all_that_the_job_started(own_service: Start) -> None:
    service = own_service()
    box = service.rest.create(IMAGE)
    job_id = box.running("setsid sleep 351.5 & sleep 351.5")
    service.kill()
    rest = service.start().rest
    rest.delete(f"/jobs/{job_id}").expect(200)
    assert rest.wait_job(job_id)["error_code"] == "cancelled"
    assert again(rest, box).run("pgrep -xf 'sleep 351.5'")["exit_code"] == 1


def test_pending_creations_survive_or_fail_with_a_reason(
    own_service: Start, end: Callable[[Service], object]
) -> None:
    service = own_service("--max-starting", "1")
    helpers = descendants(service.pid)
    for pid in helpers:
        os.kill(pid, signal.SIGSTOP)
    boxes = [service.rest.submit(IMAGE) for _ in range(5)]
    service.kill() if end is Service.kill else _stop_with(service, helpers)
    for pid in helpers:
        kill(pid, signal.SIGCONT)
    rest = service.start().rest
    for box in boxes:
        info = rest.get(f"{box.path}/wait", timeout=60)
        assert info.status == 200 or info.code in ("sandbox_dead", "sandbox_deleted"), info
        assert info.json.get("status") == "ready" or info.json["reason"], info
        if info.json.get("status") == "ready":
            assert again(rest, box).alive()


def _stop_with(service: Service, stopped: list[int]) -> None:
    """SIGTERM while helpers are stopped; they go on a moment later, so that a clean end is possible."""
    service.process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    for pid in stopped:
        kill(pid, signal.SIGCONT)
    service.stop()


def test_a_killed_helper_is_replaced(own_service: Start) -> None:
    service = own_service()
    box = service.rest.create(IMAGE)
    for pid in descendants(service.pid):
        if "orchard" in _title(pid) and not _in_sandbox(pid, box):
            kill(pid)
    assert box.alive(), "sandboxes live on without it"
    other = eventually(lambda: _try_create(service.rest), "sandboxes can be created again", 20)
    assert other.alive()
    box.delete()
    assert service.rest.get(box.path).code == "sandbox_deleted"


def _title(pid: int) -> str:
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read().replace(b"\0", b" ").decode(errors="replace")


def _in_sandbox(pid: int, box: Box) -> bool:
    return os.readlink(f"/proc/{pid}/ns/pid") != os.readlink("/proc/self/ns/pid")


def _try_create(rest: Rest) -> Box | None:
    box = rest.submit(IMAGE)
    info = rest.get(f"{box.path}/wait", timeout=30)
    return box if info.status == 200 and info.json["status"] == "ready" else None


def test_only_one_service_may_use_a_state_directory(own_service: Start) -> None:
    service = own_service()
    box = service.rest.create(IMAGE)
    second = Service(service.state_dir, arguments=service.arguments)
    with pytest.raises(AssertionError, match="ended with"):
        second.start()
    assert second.process.returncode != 0
    assert box.alive()


def test_leftovers_of_a_killed_service_are_removed(own_service: Start) -> None:
    """Directories and groups that no record names: a crash in the middle of a creation leaves them."""
    service = own_service()
    service.rest.create(IMAGE)
    (service.state_dir / "sandboxes" / "unknown-sandbox" / "upper").mkdir(parents=True)
    service.kill()
    service.start()
    eventually(lambda: not (service.state_dir / "sandboxes/unknown-sandbox").exists(), "the leftover is gone")
