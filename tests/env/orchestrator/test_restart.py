"""What follows a kill -9 of the orchestrator and its next start, and a clean stop."""

from __future__ import annotations

import asyncio

from tests.env.orchestrator.conftest import Start
from tests.env.orchestrator.process_runtime import AgentJob
from tests.env.orchestrator.test_execution import started

SLOW = {"command": "sleep 0.5; echo x", "wait": True, "job_id": "j"}


async def test_ready_sandboxes_and_their_jobs_are_adopted(start: Start) -> None:
    first = await start()
    await first.call.ready(labels={"run": "1"}, ttl_seconds=1000)
    before = (await first.call.get("/sandboxes/box")).expect()
    finished = await first.call.run("box", "echo kept", job_id="f")
    (
        await first.call.post("/sandboxes/box/exec", {"command": "sleep 0.5; echo late", "job_id": "r"})
    ).expect()
    second = await start()
    after = (await second.call.get("/sandboxes/box")).expect()
    assert abs(after.pop("expires_at") - before.pop("expires_at")) < 5
    assert after == before
    assert (await second.call.get("/jobs/f")).expect() == finished
    assert (await second.call.get("/jobs/r/wait")).expect()["stdout"] == "late\n"
    again = await second.call.run("box", "sleep 0.5; echo late", job_id="r")
    assert again["stdout"] == "late\n"
    assert second.agent("box").runs == 2


async def test_a_waited_command_cut_off_is_found_again_by_its_id(start: Start) -> None:
    first = await start()
    await first.call.ready()
    cut = asyncio.create_task(first.call.post("/sandboxes/box/exec", SLOW))
    await started(first.call, "j")
    second = await start()
    error = (await cut).expect(503)
    assert error["retryable"] is True
    assert (await second.call.run("box", "sleep 0.5; echo x", job_id="j"))["stdout"] == "x\n"
    assert second.agent("box").runs == 1


async def test_results_outlive_the_sandbox_and_the_service(start: Start) -> None:
    first = await start()
    await first.call.ready()
    job = await first.call.run("box", "echo kept", job_id="f")
    (await first.call.delete("/sandboxes/box")).expect()
    second = await start()
    assert (await second.call.get("/jobs/f")).expect() == job
    assert (await second.call.get("/sandboxes/box")).expect(404)["code"] == "sandbox_deleted"
    assert (await second.call.post("/sandboxes", {"image": "x", "sandbox_id": "box"})).status == 409


async def test_jobs_of_a_sandbox_that_died_meanwhile_end_with_its_reason(start: Start) -> None:
    first = await start()
    await first.call.ready()
    (await first.call.post("/sandboxes/box/exec", {"command": "sleep 60", "job_id": "j"})).expect()
    first.runtime.place.agents.pop("box").kill()
    second = await start()
    job = (await second.call.get("/jobs/j")).expect()
    assert (job["status"], job["infra"], job["error_code"]) == ("failed", True, "sandbox_dead")
    assert (await second.call.get("/sandboxes/box")).expect(404)["reason"] == "agent_lost"


async def test_an_acknowledged_job_that_its_agent_never_saw_fails_with_a_reason(start: Start) -> None:
    first = await start()
    await first.call.ready()
    first.runtime.unreachable.add("box")
    (await first.call.post("/sandboxes/box/exec", {"command": "echo x", "job_id": "j"})).expect()
    second = await start()
    job = (await second.call.get("/jobs/j")).expect()
    assert (job["status"], job["infra"]) == ("failed", True)
    assert "did not run" in job["error"]


async def test_accepted_creations_are_carried_out_by_the_next_run(start: Start) -> None:
    first = await start(max_starting=1)
    first.runtime.gate.clear()
    for name in ("starting", "queued"):
        (await first.call.post("/sandboxes", {"image": "x", "sandbox_id": name})).expect()
    second = await start()
    for name in ("starting", "queued"):
        assert (await second.call.get(f"/sandboxes/{name}/wait")).expect()["ready"]
        assert (await second.call.run(name, "echo hi"))["stdout"] == "hi\n"


async def test_nothing_unknown_is_left_by_the_next_run(start: Start) -> None:
    first = await start()
    await first.call.ready()
    first.runtime.place.agents["stray"] = first.agent("box")
    second = await start()
    assert list(second.runtime.place.agents) == ["box"]


async def test_a_lifetime_goes_on_across_a_restart(start: Start) -> None:
    first = await start()
    await first.call.ready(ttl_seconds=0.6)
    second = await start()
    reply = await second.call.until("/sandboxes/box", lambda reply: reply.status != 200)
    assert reply.expect(404)["reason"] == "ttl"


async def test_a_clean_stop_answers_who_waits_and_leaves_sandboxes_alone(start: Start) -> None:
    first = await start()
    first.runtime.gate.clear()
    (await first.call.post("/sandboxes", {"image": "x", "sandbox_id": "slow"})).expect()
    first.runtime.gate.set()
    await first.call.ready()
    (await first.call.post("/sandboxes/box/exec", {**SLOW, "wait": False})).expect()
    first.runtime.gate.clear()
    (await first.call.post("/sandboxes", {"image": "x", "sandbox_id": "never"})).expect()
    waits = [
        asyncio.create_task(first.call.get("/jobs/j/wait")),
        asyncio.create_task(first.call.get("/sandboxes/never/wait")),
        asyncio.create_task(first.call.post("/sandboxes/box/exec", SLOW)),
    ]
    await asyncio.sleep(0.05)
    await first.orchestrator.begin_stop()
    for wait in waits:
        assert (await wait).expect(503)["retryable"] is True
    assert (await first.call.get("/ready")).status == 503
    assert (await first.call.post("/sandboxes", {"image": "x"})).status == 503
    second = await start()
    assert (await second.call.get("/jobs/j/wait")).expect()["stdout"] == "x\n"
    assert (await second.call.get("/sandboxes/never/wait")).expect()["ready"]


async def test_an_agent_cannot_claim_the_job_of_another_sandbox(start: Start) -> None:
    first = await start()
    for name in ("box", "hostile"):
        await first.call.ready(name)
    body = {"command": "sleep 0.5; echo mine", "job_id": "j"}
    (await first.call.post("/sandboxes/box/exec", body)).expect()
    forged = AgentJob(
        "j", "x", internal=False, status="succeeded", exit_code=0, completed_at=1.0, stdout=b"forged"
    )
    forged.done.set()
    first.agent("hostile").jobs["j"] = forged
    second = await start()
    job = (await second.call.get("/jobs/j/wait")).expect()
    assert (job["sandbox_id"], job["stdout"]) == ("box", "mine\n")
