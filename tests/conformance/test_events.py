"""GET /events: who sees what, over real connections, through the SDK, and across restarts."""

from __future__ import annotations

import http.client
import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from orchard.env.client import AsyncSandboxClient, SandboxClient
from orchard.env.contract import EventType
from orchard.env.errors import Unauthorized
from tests.conformance.conftest import end_and_check
from tests.conformance.runtimes import RuntimeCase
from tests.support.keys import Tenant, write_keys_file
from tests.support.rest import Rest, new_id
from tests.support.service import Service
from tests.support.waiting import eventually

IMAGE = "host"
LIFE = ["created", "starting", "ready", "ended"]
ALICE, BOB, ROOT = Tenant("alice"), Tenant("bob"), Tenant("root", role="admin")


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    return write_keys_file(tmp_path / "keys.json", [ALICE, BOB, ROOT])


@pytest.fixture
def served(runtime: RuntimeCase, tmp_path: Path, keys_file: Path) -> Iterator[Service]:
    arguments = (*runtime.serve_arguments, "--keys-file", str(keys_file))
    service = Service(tmp_path / "state", arguments=arguments).start()
    yield service
    if not service.running:
        service.start()
    end_and_check(service, runtime)


class Stream:
    """The events of one connection."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.response = response

    def block(self) -> dict[str, str]:
        """The fields of the next event; a comment has the name ""."""
        fields: dict[str, str] = {}
        while line := self.response.readline().decode().rstrip("\n"):
            name, _, value = line.partition(": ")
            fields[name] = value
        return fields

    def event(self) -> Any:
        """The data of the next event, None when the stream has ended."""
        while True:
            fields = self.block()
            if "data" in fields:
                return json.loads(fields["data"])
            if not fields:
                return None

    def until(self, kind: str) -> list[Any]:
        found = [self.event()]
        while found[-1]["type"] != kind:
            found.append(self.event())
        return found


@contextmanager
def stream(rest: Rest, query: str = "", **headers: str) -> Iterator[Stream]:
    connection = rest.connect()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request("GET", f"/events{query}", headers={**rest.headers(), **named})
    response = connection.getresponse()
    assert response.status == 200, response.read()
    assert response.headers["Content-Type"].startswith("text/event-stream")
    try:
        yield Stream(response)
    finally:
        connection.close()


def types(events: list[Any]) -> list[str]:
    return [each["type"] for each in events]


def test_a_life_is_told_as_it_happens(rest: Rest) -> None:
    label = new_id("run")
    with stream(rest, f"?label=run={label}") as told:
        assert told.event()["type"] == "open"
        with rest.sandbox(IMAGE, labels={"run": label}) as box:
            assert types(told.until("ready")) == LIFE[:3]
            box.rest.patch(box.path, {"ttl_seconds": 600}).expect(200)
            assert told.event()["type"] == "changed"
        ended = told.event()
        assert (ended["type"], ended["reason"], ended["sandbox_id"]) == ("ended", "deleted", box.id)


def test_the_end_of_a_lifetime_is_told_with_that_reason(rest: Rest) -> None:
    label = new_id("run")
    with stream(rest, f"?label=run={label}") as told:
        rest.create(IMAGE, labels={"run": label}, ttl_seconds=1)
        assert told.until("ended")[-1]["reason"] == "ttl"


def test_an_interrupted_reader_goes_on_where_it_was(rest: Rest) -> None:
    label = new_id("run")
    with stream(rest, f"?label=run={label}") as told:
        last = told.event()["id"]
    rest.create(IMAGE, labels={"run": label}).delete()
    with stream(rest, f"?label=run={label}", Last_Event_ID=last) as told:
        assert types(told.until("ended")) == LIFE


def test_a_foreign_sandbox_is_never_told_of(served: Service) -> None:
    alice, bob = served.rest.with_key(ALICE.key), served.rest.with_key(BOB.key)
    with stream(bob) as told:
        told.event()
        alice.create(IMAGE).delete()
        with bob.sandbox(IMAGE) as his:
            assert {each["sandbox_id"] for each in told.until("ready")} == {his.id}


def test_an_admin_is_told_of_all(served: Service) -> None:
    with stream(served.rest.with_key(ROOT.key)) as told:
        told.event()
        served.rest.with_key(ALICE.key).create(IMAGE).delete()
        assert {each["owner"] for each in told.until("ended")} == {"alice"}


def test_without_a_key_nothing_is_told(rest: Rest) -> None:
    assert rest.with_key(None).get("/events").status == 401


def test_a_restart_is_a_gap(served: Service) -> None:
    with stream(served.rest) as told:
        last = told.event()["id"]
        served.stop()
        assert told.event() is None
    served.start()
    with stream(served.rest, Last_Event_ID=last) as told:
        assert told.event()["type"] == "gap"


def test_a_key_that_is_taken_away_reads_no_further(served: Service, keys_file: Path) -> None:
    with stream(served.rest.with_key(BOB.key)) as told:
        told.event()
        write_keys_file(keys_file, [ALICE, ROOT])
        served.process.send_signal(signal.SIGHUP)
        assert told.event() is None
    assert served.rest.with_key(BOB.key).get("/events").status == 401


def test_a_reader_that_does_not_read_holds_nobody(rest: Rest) -> None:
    with stream(rest):
        for _ in range(5):
            rest.create(IMAGE).delete()
        with stream(rest) as other:
            other.event()
            rest.create(IMAGE).delete()
            assert types(other.until("ended"))[-1] == "ended"


def test_open_readers_do_not_keep_the_service_from_stopping(served: Service) -> None:
    with stream(served.rest) as told:
        told.event()
        assert served.stop() == 0
        assert told.event() is None


async def test_the_sdk_iterates_over_events(service: Service) -> None:
    label = new_id("run")
    async with AsyncSandboxClient(service.base_url, service.api_key) as client:
        told = []
        async for event in client.events(labels={"run": label}):
            told.append(event)
            if event.type is EventType.OPEN:
                async with await client.create(IMAGE, labels={"run": label}):
                    pass
            if event.type is EventType.ENDED:
                break
    assert [event.type.value for event in told] == ["open", *LIFE]


def test_the_synchronous_sdk_does_the_same(service: Service) -> None:
    label = new_id("run")
    with SandboxClient(service.base_url, service.api_key) as client:
        told = []
        for event in client.events(labels={"run": label}):
            told.append(event.type.value)
            if told == ["open"]:
                client.create(IMAGE, labels={"run": label}).delete()
            if told[-1] == "ended":
                break
    assert told == ["open", *LIFE]


async def test_the_sdk_comes_back_after_a_restart_and_tells_of_the_gap(served: Service) -> None:
    async with AsyncSandboxClient(served.base_url, ROOT.key) as client:
        events = client.events()
        assert (await anext(events)).type is EventType.OPEN
        served.kill()
        served.start()
        assert (await anext(events)).type is EventType.GAP
        await (await client.create(IMAGE)).delete()
        assert (await anext(events)).type is EventType.CREATED


async def test_the_sdk_raises_a_refusal(service: Service) -> None:
    async with AsyncSandboxClient(service.base_url, "wrong") as client:
        with pytest.raises(Unauthorized):
            await anext(client.events())


def test_readers_are_counted(rest: Rest) -> None:
    def readers() -> float:
        text = rest.get("/metrics").body.decode()
        return float(text.split("\norchard_event_streams ")[1].split("\n")[0])

    before = readers()
    with stream(rest) as told:
        told.event()
        assert readers() == before + 1
    eventually(lambda: readers() == before, "the reader that left is forgotten")
