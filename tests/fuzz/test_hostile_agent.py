"""An agent in the hands of the code of its sandbox: whatever it answers, the calls of that sandbox end with an answer of
the contract or a typed error, the service lives, and other sandboxes notice nothing."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from orchard.env.agent.wire import FrameReader
from orchard.env.contract import FileListing, FileStat, Job, JobList, PatchResult, SessionList
from orchard.env.orchestrator.app import create_app
from orchard.env.orchestrator.settings import ServiceSettings
from orchard.env.orchestrator.stores.sqlite import SqliteStore
from orchard.env.runtimes.channel import AgentProtocolChannel
from tests.env.orchestrator.asgi import Caller, Reply
from tests.env.orchestrator.process_runtime import Place, ProcessRuntime
from tests.fuzz.frames import packed
from tests.fuzz.profile import examples

#: Far above what any of these calls takes, far below for ever.
ANSWER_WITHIN_S = 20.0
#: Bytes of one answer, from its request.
Answer = Callable[[dict[str, Any]], bytes]


class HostileRuntime(ProcessRuntime):
    """The sandbox "hostile" has an agent that answers as `answer` says, over the real protocol."""

    answer: Answer = staticmethod(lambda header: packed({"id": header["id"], "ok": True}))

    async def channel(self, sandbox_id: str) -> Any:
        if sandbox_id != "hostile":
            return await super().channel(sandbox_id)
        ours, theirs = socket.socketpair()
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: _Puppet(self), sock=theirs)
        _, channel = await loop.create_connection(lambda: AgentProtocolChannel("hostile"), sock=ours)
        return channel


class _Puppet(asyncio.Protocol):
    def __init__(self, runtime: HostileRuntime) -> None:
        self._runtime = runtime
        self._reader = FrameReader()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        for header, _ in self._reader.feed(data):
            answer = self._runtime.answer(header)
            self._transport.write(answer)
            if not answer:
                self._transport.close()


class World:
    """A service with a hostile sandbox and another one."""

    def __init__(self, runner: asyncio.Runner, folder: Path) -> None:
        self._runner = runner
        (folder / "sandboxes").mkdir()
        self.runtime = HostileRuntime(Place(folder / "sandboxes"))
        settings = ServiceSettings(state_dir=folder, api_keys=["admin-key"], agent_lost_after_s=0.5)
        self.app = create_app(settings, self.runtime, SqliteStore(folder / "db"))
        self.call = Caller(self.app)
        runner.run(self._start())

    async def _start(self) -> None:
        await self.app.state.orchestrator.start()
        await self.call.ready("hostile")
        await self.call.ready("other")

    def close(self) -> None:
        self._runner.run(self.app.state.orchestrator.stop())
        self._runner.run(self.runtime.place.end())

    def get(self, target: str) -> Reply:
        """The reply to any other request, from what is answered already."""

        async def exchange() -> Reply:
            async with asyncio.timeout(ANSWER_WITHIN_S):
                return await self.call.get(target)

        return self._runner.run(exchange())

    def ask(self, method: str, target: str, body: Any, answer: Answer) -> Reply:
        """The reply to a request about the hostile sandbox; the other one still works afterwards."""
        self.runtime.answer = answer

        async def exchange() -> Reply:
            async with asyncio.timeout(ANSWER_WITHIN_S):
                reply = await self.call(method, f"/sandboxes/hostile{target}", body)
                assert (await self.call.run("other", "echo fine"))["stdout"] == "fine\n"
                return reply

        return self._runner.run(exchange())


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with asyncio.Runner() as runner:
        made = World(runner, tmp_path_factory.mktemp("hostile"))
        yield made
        made.close()


CALLS: list[tuple[str, str, Any, type[BaseModel] | None]] = [
    ("POST", "/exec", {"command": "x", "wait": True}, Job),
    ("GET", "/jobs", None, JobList),
    ("GET", "/sessions", None, SessionList),
    ("GET", "/files?path=/f", None, None),
    ("GET", "/files/content?path=/f", None, None),
    ("GET", "/files/list?path=/", None, FileListing),
    ("GET", "/files/stat?path=/f", None, FileStat),
    ("GET", "/archive?path=/d", None, None),
    ("GET", "/files/watch?path=/d", None, None),
    ("POST", "/files", {"path": "/f", "content": "eA=="}, None),
    ("POST", "/files/mkdir", {"path": "/d"}, None),
    ("POST", "/apply_patch", {"patch": "x"}, PatchResult),
]

HONEST: dict[str, Any] = {
    "ok": True,
    "job": {"job_id": "j", "status": "succeeded", "created_at": 1.0, "completed_at": 2.0, "exit_code": 0},
    "jobs": [{"job_id": "j", "command": "x", "status": "running", "created_at": 1.0}],
    "finished": True,
    "sessions": [{"name": "s", "created_at": 1.0, "used_at": 1.0, "busy": False}],
    "size": 1,
    "mode": 420,
    "eof": True,
    "identity": "1",
    "path": "/",
    "files": [{"name": "f", "type": "file", "size": 1, "modified": 1.0, "modified_ns": 1}],
    "type": "file",
    "modified": 1.0,
    "modified_ns": 1,
    "watch": 1,
    "more": False,
    "ended": True,
    "changes": [{"type": "created", "path": "/f"}],
    "stdout_offset": 0,
    "stdout_size": 0,
    "stdout_total": 0,
}
WRONG = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([-1, 2**70, 1e308, float("inf"), float("nan")]),
    st.text(max_size=8),
    st.sampled_from(["../../x", "created\ndata: forged", "\ud800"]),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=8), st.integers(), max_size=2),
)


@st.composite
def headers(draw: st.DrawFn) -> dict[str, Any]:
    """An honest answer with some of it gone or of another kind, at any depth."""
    header = json.loads(json.dumps(HONEST))
    for _ in range(draw(st.integers(1, 3))):
        place: Any = header
        while True:
            name = draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
            if not (isinstance(place[name], dict | list) and place[name] and draw(st.booleans())):
                break
            place = place[name]
        if isinstance(place, dict) and draw(st.booleans()):
            del place[name]
        else:
            place[name] = draw(WRONG)
        if not header:
            break
    if draw(st.integers(0, 4)) == 0:
        fields = {
            "code": WRONG | st.sampled_from(["unauthorized", "sandbox_deleted", "conflict"]),
            "detail": WRONG,
            "retry_after_s": WRONG,
            "self": WRONG,
        }
        header["error"] = draw(st.fixed_dictionaries({}, optional=fields) | WRONG)
    return header


@pytest.mark.parametrize("call", CALLS, ids=[f"{call[0]} {call[1]}" for call in CALLS])
def test_wrong_answers_fail_their_call_alone(
    world: World, call: tuple[str, str, Any, type[BaseModel] | None]
) -> None:
    method, target, body, model = call

    @examples(60)
    @given(header=headers(), payload=st.binary(max_size=5))
    def attempt(header: dict[str, Any], payload: bytes) -> None:
        reply = world.ask(method, target, body, lambda asked: packed({**header, "id": asked["id"]}, payload))
        _in_order(reply, model)

    attempt()


FRAMED = st.builds(lambda head: struct.pack(">II", len(head), 0) + head, st.binary(max_size=40))


# Each takes the two seconds in which the service would learn of the sandbox's end.
@examples(3)
@given(data=st.binary(min_size=1, max_size=80) | FRAMED)
def test_bytes_that_are_no_answer_end_the_connection_and_the_call(world: World, data: bytes) -> None:
    # What follows cannot be meant as the rest of what came: it is longer than any frame.
    reply = world.ask("GET", "/sessions", None, lambda _asked: data + b"\xff" * 64)
    assert (reply.status, reply.json["code"]) == (503, "agent_unreachable")


def test_answers_to_what_nobody_asked_are_passed_over(world: World) -> None:
    strange = [[], {}, "1", None, True, -1, 2**40, 1.0]

    def answer(asked: dict[str, Any]) -> bytes:
        others = b"".join(packed({"id": number, "sessions": "forged"}) for number in strange)
        return others + packed({"id": asked["id"], "sessions": []})

    assert world.ask("GET", "/sessions", None, answer).expect() == {"sessions": []}


def test_a_command_that_was_accepted_fails_when_its_agent_breaks_the_protocol(world: World) -> None:
    running = {"job": {"status": "running", "created_at": 1.0}}

    def answer(asked: dict[str, Any]) -> bytes:
        told = running if asked["op"] == "exec" else {"job": {"status": "succeeded", "created_at": "then"}}
        return packed({"id": asked["id"], **told})

    job_id = world.ask("POST", "/exec", {"command": "x"}, answer).expect()["job_id"]
    job = world.get(f"/jobs/{job_id}/wait").expect()
    assert (job["status"], job["error_code"], job["infra"]) == ("failed", "agent_faulty", True)


def test_a_patch_needs_no_more_of_its_job_than_the_protocol_promises(world: World) -> None:
    job = {"status": "succeeded", "created_at": 1.0}
    reply = world.ask(
        "POST", "/apply_patch", {"patch": "x"}, lambda asked: packed({"id": asked["id"], "job": job})
    )
    assert reply.expect()["success"] is False


@pytest.mark.parametrize(
    "wrong",
    [{"stdout_offset": 0}, {"stdout_size": 5}, {"stderr_size": -1}, {"stdout_total": None}, {"finished": 1}],
    ids=str,
)
def test_a_stream_ends_with_the_error_where_its_agent_tells_bytes_twice_or_not_at_all(
    world: World, wrong: dict[str, Any]
) -> None:
    told: dict[str, Any] = {"finished": False}
    for name in ("stdout", "stderr"):
        told.update({f"{name}_offset": 9, f"{name}_size": 1, f"{name}_total": 10})

    def answer(asked: dict[str, Any]) -> bytes:
        if asked["op"] == "output":
            return packed({"id": asked["id"], **told, **wrong}, b"ab")
        if asked["op"] == "job":  # it goes on for as long as this is not answered
            return packed({"id": -1})
        return packed({"id": asked["id"], "job": {"status": "running", "created_at": 1.0}})

    job_id = world.ask("POST", "/exec", {"command": "x"}, answer).expect()["job_id"]
    stream = world.get(f"/jobs/{job_id}/stream?stdout_offset=9&stderr_offset=9")
    assert b"event: error" in stream.body and b"agent_faulty" in stream.body


def test_an_agent_that_hangs_up_on_every_question_ends_its_command(world: World) -> None:
    """Connections to it succeed, so only their number tells that it is lost."""
    world.runtime.answer = lambda _asked: b""
    reply = world.ask("POST", "/exec", {"command": "x", "wait": True}, lambda _asked: b"")
    job = reply.expect()
    assert (job["status"], job["infra"]) == ("failed", True)


def _in_order(reply: Reply, model: type[BaseModel] | None) -> None:
    """What the contract has, or a typed error with what it needs."""
    if reply.status >= 400:
        assert reply.status not in (401, 403, 500), reply.body
        assert {"detail", "code", "retryable", "infra", "request_id"} <= reply.json.keys()
        assert reply.status != 503 or "retry-after" in reply.headers
    elif model is not None:
        model.model_validate(_strict_json(reply.body))
    elif reply.headers["content-type"].startswith("text/event-stream"):
        for line in reply.body.decode("utf-8", "surrogatepass").split("\n"):
            assert not line or line.startswith((":", "event: ", "data: {", "id: ", "retry: ")), line


def _strict_json(body: bytes) -> Any:
    """JSON as every client can read it: without NaN and Infinity."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(body, parse_constant=refuse)
