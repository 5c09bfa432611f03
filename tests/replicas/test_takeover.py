"""A service that dies or stops: the others take its sandboxes and commands over, and who waits notices little.

One death in the middle of everything is shared by the tests that look at different things that went on.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.conformance.runtimes import RuntimeCase
from tests.conformance.test_events import Stream
from tests.conformance.test_events import stream as event_stream
from tests.conformance.test_pty import Pty
from tests.conformance.test_streams import events
from tests.support.replicas import Replicas
from tests.support.rest import Box, Rest, new_id

IMAGE = "host"
#: Of an upload.
HALF = 4 << 20
#: Files that let the commands below go on, once the service is dead.
GO = "while ! test -e /tmp/go; do sleep 0.05; done"


@dataclass
class Death:
    """What went on at the service A when it was killed, mostly asked for at B."""

    replicas: Replicas
    box: Box
    known: dict[str, Any] = field(default_factory=dict)
    asked: dict[str, Future[Any]] = field(default_factory=dict)

    @property
    def rest(self) -> Rest:
        return self.replicas.services[1].rest

    @property
    def at_b(self) -> Box:
        return Box(self.rest, self.box.id)


def _begin(death: Death, stack: ExitStack) -> None:
    box, at_b, rest, known = death.box, death.at_b, death.rest, death.known
    pool = stack.enter_context(ThreadPoolExecutor(8))

    def ask(name: str, work: Callable[..., Any], *arguments: Any) -> None:
        death.asked[name] = pool.submit(work, *arguments)

    known["agent"] = box.agent_start()
    known["finished"] = box.run("echo early")
    known["waited for"] = box.running(f"{GO}; echo late", concurrent=True)
    ask("waited for", rest.wait_job, known["waited for"])
    command = f"echo x >> /tmp/once; touch /tmp/begun; {GO}; wc -l < /tmp/once"
    ask("run", lambda: at_b.run(command, concurrent=True))
    box.until("test -e /tmp/begun")
    known["streamed"] = box.running(f"echo one; {GO}; echo two", concurrent=True)
    told = events(rest, known["streamed"])
    assert next(told).bytes == b"one\n"
    ask("streamed", lambda: list(told))
    stream: Stream = stack.enter_context(event_stream(rest))
    assert stream.event()["type"] == "open"
    ask("events", stream.until, "gap")
    known["terminal"] = stack.enter_context(closing(Pty(rest, box.id))).start(
        "sh", "-c", "echo hi; exec sleep 60"
    )
    known["terminal"].until(b"hi")
    known["named"] = {"image": IMAGE, "sandbox_id": new_id()}
    box.rest.post("/sandboxes", known["named"]).expect(200)
    known["upload"] = connection = rest.connect()
    connection.putrequest("PUT", f"{box.path}/files/content?path=/tmp/half")
    for name, value in {**rest.headers(), "Content-Length": str(2 * HALF)}.items():
        connection.putheader(name, value)
    connection.endheaders(b"x" * HALF)
    # Its first half has arrived.
    box.until("ls -a /tmp | grep -q half.orchard")


@pytest.fixture(scope="module")
def death(runtime: RuntimeCase, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Death]:
    replicas = Replicas(tmp_path_factory.mktemp("takeover") / "state", runtime)
    with ExitStack() as stack:
        stack.callback(replicas.end_and_check)
        replicas.start()
        death = Death(replicas, replicas.services[0].rest.create(IMAGE))
        _begin(death, stack)
        replicas.services[0].kill()
        death.at_b.write("/tmp/go", b"")
        yield death


def test_the_sandbox_lives_on(death: Death) -> None:
    assert death.at_b.agent_start() == death.known["agent"]


def test_a_result_from_before_is_there(death: Death) -> None:
    assert death.rest.job(death.known["finished"]["job_id"]) == death.known["finished"]


def test_who_waits_for_a_command_gets_its_result(death: Death) -> None:
    assert death.asked["waited for"].result(60)["stdout"] == "late\n"


def test_a_command_in_the_middle_ran_once_and_its_caller_has_the_result(death: Death) -> None:
    assert death.asked["run"].result(60)["stdout"] == "1\n"


def test_a_stream_breaks_off_and_goes_on_where_it_was(death: Death) -> None:
    try:
        rest_of_it = death.asked["streamed"].result(60)
    except Exception:
        rest_of_it = []
    assert "exit" not in [event.name for event in rest_of_it]
    told = list(events(death.rest, death.known["streamed"], stdout_offset=4))
    assert (told[0].name, told[0].bytes) == ("stdout", b"two\n")
    assert told[-1].data["job"]["stdout"] == "one\ntwo\n"


def test_events_tell_of_the_gap(death: Death) -> None:
    assert death.asked["events"].result(60)[-1]["type"] == "gap"


def test_a_terminal_is_told_to_come_again_and_goes_on(death: Death) -> None:
    terminal: Pty = death.known["terminal"]
    assert terminal.closed() == 1012
    pty_id = terminal.ready["pty_id"]
    with closing(Pty(death.rest, death.box.id, pty_id=pty_id, takeover=1)) as again:
        assert again.receive()["pty_id"] == pty_id
        again.until(b"hi")


def test_what_may_or_may_not_have_been_done_is_told_as_such(death: Death) -> None:
    connection = death.known["upload"]
    connection.send(b"x" * HALF)
    answer = connection.getresponse()
    body = json.loads(answer.read())
    assert (answer.status, body["code"], body["retryable"]) == (503, "infrastructure_error", False)
    assert death.at_b.run("test -e /tmp/half", concurrent=True)["exit_code"] == 1


def test_an_id_of_the_dead_service_stays_taken(death: Death) -> None:
    named = death.known["named"]
    assert death.rest.post("/sandboxes", {**named, "pids": 9}).code == "conflict"
    assert death.rest.post("/sandboxes", named).expect(200)["sandbox_id"] == named["sandbox_id"]


def test_the_list_is_whole(death: Death) -> None:
    listed = death.rest.get("/sandboxes").expect(200)["sandboxes"]
    assert {each["sandbox_id"] for each in listed} == {death.box.id, death.known["named"]["sandbox_id"]}


def test_a_service_that_comes_back_takes_part_again(death: Death) -> None:
    back = death.replicas.services[0]
    if not back.running:
        back.start()
    assert Box(back.rest, death.box.id).out("echo there") == "there\n"
    with back.rest.sandbox(IMAGE) as box:
        assert Box(death.rest, box.id).out("echo here") == "here\n"


def test_a_second_death_is_survived_as_the_first_was(death: Death) -> None:
    back, other = death.replicas.services
    if not back.running:
        back.start()
    job_id = death.at_b.running("sleep 1; echo again", concurrent=True)
    other.kill()
    assert back.rest.wait_job(job_id)["stdout"] == "again\n"
    other.start()
    assert death.at_b.agent_start() == death.known["agent"]


# -- other ends


def test_a_service_that_stops_hands_over_and_who_waits_is_not_told(pair: Replicas) -> None:
    leaving, staying = pair.services
    box = leaving.rest.create(IMAGE)
    job_id = box.running(f"{GO}; echo done")
    with ThreadPoolExecutor() as pool:
        waits = pool.submit(staying.rest.wait_job, job_id)
        # A wait that has begun is one of the requests that the stopping service has to answer.
        at_staying = Box(staying.rest, box.id)
        runs = pool.submit(at_staying.run, f"touch /tmp/begun; {GO}; echo ran", concurrent=True)
        box.until("test -e /tmp/begun")
        assert leaving.stop() == 0
        at_staying.write("/tmp/go", b"")
        assert (waits.result(60)["stdout"], runs.result(60)["stdout"]) == ("done\n", "ran\n")


def test_all_killed_and_started_again_lose_nothing(pair: Replicas) -> None:
    boxes = [service.rest.create(IMAGE) for service in pair.services]
    agents = [box.agent_start() for box in boxes]
    jobs = [box.running("sleep 1; echo done", concurrent=True) for box in boxes]
    for service in pair.services:
        service.kill()
    for service in pair.services:
        service.start()
    for service in reversed(pair.services):
        assert [service.rest.wait_job(job_id)["stdout"] for job_id in jobs] == ["done\n"] * 2
        assert [Box(service.rest, box.id).agent_start() for box in boxes] == agents


def test_many_commands_through_a_death_run_once_each(pair: Replicas) -> None:
    dying, other = pair.services
    box = dying.rest.create(IMAGE)
    at_other = Box(other.rest, box.id)
    started = threading.Semaphore(0)

    def run(number: int) -> str:
        started.release()
        return str(at_other.run(f"echo {number} >> /tmp/all; echo {number}", concurrent=True)["stdout"])

    with ThreadPoolExecutor(8) as pool:
        results = [pool.submit(run, number) for number in range(60)]
        for _ in range(20):
            started.acquire()
        dying.kill()
        assert [future.result(60) for future in results] == [f"{number}\n" for number in range(60)]
    written = at_other.out("sort -n /tmp/all").split()
    assert written == [str(number) for number in range(60)]
