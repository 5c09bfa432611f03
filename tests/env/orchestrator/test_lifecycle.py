"""The life of sandboxes: starts that fail, are retried, queue or are cancelled; deaths; clocks; freeing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from orchard.env.contract import EndReason
from orchard.env.runtimes.base import Postmortem, StartFailed
from tests.env.orchestrator.asgi import Caller
from tests.env.orchestrator.conftest import Running, Start


async def test_a_failed_start_is_told_by_wait_and_get_and_refused_by_the_rest(running: Running) -> None:
    running.runtime.failures = [StartFailed(EndReason.IMAGE_NOT_FOUND, "no image x; import it")]
    call = running.call
    (await call.post("/sandboxes", {"image": "x", "sandbox_id": "bad"})).expect()
    info = (await call.get("/sandboxes/bad/wait")).expect()
    assert (info["status"], info["reason"], info["ready"]) == ("failed", "image_not_found", False)
    assert "import it" in info["status_message"]
    assert (await call.get("/sandboxes/bad")).expect()["status"] == "failed"
    assert (await call.get("/sandboxes/bad/logs")).expect()["lines"]
    error = (await call.post("/sandboxes/bad/exec", {"command": "true"})).expect(404)
    assert (error["code"], error["reason"], error["infra"]) == ("sandbox_dead", "image_not_found", True)
    assert (await call.get("/sandboxes")).expect()["sandboxes"] == []
    assert len((await call.get("/sandboxes?status=failed")).expect()["sandboxes"]) == 1
    (await call.delete("/sandboxes/bad")).expect()
    assert (await call.get("/sandboxes/bad")).expect(404)["code"] == "sandbox_deleted"


async def test_what_may_start_a_moment_later_is_tried_again(running: Running) -> None:
    running.runtime.failures = [
        StartFailed(EndReason.RUNTIME_ERROR, "busy", retryable=True) for _ in range(2)
    ]
    await running.call.ready()
    lines = (await running.call.get("/sandboxes/box/logs")).expect()["lines"]
    assert sum("busy" in line["message"] for line in lines) == 2


async def test_an_unforeseen_error_of_the_runtime_is_a_failed_sandbox(running: Running) -> None:
    running.runtime.failures = [ZeroDivisionError("a bug")]
    (await running.call.post("/sandboxes", {"image": "x", "sandbox_id": "bad"})).expect()
    info = (await running.call.get("/sandboxes/bad/wait")).expect()
    assert (info["status"], info["reason"]) == ("failed", "runtime_error")


async def test_no_more_start_at_once_than_allowed_and_the_rest_know_their_place(start: Start) -> None:
    running = await start(max_starting=2)
    running.runtime.gate.clear()
    call = running.call
    for number in range(5):
        (await call.post("/sandboxes", {"image": "x", "sandbox_id": f"s{number}"})).expect()
    await asyncio.sleep(0)
    places = [(await call.get(f"/sandboxes/s{number}")).expect()["queue_position"] for number in range(5)]
    assert places == [None, None, 0, 1, 2]
    listed = (await call.get("/sandboxes")).expect()["sandboxes"]
    assert [entry["queue_position"] for entry in listed] == places
    resources = (await call.get("/resources")).expect()
    assert (resources["starting"], resources["queue_length"]) == (2, 3)
    running.runtime.gate.set()
    for number in range(5):
        assert (await call.get(f"/sandboxes/s{number}/wait")).expect()["ready"]
    assert running.runtime.most_starting == 2


async def test_a_full_queue_refuses_and_keeps_what_it_accepted(start: Start) -> None:
    running = await start(max_starting=1, max_queue=2)
    running.runtime.gate.clear()
    for number in range(3):
        (await running.call.post("/sandboxes", {"image": "x", "sandbox_id": f"s{number}"})).expect()
    reply = await running.call.post("/sandboxes", {"image": "x", "sandbox_id": "s3"})
    assert reply.expect(503)["retryable"] is True
    assert int(reply.headers["retry-after"]) >= 1
    assert (await running.call.get("/sandboxes/s3")).status == 404
    running.runtime.gate.set()
    for number in range(3):
        assert (await running.call.get(f"/sandboxes/s{number}/wait")).expect()["ready"]


@pytest.mark.parametrize("which", ["starting", "queued"])
async def test_deleting_a_pending_one_cancels_it(start: Start, which: str) -> None:
    running = await start(max_starting=1)
    running.runtime.gate.clear()
    call = running.call
    for name in ("starting", "queued"):
        (await call.post("/sandboxes", {"image": "x", "sandbox_id": name})).expect()
    waiting = asyncio.create_task(call.get(f"/sandboxes/{which}/wait"))
    await asyncio.sleep(0)
    (await call.delete(f"/sandboxes/{which}")).expect()
    assert (await waiting).expect(404)["code"] == "sandbox_deleted"
    running.runtime.gate.set()
    other = "queued" if which == "starting" else "starting"
    assert (await call.get(f"/sandboxes/{other}/wait")).expect()["ready"]
    assert running.runtime.created == [other]


async def test_a_wait_that_is_over_changes_nothing(running: Running) -> None:
    running.runtime.gate.clear()
    (await running.call.post("/sandboxes", {"image": "x", "sandbox_id": "slow"})).expect()
    error = (await running.call.get("/sandboxes/slow/wait?timeout=0.05")).expect(408)
    assert (error["code"], error["retryable"]) == ("wait_timeout", True)
    running.runtime.gate.set()
    assert (await running.call.get("/sandboxes/slow/wait")).expect()["ready"]


async def test_what_is_not_ready_in_time_fails_and_leaves_nothing(running: Running) -> None:
    running.runtime.gate.clear()
    (await running.call.post("/sandboxes", {"image": "x", "sandbox_id": "slow", "timeout": 0.1})).expect()
    info = (await running.call.get("/sandboxes/slow/wait")).expect()
    assert (info["status"], info["reason"]) == ("failed", "ready_timeout")
    running.runtime.gate.set()
    assert running.runtime.created == []


async def ended(call: Caller, sandbox_id: str) -> Any:
    """The error of a sandbox, once it has ended."""
    return (await call.until(f"/sandboxes/{sandbox_id}", lambda reply: reply.status != 200)).expect(404)


async def test_a_death_is_told_by_every_later_call(running: Running) -> None:
    call = running.call
    await call.ready()
    running.runtime.die("box", Postmortem(EndReason.OOM, "out of memory", exit_code=137))
    for request in (
        call.get("/sandboxes/box"), call.get("/sandboxes/box/wait"), call.get("/sandboxes/box/stats"),
        call.post("/sandboxes/box/exec", {"command": "true", "wait": True}), call.post("/sandboxes/box/heartbeat"),
        call.get("/sandboxes/box/files?path=/x"), call("PATCH", "/sandboxes/box", {"ttl_seconds": 5}),
    ):  # fmt: skip
        error = (await request).expect(404)
        assert (error["code"], error["reason"], error["infra"]) == ("sandbox_dead", "oom", True)
    (await call.delete("/sandboxes/box")).expect()
    death = (await call.get("/sandboxes/box")).expect(404)["death"]
    assert death["exit_code"] == 137
    assert death["peak_memory_bytes"] == 4096
    assert death["agent_log"] == ["1.5 last words"]


async def test_deleting_twice_is_fine_and_never_seen_is_404(call: Caller) -> None:
    await call.ready()
    first, second = await asyncio.gather(call.delete("/sandboxes/box"), call.delete("/sandboxes/box"))
    assert first.expect() == second.expect() == {"status": "deleted", "sandbox_id": "box"}
    (await call.delete("/sandboxes/box")).expect()
    assert (await call.delete("/sandboxes/never")).expect(404)["code"] == "sandbox_not_found"


async def test_a_failing_free_is_tried_again_and_ended_all_the_same(running: Running) -> None:
    await running.call.ready()
    running.runtime.delete_failures = [OSError("busy")]
    (await running.call.delete("/sandboxes/box")).expect()
    assert running.runtime.place.agents == {}


async def test_what_cannot_be_freed_is_said_and_a_repeat_frees_it(running: Running) -> None:
    await running.call.ready()
    running.runtime.delete_failures = [OSError("busy") for _ in range(4)]
    assert (await running.call.delete("/sandboxes/box")).expect(503)["infra"] is True
    assert (await running.call.get("/sandboxes/box")).expect(404)["code"] == "sandbox_deleted"
    (await running.call.delete("/sandboxes/box")).expect()
    assert running.runtime.place.agents == {}


async def test_the_lifetime_ends_it_and_its_commands(running: Running) -> None:
    call = running.call
    await call.ready(ttl_seconds=0.5)
    job = await call.run("box", "sleep 60")
    assert (job["status"], job["infra"], job["error_code"]) == ("failed", True, "sandbox_dead")
    assert "ttl" in job["error"]
    assert (await ended(call, "box"))["reason"] == "ttl"


async def test_patch_moves_the_lifetime_both_ways(running: Running) -> None:
    call = running.call
    await call.ready(ttl_seconds=3600)
    info = (await call("PATCH", "/sandboxes/box", {"ttl_seconds": 0.1, "labels": {"a": "b"}})).expect()
    assert (info["ttl_seconds"], info["labels"]) == (0.1, {"a": "b"})
    assert (await ended(call, "box"))["reason"] == "ttl"


async def test_a_command_beyond_the_lifetime_is_refused_at_once(running: Running) -> None:
    call = running.call
    await call.ready(ttl_seconds=60)
    error = (await call.post("/sandboxes/box/exec", {"command": "true", "timeout_seconds": 61})).expect(409)
    assert error["code"] == "lifetime_exceeded"
    assert running.agent("box").runs == 0
    assert (await call.run("box", "true", timeout_seconds=50))["status"] == "succeeded"


async def test_the_lease_applies_from_creation_or_the_first_heartbeat(start: Start) -> None:
    running = await start(heartbeat_timeout_s=0.2)
    call = running.call
    await call.ready("asked", heartbeat_timeout=0.2)
    await call.ready("never")
    await call.ready("begun")
    beat = (await call.post("/sandboxes/begun/heartbeat")).expect()
    assert beat["lease_expires_at"] > 0
    assert (await ended(call, "asked"))["reason"] == "heartbeat"
    assert (await ended(call, "begun"))["reason"] == "heartbeat"
    assert (await call.get("/sandboxes/never")).expect()["lease_expires_at"] is None


async def test_a_running_command_extends_the_lease_and_a_background_one_does_not(running: Running) -> None:
    call = running.call
    await call.ready("front", heartbeat_timeout=0.3)
    await call.ready("back", heartbeat_timeout=0.3)
    (await call.post("/sandboxes/back/exec", {"command": "sleep 60", "background": True})).expect()
    job = await call.run("front", "sleep 1")
    assert job["status"] == "succeeded"
    assert (await ended(call, "back"))["reason"] == "heartbeat"
    assert (await ended(call, "front"))["reason"] == "heartbeat"
