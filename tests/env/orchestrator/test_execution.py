"""Commands: once per job id, through broken channels, deaths and disconnects."""

from __future__ import annotations

import asyncio

import pytest

from orchard.env.contract import EndReason
from orchard.env.orchestrator import execution
from orchard.env.runtimes.base import Postmortem
from tests.env.orchestrator.asgi import Caller
from tests.env.orchestrator.conftest import Running, Start


async def started(call: Caller, job_id: str) -> None:
    """Returns when the job runs."""
    await call.until(
        f"/jobs/{job_id}", lambda reply: reply.status == 200 and reply.json["status"] == "running"
    )


async def test_a_waited_command_answers_with_the_whole_job(call: Caller) -> None:
    await call.ready()
    job = await call.run("box", ["sh", "-c", "printf 'a\\377'; echo b >&2; exit 3"], job_id="j1")
    assert (job["job_id"], job["sandbox_id"], job["status"], job["exit_code"]) == ("j1", "box", "failed", 3)
    assert (job["stdout"], job["stderr"], job["error"]) == ("a\ufffd", "b\n", None)
    assert (await call.get("/jobs/j1")).expect() == job
    assert (await call.get("/jobs/j1/wait")).expect() == job


async def test_an_accepted_command_is_followed_to_its_end(call: Caller) -> None:
    await call.ready()
    answer = (
        await call.post("/sandboxes/box/exec", {"command": "cat", "stdin": "in", "job_id": "j"})
    ).expect()
    assert answer == {"job_id": "j", "status": "queued"}
    assert (await call.get("/jobs/j/wait")).expect()["stdout"] == "in"


async def test_waiting_for_a_job_ends_with_408_and_the_job_goes_on(call: Caller) -> None:
    await call.ready()
    (await call.post("/sandboxes/box/exec", {"command": "sleep 0.3; echo done", "job_id": "j"})).expect()
    assert (await call.get("/jobs/j/wait?timeout=0.02")).expect(408)["code"] == "wait_timeout"
    assert (await call.get("/jobs/j/wait")).expect()["stdout"] == "done\n"


async def test_concurrent_duplicates_run_once_and_all_get_the_result(running: Running) -> None:
    await running.call.ready()
    body = {"command": "sleep 0.1; echo x", "wait": True, "job_id": "same"}
    replies = await asyncio.gather(*(running.call.post("/sandboxes/box/exec", body) for _ in range(10)))
    assert {reply.expect()["stdout"] for reply in replies} == {"x\n"}
    assert len({reply.body for reply in replies}) == 1
    assert running.agent("box").runs == 1
    assert (await running.call.run("box", "sleep 0.1; echo x", job_id="same"))["stdout"] == "x\n"
    assert running.agent("box").runs == 1


async def test_a_job_id_stands_for_one_command_on_one_sandbox(running: Running) -> None:
    await running.call.ready("a")
    await running.call.ready("b")
    await running.call.run("a", "true", job_id="j")
    for sandbox_id, command in (("a", "false"), ("b", "true")):
        body = {"command": command, "wait": True, "job_id": "j"}
        assert (await running.call.post(f"/sandboxes/{sandbox_id}/exec", body)).expect(409)[
            "code"
        ] == "conflict"
    await running.caller("alice").ready("c")
    assert (await running.caller("alice").run("c", "echo own", job_id="j"))["stdout"] == "own\n"


async def test_a_refused_command_leaves_its_id_free(running: Running) -> None:
    await running.call.ready()
    body = {"command": "pwd", "cwd": str(running.agent("box").folder / "later"), "job_id": "j", "wait": True}
    assert (await running.call.post("/sandboxes/box/exec", body)).expect(400)["code"] == "cwd_not_found"
    assert (await running.call.get("/jobs/j")).expect(404)["code"] == "job_not_found"
    (running.agent("box").folder / "later").mkdir()
    assert (await running.call.post("/sandboxes/box/exec", body)).expect()["status"] == "succeeded"


async def test_a_broken_channel_neither_repeats_nor_loses_a_command(running: Running) -> None:
    call = running.call
    await call.ready()
    command = asyncio.create_task(call.run("box", "sleep 0.4; echo x", job_id="j"))
    await started(call, "j")
    running.runtime.break_channel("box")
    assert (await command)["stdout"] == "x\n"
    assert running.agent("box").runs == 1


async def test_a_request_that_never_arrived_is_sent_again(running: Running) -> None:
    call = running.call
    await call.ready()
    running.runtime.unreachable.add("box")
    command = asyncio.create_task(call.run("box", "echo x", job_id="j"))
    accepted = asyncio.create_task(call.post("/sandboxes/box/exec", {"command": "echo y", "job_id": "k"}))
    await asyncio.sleep(0.1)
    assert running.agent("box").runs == 0
    running.runtime.unreachable.clear()
    assert (await command)["stdout"] == "x\n"
    (await accepted).expect()
    assert (await call.get("/jobs/k/wait")).expect()["stdout"] == "y\n"
    assert running.agent("box").runs == 2


async def test_a_job_on_a_dying_sandbox_ends_with_its_reason(running: Running) -> None:
    call = running.call
    await call.ready()
    waited = asyncio.create_task(call.run("box", "sleep 60", job_id="w"))
    (await call.post("/sandboxes/box/exec", {"command": "sleep 60", "job_id": "q"})).expect()
    await started(call, "w")
    running.runtime.die("box", Postmortem(EndReason.OOM, "out of memory"))
    for job in (
        await waited,
        (await call.get("/jobs/q/wait")).expect(),
        (await call.get("/jobs/q")).expect(),
    ):
        assert (job["status"], job["error_code"], job["infra"]) == ("failed", "sandbox_dead", True)
        assert "oom" in job["error"] and job["exit_code"] is None


async def test_deleting_a_sandbox_ends_its_jobs(running: Running) -> None:
    call = running.call
    await call.ready()
    finished = await call.run("box", "echo kept", job_id="f")
    waited = asyncio.create_task(call.run("box", "sleep 60", job_id="w"))
    await started(call, "w")
    (await call.delete("/sandboxes/box")).expect()
    job = await waited
    assert (job["status"], job["error_code"], job["infra"]) == ("failed", "sandbox_deleted", False)
    assert (await call.get("/jobs/f")).expect() == finished


async def test_an_agent_out_of_reach_for_too_long_is_given_up(start: Start) -> None:
    running = await start(agent_lost_after_s=0.2)
    call = running.call
    await call.ready()
    command = asyncio.create_task(call.run("box", "sleep 60", job_id="j"))
    await started(call, "j")
    running.runtime.unreachable.add("box")
    running.runtime.break_channel("box")
    job = await command
    assert (job["status"], job["infra"]) == ("failed", True)
    assert (await call.get("/sandboxes/box")).expect(404)["reason"] == "agent_lost"


@pytest.mark.parametrize("policy", ["keep", "kill"])
async def test_a_client_that_goes_away_leaves_or_ends_its_command(running: Running, policy: str) -> None:
    call = running.call
    await call.ready()
    hang_up = asyncio.Event()
    body = {"command": "sleep 0.5; echo x", "wait": True, "job_id": "j", "on_disconnect": policy}
    request = asyncio.create_task(call.post("/sandboxes/box/exec", body, hang_up=hang_up))
    await started(call, "j")
    hang_up.set()
    await request
    job = (await call.get("/jobs/j/wait")).expect()
    if policy == "keep":
        assert job["stdout"] == "x\n"
    else:
        assert (job["status"], job["error_code"], job["infra"]) == ("failed", "cancelled", False)


async def test_cancel_ends_a_job_once_and_leaves_finished_ones(call: Caller) -> None:
    await call.ready()
    (await call.post("/sandboxes/box/exec", {"command": "sleep 60", "job_id": "j"})).expect()
    job = (await call.delete("/jobs/j")).expect()
    assert (job["status"], job["error_code"]) == ("failed", "cancelled")
    assert (await call.delete("/jobs/j")).expect() == job
    assert (await call.post("/jobs/j/signal", {"signal": "TERM"})).expect(409)["code"] == "job_not_running"
    assert (await call.post("/jobs/j/stdin", {"data": "eA=="})).expect(409)["code"] == "job_not_running"
    assert (await call.delete("/jobs/none")).expect(404)["code"] == "job_not_found"


async def test_too_many_commands_are_refused_quickly(start: Start) -> None:
    running = await start(max_jobs=1)
    call = running.call
    await call.ready()
    (await call.post("/sandboxes/box/exec", {"command": "sleep 60", "job_id": "j"})).expect()
    reply = await call.post("/sandboxes/box/exec", {"command": "true"})
    assert reply.expect(503)["code"] == "overloaded" and reply.headers["retry-after"]
    (await call.delete("/jobs/j")).expect()
    assert (await call.run("box", "true"))["status"] == "succeeded"


async def test_agents_are_told_to_forget_the_oldest_of_what_is_kept_here(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution, "_AGENT_KEEPS", 3)
    call = running.call
    await call.ready()
    jobs = [await call.run("box", f"echo {n}", job_id=f"j{n}") for n in range(4)]
    await call.until("/health", lambda _: running.agent("box").forgotten == ["j0", "j1"])
    assert (await call.get("/jobs/j0")).expect() == jobs[0]


async def test_listing_shows_jobs_without_output(call: Caller) -> None:
    await call.ready()
    await call.run("box", "echo x", job_id="one")
    (await call.post("/sandboxes/box/exec", {"command": "sleep 60", "job_id": "two"})).expect()
    jobs = (await call.get("/sandboxes/box/jobs")).expect()["jobs"]
    assert [(job["job_id"], job["stdout"]) for job in jobs] == [("one", ""), ("two", "")]
    assert jobs[0]["stdout_bytes"] == 2


async def test_a_repeated_request_attaches_though_less_lifetime_than_its_timeout_is_left(
    running: Running,
) -> None:
    call = running.call
    await call.ready(ttl_seconds=100)
    first = await call.run("box", "echo x", job_id="j", timeout_seconds=90)
    (await call("PATCH", "/sandboxes/box", {"ttl_seconds": 50})).expect()
    assert await call.run("box", "echo x", job_id="j", timeout_seconds=90) == first
    assert running.agent("box").runs == 1


async def test_a_refused_command_does_not_hold_its_id_or_the_lease(running: Running) -> None:
    call = running.call
    await call.ready(ttl_seconds=50, heartbeat_timeout=0.2)
    body = {"command": "true", "job_id": "j", "timeout_seconds": 90, "wait": True}
    assert (await call.post("/sandboxes/box/exec", body)).expect(409)["code"] == "lifetime_exceeded"
    assert (await call.get("/jobs/j")).status == 404
    reply = await call.until("/sandboxes/box", lambda reply: reply.status != 200)
    assert reply.expect(404)["reason"] == "heartbeat"
