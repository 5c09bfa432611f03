"""The create queue: capped, fair between owners, visible, and left by deletion."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from tests.conformance.conftest import end_and_check
from tests.conformance.runtimes import RuntimeCase
from tests.support.keys import Tenant, write_keys_file
from tests.support.machine import descendants
from tests.support.rest import Box, Rest, new_id
from tests.support.service import Service
from tests.support.waiting import Stopwatch, eventually

IMAGE = "host"
ALICE, BOB, CAROL = Tenant("alice"), Tenant("bob"), Tenant("carol", max_sandboxes=2)


@pytest.fixture(scope="module")
def narrow(runtime: RuntimeCase, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service that starts one sandbox at a time, and lets ten wait."""
    folder = tmp_path_factory.mktemp("narrow")
    keys = write_keys_file(folder / "keys.json", [ALICE, BOB, CAROL])
    config = folder / "config.json"
    config.write_text(json.dumps({"max_starting": 1, "max_queue": 10}))
    arguments = ("--config", str(config), "--keys-file", str(keys))
    service = Service(folder / "state", arguments=(*runtime.serve_arguments, *arguments)).start()
    yield service
    end_and_check(service, runtime)


@pytest.fixture
def held(narrow: Service) -> Iterator[Callable[[], None]]:
    """Keeps sandboxes from starting (the runtime's helper processes are stopped) until it is called."""
    # What an earlier test gave up may still be on its way out, and hold the only place.
    eventually(lambda: narrow.rest.get("/resources").expect(200)["starting"] == 0, "nothing is starting", 30)
    helpers = descendants(narrow.pid)
    assert helpers, "the runtime starts sandboxes through a helper process"
    for pid in helpers:
        os.kill(pid, signal.SIGSTOP)

    def release() -> None:
        for pid in helpers:
            with suppress(ProcessLookupError):  # what waited to become the sandbox may have ended with it
                os.kill(pid, signal.SIGCONT)

    yield release
    release()
    narrow.delete_all()


def info(rest: Rest, box: Box) -> dict:  # type: ignore[type-arg]
    return rest.get(box.path).expect(200)


def starting(narrow: Service, owner: Tenant) -> Box:
    """One sandbox that holds the only place."""
    box = narrow.rest.with_key(owner.key).submit(IMAGE)
    eventually(lambda: narrow.rest.get("/resources").expect(200)["starting"] == 1, "one is starting")
    return box


def test_no_more_than_the_cap_start_at_a_time(narrow: Service, held: Callable[[], None]) -> None:
    boxes = [narrow.rest.submit(IMAGE) for _ in range(5)]
    resources = narrow.rest.get("/resources").expect(200)
    assert (resources["starting"], resources["max_starting"], resources["queue_length"]) == (1, 1, 4)
    held()
    for box in boxes:
        box.wait_ready()


def test_a_waiting_sandbox_tells_its_position_and_its_wait(narrow: Service, held: Callable[[], None]) -> None:
    starting(narrow, ALICE)
    alice = narrow.rest.with_key(ALICE.key)
    boxes = [alice.submit(IMAGE) for _ in range(3)]
    assert [info(alice, box)["queue_position"] for box in boxes] == [0, 1, 2]
    assert {info(alice, box)["status"] for box in boxes} == {"pending"}
    held()
    for box in boxes:
        ready = box.wait_ready()
        assert ready["queue_position"] is None
        assert ready["queue_seconds"] > 0


def test_one_owners_burst_does_not_delay_another(narrow: Service, held: Callable[[], None]) -> None:
    starting(narrow, ALICE)
    alice, bob = narrow.rest.with_key(ALICE.key), narrow.rest.with_key(BOB.key)
    burst = [alice.submit(IMAGE) for _ in range(8)]
    single = bob.submit(IMAGE)
    assert info(bob, single)["queue_position"] <= 1
    held()
    single_ready_at = single.wait_ready()["ready_at"]
    later = [box for box in burst if box.wait_ready()["ready_at"] > single_ready_at]
    assert len(later) >= 6


def test_a_waiting_sandbox_may_be_deleted_and_never_starts(narrow: Service, held: Callable[[], None]) -> None:
    starting(narrow, ALICE)
    doomed, spared = narrow.rest.submit(IMAGE), narrow.rest.submit(IMAGE)
    narrow.rest.delete(doomed.path).expect(200)
    assert info(narrow.rest, spared)["queue_position"] == 0
    held()
    spared.wait_ready()
    assert narrow.rest.get(doomed.path).code == "sandbox_deleted"


def test_a_starting_sandbox_may_be_deleted(narrow: Service, held: Callable[[], None]) -> None:
    box = starting(narrow, ALICE)
    narrow.rest.delete(box.path).expect(200)
    assert narrow.rest.get(box.path).code == "sandbox_deleted"
    held()
    after = narrow.rest.create(IMAGE)
    assert after.alive()


def test_commands_on_a_pending_sandbox_are_refused_as_not_ready(
    narrow: Service, held: Callable[[], None]
) -> None:
    box = starting(narrow, ALICE)
    answer = box.post_exec("true", wait=True)
    assert (answer.status, answer.code, answer.json["retryable"]) == (409, "sandbox_not_ready", True)


def test_a_creation_that_waits_answers_in_its_time_with_where_it_stands(
    narrow: Service, held: Callable[[], None]
) -> None:
    starting(narrow, ALICE)
    watch = Stopwatch()
    info = narrow.rest.post("/sandboxes", {"image": IMAGE}, wait=0.3).expect()
    assert (info["status"], info["queue_position"]) == ("pending", 0)
    assert watch.seconds >= 0.3
    held()
    Box(narrow.rest, info["sandbox_id"]).wait_ready()


def test_waiting_for_a_pending_sandbox_ends_with_408(narrow: Service, held: Callable[[], None]) -> None:
    box = starting(narrow, ALICE)
    answer = narrow.rest.get(f"{box.path}/wait", timeout=0.3)
    assert (answer.status, answer.code, answer.json["retryable"]) == (408, "wait_timeout", True)
    held()
    box.wait_ready()


def test_a_sandbox_not_ready_in_its_time_fails_with_that_reason(
    narrow: Service, held: Callable[[], None]
) -> None:
    first = narrow.rest.submit(IMAGE, timeout=1)
    second = narrow.rest.submit(IMAGE, timeout=1)
    for box in (first, second):
        answer = narrow.rest.get(f"{box.path}/wait", timeout=30).expect(200)
        assert (answer["status"], answer["reason"]) == ("failed", "ready_timeout")


def test_a_full_queue_answers_503_at_once_with_retry_after(narrow: Service, held: Callable[[], None]) -> None:
    starting(narrow, ALICE)
    waiting = [narrow.rest.submit(IMAGE) for _ in range(10)]
    watch = Stopwatch()
    answer = narrow.rest.post("/sandboxes", {"image": IMAGE})
    assert watch.seconds < 10
    assert (answer.status, answer.code, answer.json["retryable"]) == (503, "overloaded", True)
    assert float(answer.headers["retry-after"]) >= 0
    held()
    for box in waiting:
        box.wait_ready()


def test_a_quota_refuses_what_exceeds_it(narrow: Service) -> None:
    carol = narrow.rest.with_key(CAROL.key)
    boxes = [carol.create(IMAGE) for _ in range(2)]
    answer = carol.post("/sandboxes", {"image": IMAGE})
    assert (answer.status, answer.code) == (429, "quota_exceeded")
    boxes[0].delete()
    carol.create(IMAGE).delete()
    boxes[1].delete()


def test_a_burst_far_above_the_cap_succeeds_whole(own_service: Callable[..., Service]) -> None:
    rest = own_service("--max-starting", "4").rest
    label = new_id("burst")
    body = {"sandboxes": [{"image": IMAGE, "labels": {"run": label}}] * 100}
    results = rest.post("/sandboxes/batch", body).expect()["results"]
    boxes = [Box(rest, r["sandbox"]["sandbox_id"]) for r in results]
    for box in boxes:
        box.wait_ready()
    assert len(rest.delete("/sandboxes", label=f"run={label}").expect(200)["sandbox_ids"]) == 100
