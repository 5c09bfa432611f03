"""GET /jobs/{id}/stream: a command's output as it is written, from any offset on."""

from __future__ import annotations

import base64
import http.client
import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import pytest

from tests.conformance.conftest import NewBox
from tests.support.rest import Box, Rest
from tests.support.service import Service
from tests.support.waiting import Stopwatch, eventually

MIB = 1 << 20


@dataclass(frozen=True)
class Event:
    name: str
    data: dict[str, Any]
    id: str | None = None

    @property
    def bytes(self) -> bytes:
        return base64.b64decode(self.data["data"])


def response(
    rest: Rest, job_id: str, headers: dict[str, str] | None = None, **query: Any
) -> http.client.HTTPResponse:
    connection = rest.connect()
    target = f"/jobs/{job_id}/stream?" + "&".join(f"{name}={value}" for name, value in query.items())
    connection.request("GET", target, headers={**rest.headers(), **(headers or {})})
    return connection.getresponse()


def events(rest: Rest, job_id: str, headers: dict[str, str] | None = None, **query: Any) -> Iterator[Event]:
    """Without keepalives, until the stream ends."""
    with closing(response(rest, job_id, headers, **query)) as answer:
        assert (answer.status, answer.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        fields: dict[str, str] = {}
        while line := answer.readline():
            name, _, value = line.decode().rstrip("\n").partition(": ")
            if name:
                fields[name] = value
            elif "event" in fields and fields["event"] != "keepalive":
                yield Event(fields["event"], json.loads(fields["data"]), fields.get("id"))
                fields = {}
            else:
                fields = {}


def written(found: list[Event], stream: str) -> bytes:
    """The bytes of a stream, checked to be without hole or overlap."""
    data = b""
    for event in found:
        if event.name == stream:
            assert event.data["offset"] == len(data)
            data += event.bytes
    return data


@pytest.mark.unprivileged
def test_both_streams_come_whole_and_then_the_job(box: Box) -> None:
    job_id = box.start("echo out; echo err >&2; echo more; exit 3")
    found = list(events(box.rest, job_id))
    assert (written(found, "stdout"), written(found, "stderr")) == (b"out\nmore\n", b"err\n")
    assert (found[-1].name, found[-1].data["job"]) == ("exit", box.rest.job(job_id))
    assert found[-1].data["job"]["exit_code"] == 3


@pytest.mark.unprivileged
def test_output_comes_while_the_command_runs(box: Box) -> None:
    job_id = box.start("echo a; while [ ! -e /tmp/go ]; do sleep 0.05; done; echo b", concurrent=True)
    stream = events(box.rest, job_id)
    assert next(stream).bytes == b"a\n"
    box.out("touch /tmp/go", concurrent=True)
    assert next(stream).bytes == b"b\n"
    assert next(stream).name == "exit"


def test_a_finished_command_can_be_streamed_as_well(box: Box) -> None:
    job = box.run("echo done; head -c 3000000 /dev/zero | tr '\\0' x")
    assert job["stdout_truncated"]
    assert written(list(events(box.rest, job["job_id"])), "stdout") == b"done\n" + b"x" * 3_000_000


def test_a_stream_begins_at_the_offsets_that_are_asked_for(box: Box) -> None:
    job_id = box.run("printf 0123456789; printf abcdef >&2")["job_id"]
    found = list(events(box.rest, job_id, stdout_offset=4, stderr_offset=6))
    assert [(e.name, e.data["offset"], e.bytes) for e in found[:-1]] == [("stdout", 4, b"456789")]


def test_the_id_of_an_event_says_where_to_go_on(box: Box) -> None:
    job_id = box.start(
        "printf 0123; printf ab >&2; while [ ! -e /tmp/on ]; do sleep 0.05; done; printf 456", concurrent=True
    )
    stream = events(box.rest, job_id)
    seen = [next(stream), next(stream)]
    stream.close()
    box.out("touch /tmp/on", concurrent=True)
    rest = list(events(box.rest, job_id, {"Last-Event-ID": str(seen[-1].id)}))
    assert [(e.name, e.data["offset"], e.bytes) for e in rest[:-1]] == [("stdout", 4, b"456")]


def test_bytes_are_not_changed(box: Box) -> None:
    job_id = box.run(r"printf '\377\376\000\303'; sleep 0.1; printf '\244'")["job_id"]
    assert written(list(events(box.rest, job_id)), "stdout") == b"\xff\xfe\x00\xc3\xa4"


@pytest.mark.unprivileged
def test_what_the_spool_no_longer_holds_is_one_gap(box: Box) -> None:
    command = "head -c 3000000 /dev/zero | tr '\\0' a; printf end"
    job = box.run(command, max_spool_bytes=MIB, max_output_bytes=1000)
    found = list(events(box.rest, job["job_id"]))
    gaps = [event.data for event in found if event.name == "gap"]
    assert gaps == [{"stream": "stdout", "from": 500, "to": 3_000_003 - MIB}]
    data = b"".join(event.bytes for event in found if event.name == "stdout")
    assert data == b"a" * 500 + b"a" * (MIB - 3) + b"end"


def test_raw_gives_the_plain_bytes_of_one_stream(box: Box) -> None:
    job_id = box.start(r"printf '\377\376'; sleep 0.3; echo not-this >&2; printf end", concurrent=True)
    with closing(response(box.rest, job_id, raw="stdout")) as answer:
        assert answer.headers["content-type"] == "application/octet-stream"
        assert answer.headers["x-orchard-offset"] == "0"
        assert answer.read() == b"\xff\xfeend"


def test_raw_begins_where_it_is_asked_to_or_with_what_is_still_kept(box: Box) -> None:
    job = box.run("head -c 2000000 /dev/zero", max_spool_bytes=MIB, max_output_bytes=0)
    for asked, begins in ((0, 2_000_000 - MIB), (1_999_990, 1_999_990)):
        with closing(response(box.rest, job["job_id"], raw="stdout", stdout_offset=asked)) as answer:
            assert answer.headers["x-orchard-offset"] == str(begins)
            assert len(answer.read()) == 2_000_000 - begins


def test_a_reader_that_stops_reading_does_not_hold_the_command_up(new_box: NewBox) -> None:
    """Two gigabytes: neither the command waits for the reader, nor does memory grow with what it has not read."""
    box = new_box()
    job_id = box.start("head -c 2G /dev/zero; echo end >&2", concurrent=True)
    with closing(response(box.rest, job_id, raw="stdout")) as answer:
        assert answer.read(1000) == bytes(1000)
        assert box.rest.wait_job(job_id, 120)["stdout_bytes"] == 2 << 30
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            while answer.read(MIB):
                pass
    assert written(list(events(box.rest, job_id, stdout_offset=2 << 30)), "stderr") == b"end\n"


def test_a_command_without_output_keeps_its_stream_alive(box: Box) -> None:
    job_id = box.start("sleep 13", concurrent=True)
    with closing(response(box.rest, job_id)) as answer:
        assert b"event: keepalive" in answer.read()


@pytest.mark.unprivileged
def test_the_end_of_the_sandbox_ends_the_stream(new_box: NewBox) -> None:
    box = new_box()
    job_id = box.start("echo kept; sleep 600")
    stream = events(box.rest, job_id)
    assert next(stream).bytes == b"kept\n"
    box.delete()
    last = list(stream)[-1]
    assert (last.name, last.data["job"]["status"], last.data["job"]["error_code"]) == (
        "exit", "failed", "sandbox_deleted",
    )  # fmt: skip


def test_short_output_outlives_its_sandbox(new_box: NewBox) -> None:
    box = new_box()
    job_id = box.run("echo kept")["job_id"]
    box.delete()
    assert written(list(events(box.rest, job_id)), "stdout") == b"kept\n"


def test_an_unknown_job_has_no_stream(rest: Rest) -> None:
    answer = rest.get("/jobs/no-such-job/stream")
    assert (answer.status, answer.code) == (404, "job_not_found")


@pytest.mark.parametrize(
    "query", [{"stdout_offset": -1}, {"stderr_offset": "x"}, {"raw": "both"}, {"stdout_offset": 1.5}]
)
def test_a_wrong_query_is_refused(box: Box, query: dict[str, object]) -> None:
    job_id = box.run("true")["job_id"]
    answer = box.rest.get(f"/jobs/{job_id}/stream", **query)
    assert (answer.status, answer.code) == (422, "invalid_request")


def test_a_stream_goes_on_after_the_service_was_killed(own_service: Callable[..., Service]) -> None:
    service = own_service()
    box = service.rest.create("host")
    job_id = box.start("for i in $(seq 40); do echo $i; sleep 0.1; done", background=True)
    found: list[Event] = []
    for event in events(service.rest, job_id):
        found.append(event)
        if len(found) == 5:
            break
    os.kill(service.pid, signal.SIGKILL)
    service.kill()
    service.start()
    offset = len(written(found, "stdout"))
    rest = eventually(
        lambda: list(events(service.rest, job_id, stdout_offset=offset)), "the stream goes on", 30
    )
    data = written(found, "stdout") + b"".join(e.bytes for e in rest if e.name == "stdout")
    assert data == b"".join(b"%d\n" % i for i in range(1, 41))


def test_a_reader_that_goes_away_is_let_go(box: Box) -> None:
    job_id = box.start("while :; do echo x; sleep 0.01; done", background=True)
    for _ in range(20):
        stream = events(box.rest, job_id)
        next(stream)
        stream.close()
    watch = Stopwatch()
    box.rest.delete(f"/jobs/{job_id}").expect(200)
    assert watch.seconds < 20
