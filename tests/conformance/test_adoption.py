"""A service that stops, or is killed, and comes back with the same state directory.

One restart of each kind is shared by the tests that look at different things that were there before it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.conftest import end_and_check
from tests.conformance.runtimes import RuntimeCase
from tests.support.machine import descendants, kill, namespace_init, pids_with_argument, runs
from tests.support.rest import Box, Rest, new_id
from tests.support.service import Service
from tests.support.waiting import eventually

IMAGE = "host"
Start = Callable[..., Service]

END = {"stopped": Service.stop, "killed": Service.kill}


def tag() -> str:
    """A duration for `sleep` that no other process on the machine has."""
    return f"{time.monotonic_ns() % 10**9 + 10**6}.5"


@dataclass
class Before:
    """What there was before the service ended: sandboxes, jobs, and what was known of them."""

    service: Service
    end: str
    boxes: dict[str, Box] = field(default_factory=dict)
    jobs: dict[str, Any] = field(default_factory=dict)
    known: dict[str, Any] = field(default_factory=dict)

    @property
    def rest(self) -> Rest:
        return self.service.rest

    def create(self, name: str, **fields: object) -> Box:
        self.boxes[name] = box = self.rest.create(IMAGE, **fields)
        return box

    def box(self, name: str) -> Box:
        """The sandbox through the service of now."""
        return Box(self.rest, self.boxes[name].id)


def _prepare(now: Before) -> None:
    rest = now.rest
    live = now.create("live", labels={"a": "b"}, env={"GIVEN": "x"}, working_dir="/srv")
    live.out("echo kept > /tmp/f; sleep 9000 & exit 0")
    now.known.update(info=live.info(), agent=live.agent_start())
    now.jobs["finished"] = live.run("echo result; exit 3")
    now.jobs["named"] = live.run("echo x >> /tmp/n", job_id=new_id("job"))["job_id"]
    deleted = now.create("deleted")
    now.jobs["of deleted"] = deleted.run("echo result")
    deleted.delete()
    doomed = now.create("doomed")
    number = tag()
    now.jobs["of dead"] = doomed.run(f"sleep {number} & echo done; exit 0")["job_id"]
    now.jobs["running in dead"] = doomed.running("sleep 300")
    now.known["doomed agent"] = namespace_init(pids_with_argument(number)[0])
    now.create("networked", block_network=False)
    now.known["keyed"] = {"image": IMAGE, "idempotency_key": new_id("key")}
    now.known["keyed id"] = rest.post("/sandboxes", now.known["keyed"]).expect()["sandbox_id"]
    now.create("killable")
    now.jobs["killable"] = now.boxes["killable"].running("setsid sleep 351.5 & sleep 351.5")
    now.create("expiring", ttl_seconds=14)
    now.create("leased", heartbeat_timeout=2)
    now.jobs["leased"] = now.boxes["leased"].running("sleep 12; echo kept")
    now.create("in the background", heartbeat_timeout=2)
    now.boxes["in the background"].start("sleep 600", background=True)
    now.create("busy")
    now.create("queueing")
    now.create("ending")
    # The last ones are those that must still run when the service ends.
    number = now.known["ending tag"] = tag()
    now.jobs["ending"] = now.boxes["ending"].running(f"sleep 1; echo done; sleep {number} & exit 4")
    busy = "echo before; echo x >> /tmp/n; sleep 4; echo after; wc -l < /tmp/n"
    now.jobs["busy"] = now.boxes["busy"].running(busy)
    now.boxes["queueing"].running("sleep 4; echo one >> /tmp/n")
    now.jobs["queued"] = now.boxes["queueing"].start("echo two >> /tmp/n; cat /tmp/n")


@pytest.fixture(scope="module", params=list(END))
def before(
    request: pytest.FixtureRequest, runtime: RuntimeCase, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Before]:
    """All of it, after the service ended and came back."""
    assert runtime.on_this_machine
    folder: Path = tmp_path_factory.mktemp("adoption")
    service = Service(folder / "state", arguments=runtime.serve_arguments).start()
    now = Before(service, request.param)
    _prepare(now)
    END[request.param](service)
    kill(now.known["doomed agent"])
    eventually(lambda: not runs(now.known["doomed agent"]), "the doomed agent is dead")
    eventually(lambda: pids_with_argument(now.known["ending tag"]), "a command ended while nobody looked")
    service.start()
    yield now
    end_and_check(service, runtime)


# -- sandboxes


def test_a_live_sandbox_is_there_again(before: Before) -> None:
    box = before.box("live")
    assert box.info()["status"] == "ready"
    assert box.agent_start() == before.known["agent"]
    assert box.out("cat /tmp/f; echo $GIVEN; pwd") == "kept\nx\n/srv\n"
    assert box.run("pgrep -xf 'sleep 9000'")["exit_code"] == 0


def test_what_was_known_of_a_sandbox_is_known_again(before: Before) -> None:
    info, known = before.box("live").info(), before.known["info"]
    kept = ("labels", "created_at", "ready_at", "image", "owner", "ttl_seconds", "working_dir")
    assert {name: info[name] for name in kept} == {name: known[name] for name in kept}
    assert info["expires_at"] == pytest.approx(known["expires_at"], abs=5)


def test_a_sandbox_that_died_meanwhile_has_a_death_record(before: Before) -> None:
    answer = before.box("doomed").post_exec("true")
    assert (answer.status, answer.code) == (404, "sandbox_dead")
    assert answer.json["reason"] in ("agent_lost", "runtime_error")


def test_a_command_that_was_adopted_keeps_the_lease_as_it_did(before: Before) -> None:
    job = before.rest.wait_job(before.jobs["leased"])
    assert (job["status"], job["stdout"]) == ("succeeded", "kept\n")
    path = before.boxes["in the background"].path
    end = eventually(lambda: (a := before.rest.get(path)).status == 404 and a.json, "its lease ends")
    assert end["reason"] == "heartbeat"


def test_a_deleted_sandbox_is_still_known_as_deleted(before: Before) -> None:
    assert before.rest.get(before.boxes["deleted"].path).code == "sandbox_deleted"


def test_a_sandbox_with_a_network_has_it_afterwards(before: Before) -> None:
    assert "eth0" in before.box("networked").out("cat /proc/net/dev")
    other = before.rest.create(IMAGE, block_network=False)
    assert "eth0" in other.out("cat /proc/net/dev")
    other.delete()


def test_new_sandboxes_beside_adopted_ones_disturb_neither(before: Before) -> None:
    boxes = [before.box("live"), before.box("busy"), *(before.rest.create(IMAGE) for _ in range(3))]
    for number, box in enumerate(boxes):
        box.out(f"echo {number} > /tmp/mine", concurrent=True)
    assert [box.out("cat /tmp/mine", concurrent=True) for box in boxes] == [f"{n}\n" for n in range(5)]


def test_a_repeated_creation_after_the_restart_makes_none(before: Before) -> None:
    keyed = before.known["keyed"]
    assert before.rest.post("/sandboxes", keyed).expect()["sandbox_id"] == before.known["keyed id"]
    assert before.rest.post("/sandboxes", {**keyed, "labels": {"x": "y"}}).status == 409


# -- jobs


def test_a_running_job_goes_on_and_its_result_is_read_afterwards(before: Before) -> None:
    job = before.rest.wait_job(before.jobs["busy"])
    assert (job["stdout"], job["status"]) == ("before\nafter\n1\n", "succeeded")


def test_a_queued_job_takes_its_turn_afterwards(before: Before) -> None:
    assert before.rest.wait_job(before.jobs["queued"])["stdout"] == "one\ntwo\n"


def test_a_job_that_finished_meanwhile_is_read_afterwards(before: Before) -> None:
    job = before.rest.wait_job(before.jobs["ending"])
    assert (job["stdout"], job["exit_code"]) == ("done\n", 4)


def test_a_finished_job_is_read_afterwards(before: Before) -> None:
    assert before.rest.job(before.jobs["finished"]["job_id"]) == before.jobs["finished"]


def test_a_finished_job_of_a_deleted_sandbox_is_read_afterwards(before: Before) -> None:
    assert before.rest.job(before.jobs["of deleted"]["job_id"]) == before.jobs["of deleted"]


def test_the_jobs_of_a_sandbox_that_died_meanwhile_end_with_a_reason(before: Before) -> None:
    job = before.rest.wait_job(before.jobs["running in dead"])
    assert (job["status"], job["infra"]) == ("failed", True)
    assert job["error"]
    assert before.rest.job(before.jobs["of dead"])["stdout"] == "done\n"


def test_a_repeated_command_after_the_restart_does_not_run_again(before: Before) -> None:
    box = before.box("live")
    box.run("echo x >> /tmp/n", job_id=before.jobs["named"])
    assert box.out("wc -l < /tmp/n") == "1\n"


def test_a_cancel_after_the_restart_kills_all_that_the_job_started(before: Before) -> None:
    job_id = before.jobs["killable"]
    before.rest.delete(f"/jobs/{job_id}").expect(200)
    assert before.rest.wait_job(job_id)["error_code"] == "cancelled"
    assert before.box("killable").run("pgrep -xf 'sleep 351.5'")["exit_code"] == 1


def test_the_lifetime_goes_on_counting(before: Before) -> None:
    path = before.boxes["expiring"].path
    answer = eventually(lambda: (a := before.rest.get(path)).status == 404 and a, "its lifetime ends", 60)
    assert answer.json["reason"] == "ttl"


# -- creation in flight, helpers, leftovers


@pytest.mark.parametrize("end", END)
def test_pending_creations_survive_or_fail_with_a_reason(own_service: Start, end: str) -> None:
    service = own_service("--max-starting", "1")
    helpers = descendants(service.pid)
    for pid in helpers:
        os.kill(pid, signal.SIGSTOP)
    boxes = [service.rest.submit(IMAGE) for _ in range(5)]
    if end == "killed":
        service.kill()
    else:
        service.process.send_signal(signal.SIGTERM)
    for pid in helpers:
        kill(pid, signal.SIGCONT)
    service.process.wait(60)
    rest = service.start().rest
    for box in boxes:
        answer = rest.get(f"{box.path}/wait", timeout=60)
        assert answer.status == 200 or answer.code in ("sandbox_dead", "sandbox_deleted"), answer
        if answer.json.get("status") == "ready":
            assert Box(rest, box.id).alive()
        else:
            assert answer.json["reason"], answer


def test_a_killed_helper_is_replaced(own_service: Start) -> None:
    service = own_service()
    box = service.rest.create(IMAGE)
    mine = Path("/proc/self/ns/pid").readlink()
    for pid in descendants(service.pid):
        if Path(f"/proc/{pid}/ns/pid").readlink() == mine:
            kill(pid)
    assert box.alive(), "sandboxes live on without it"

    def create() -> Box | None:
        new = service.rest.submit(IMAGE)
        answer = service.rest.get(f"{new.path}/wait", timeout=30)
        return new if answer.status == 200 and answer.json["status"] == "ready" else None

    assert eventually(create, "sandboxes can be created again", 20).alive()
    box.delete()
    assert service.rest.get(box.path).code == "sandbox_deleted"


def test_only_one_service_may_use_a_state_directory(own_service: Start) -> None:
    service = own_service()
    box = service.rest.create(IMAGE)
    second = Service(service.state_dir, arguments=service.arguments)
    with pytest.raises(AssertionError, match="ended with"):
        second.start()
    assert second.process.returncode != 0
    assert box.alive()


def test_leftovers_of_a_killed_service_are_removed(own_service: Start) -> None:
    """Directories that no record names: a crash in the middle of a creation leaves them."""
    service = own_service()
    leftover = service.state_dir / "sandboxes" / "unknown-sandbox"
    (leftover / "upper").mkdir(parents=True)
    service.kill()
    service.start()
    eventually(lambda: not leftover.exists(), "the leftover is gone")
