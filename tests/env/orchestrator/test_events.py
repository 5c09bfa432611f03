"""The event log: order, who sees what, going on after an id, gaps, readers that are slow."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from orchard.env.contract import EndReason
from orchard.env.errors import Overloaded
from orchard.env.orchestrator import events as module
from orchard.env.orchestrator.auth import Principal, Role
from orchard.env.orchestrator.events import EventLog, Reader
from orchard.env.orchestrator.responses import events
from orchard.env.orchestrator.routes import events as route
from orchard.env.runtimes.base import Postmortem, StartFailed
from tests.env.orchestrator.conftest import Running

ADMIN = Principal("default", Role.ADMIN)


def reader(running: Running, principal: Principal = ADMIN, after: str | None = None, **labels: str) -> Reader:
    return running.orchestrator.events.reader(principal, labels, after)


def parsed(text: bytes) -> list[dict[str, Any]]:
    blocks = [block.split("\n") for block in text.decode().split("\n\n") if block]
    found = [json.loads(lines[2].removeprefix("data: ")) for lines in blocks]
    assert [lines[:2] for lines in blocks] == [
        [f"id: {each['id']}", f"event: {each['type']}"] for each in found
    ]
    return found


async def read(source: Reader) -> list[dict[str, Any]]:
    """All that there is to read now."""
    found = []
    while text := await source.next(0.05):
        found += parsed(text)
    return found


def types(found: list[dict[str, Any]]) -> list[str]:
    return [each["type"] for each in found]


async def test_a_life_is_told_in_order(running: Running) -> None:
    source = reader(running)
    await running.call.ready("box", labels={"a": "b"}, cpu="1")
    (await running.call("PATCH", "/sandboxes/box", {"ttl_seconds": 60})).expect()
    (await running.call.delete("/sandboxes/box")).expect()
    opened, *told = await read(source)
    assert opened["type"] == "open"
    assert types(told) == ["created", "starting", "ready", "changed", "ended"]
    assert [each["status"] for each in told] == ["pending", "pending", "ready", "ready", "deleted"]
    assert {(each["sandbox_id"], each["owner"], each["image"], each["cpu"]) for each in told} == {
        ("box", "default", "x", "1")
    }
    assert told[-1]["reason"] == "deleted"


async def test_a_death_is_told_with_its_reason(running: Running) -> None:
    await running.call.ready()
    source = reader(running)
    running.runtime.die("box", Postmortem(EndReason.OOM, "out of memory"))
    (await running.call.delete("/sandboxes/box")).expect()
    (ended,) = (await read(source))[1:]
    assert (ended["type"], ended["reason"], ended["message"]) == ("ended", "oom", "out of memory")


async def test_a_failed_start_is_an_end(running: Running) -> None:
    running.runtime.failures = [StartFailed(EndReason.IMAGE_NOT_FOUND, "no image x")]
    source = reader(running)
    (await running.call.post("/sandboxes", {"image": "x", "sandbox_id": "bad"})).expect()
    (await running.call.get("/sandboxes/bad/wait")).expect()
    (await running.call.delete("/sandboxes/bad")).expect()
    told = await read(source)
    assert types(told) == ["open", "created", "starting", "ended"]
    assert told[-1]["reason"] == "image_not_found"


async def test_owners_see_their_own_and_admins_all(running: Running) -> None:
    hers, his, everything = (
        reader(running, principal) for principal in (Principal("alice"), Principal("bob"), ADMIN)
    )
    await running.caller("alice").ready("hers")
    assert {each.get("sandbox_id") for each in await read(hers)} == {None, "hers"}
    assert types(await read(his)) == ["open"]
    assert {each.get("sandbox_id") for each in await read(everything)} == {None, "hers"}


async def test_labels_choose(running: Running) -> None:
    source = reader(running, run="1")
    await running.call.ready("one", labels={"run": "1", "more": "x"})
    await running.call.ready("two", labels={"run": "2"})
    assert {each["sandbox_id"] for each in (await read(source))[1:]} == {"one"}


async def test_losing_the_label_is_the_last_that_is_told(running: Running) -> None:
    source = reader(running, run="1")
    await running.call.ready("one", labels={"run": "1"})
    (await running.call("PATCH", "/sandboxes/one", {"labels": {"run": "2"}})).expect()
    (await running.call("PATCH", "/sandboxes/one", {"labels": {"run": "3"}})).expect()
    told = await read(source)
    assert types(told)[-2:] == ["ready", "changed"]
    assert told[-1]["labels"] == {"run": "2"}


async def test_a_reader_goes_on_after_the_id_it_has_seen(running: Running) -> None:
    first = reader(running)
    await running.call.ready("one")
    seen = (await read(first))[1:]
    await running.call.ready("two")
    again = await read(reader(running, after=seen[1]["id"]))
    assert [each["id"] for each in again[:1]] == [seen[2]["id"]]
    assert types(again) == ["ready", "created", "starting", "ready"]


async def test_going_on_from_the_opening_loses_nothing(running: Running) -> None:
    (opened,) = await read(reader(running))
    await running.call.ready()
    assert types(await read(reader(running, after=opened["id"]))) == ["created", "starting", "ready"]


@pytest.mark.parametrize(
    "after", ["00000000-1", "nonsense", "-", "{run}-999", "{run}-", "{run}-٣", "{run}--1"]
)
async def test_an_id_that_this_run_does_not_know_is_a_gap(running: Running, after: str) -> None:
    await running.call.ready()
    run = running.orchestrator.events._run
    assert types(await read(reader(running, after=after.format(run=run)))) == ["gap"]


async def test_what_was_pushed_out_is_a_gap_and_then_it_goes_on(running: Running) -> None:
    log = running.orchestrator.events = running.orchestrator.lifecycle._events = EventLog(
        running.orchestrator.metrics, kept=4
    )
    source = log.reader(ADMIN, {}, None)
    opened = parsed(await source.next(1))[0]
    for name in ("one", "two"):
        await running.call.ready(name)
    assert types(await read(source)) == ["gap"]
    assert types(await read(log.reader(ADMIN, {}, opened["id"]))) == ["gap"]
    (await running.call.delete("/sandboxes/one")).expect()
    assert types(await read(source)) == ["ended"]


async def test_what_waits_is_woken(running: Running) -> None:
    source = reader(running)
    await source.next(1)
    waiting = asyncio.create_task(source.next(30))
    await running.call.ready()
    assert types(parsed(await waiting))[0] == "created"


async def test_a_restart_tells_of_what_ended_meanwhile(start: Any) -> None:
    running = await start()
    await running.call.ready()
    running.runtime.place.agents.pop("box").kill()
    again = await start()
    before = f"{again.orchestrator.events._run}-0"
    assert types(await read(reader(again, after=before))) == ["ended"]


async def test_stopping_ends_streams_and_takes_no_more(running: Running) -> None:
    waiting = asyncio.create_task(running.call.get("/events"))
    while not running.orchestrator.events._readers:  # noqa: ASYNC110 - in the same loop
        await asyncio.sleep(0)
    await running.orchestrator.begin_stop()
    reply = await waiting
    assert reply.status == 200
    assert reply.headers["content-type"].startswith("text/event-stream")
    with pytest.raises(Overloaded):
        reader(running)


async def test_one_reader_too_many_is_told_to_come_later(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MAX_READERS", 1)
    first = reader(running)
    assert (await running.call.get("/events")).expect(503)["retryable"] is True
    first.close()
    reader(running).close()


async def test_a_client_that_leaves_is_forgotten(running: Running) -> None:
    hang_up = asyncio.Event()
    hang_up.set()
    await running.call.get("/events", hang_up=hang_up)
    assert "orchard_event_streams 0.0" in (await running.call.get("/metrics")).body.decode()


async def test_a_reader_that_takes_nothing_is_dropped_and_counted(
    running: Running,
) -> None:
    texts = route._texts(lambda: reader(running))
    answer = events(texts, 0.1, running.orchestrator.metrics.event_streams_dropped.inc)

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    async def receive() -> Any:
        await asyncio.Event().wait()

    async with asyncio.timeout(10):
        await answer({"type": "http"}, receive, send)
    text = (await running.call.get("/metrics")).body.decode()
    assert "orchard_event_streams_dropped_total 1.0" in text
    assert "orchard_event_streams 0.0" in text


async def test_silence_is_filled_with_comments(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(route, "KEEPALIVE_S", 0.02)
    hang_up = asyncio.Event()
    asyncio.get_running_loop().call_later(0.5, hang_up.set)
    reply = await running.call.get("/events", hang_up=hang_up)
    assert b"\n\n: keepalive\n\n" in reply.body


@pytest.mark.parametrize("target", ["/events?label=x", "/events?label=a=1&label=a=2"])
async def test_a_malformed_filter_is_refused(running: Running, target: str) -> None:
    assert (await running.call.get(target)).expect(422)["code"] == "invalid_request"


async def test_the_time_of_a_stream_is_no_request_time(running: Running) -> None:
    hang_up = asyncio.Event()
    asyncio.get_running_loop().call_later(1.0, hang_up.set)
    await running.call.get("/events", hang_up=hang_up)
    text = (await running.call.get("/metrics")).body.decode()
    assert 'orchard_http_request_seconds_bucket{le="0.5",method="GET",route="/events"} 1.0' in text
