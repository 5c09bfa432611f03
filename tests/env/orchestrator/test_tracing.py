"""Traces: what spans there are, whose children they are, what is not in them, and a service without them."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from orchard.env.contract import EndReason
from orchard.env.errors import SettingsError
from orchard.env.orchestrator.settings import ServiceSettings
from orchard.env.runtimes.base import StartFailed
from tests.env.orchestrator.conftest import KEYS, Running, Start
from tests.support.otlp import Receiver, Span, receiving

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CREATE = "POST /sandboxes"
EXEC = "POST /sandboxes/{sandbox_id}/exec"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as running:
        yield running


@pytest.fixture
async def running(start: Start, receiver: Receiver) -> Running:
    return await start(otel_endpoint=receiver.endpoint)


def only(receiver: Receiver, name: str) -> Span:
    (span,) = receiver.named(name)
    return span


async def test_a_request_is_a_span_with_its_route_and_outcome(running: Running, receiver: Receiver) -> None:
    (await running.caller("alice").get("/sandboxes/none")).expect(404)
    await running.orchestrator.stop()
    assert [path for path, _ in receiver.requests] == ["/v1/traces"]
    span = only(receiver, "GET /sandboxes/{sandbox_id}")
    assert span.service == "orchard"
    assert span.attributes.pop("orchard.request_id")
    assert span.attributes == {
        "http.request.method": "GET", "http.route": "/sandboxes/{sandbox_id}", "http.response.status_code": 404,
        "orchard.owner": "alice", "orchard.sandbox_id": "none",
    }  # fmt: skip


async def test_a_creation_has_its_queue_and_its_start(running: Running, receiver: Receiver) -> None:
    await running.call.ready("box")
    await running.orchestrator.stop()
    request, queue, began = (only(receiver, name) for name in (CREATE, "sandbox.queue", "sandbox.start"))
    assert {(span.trace_id, span.parent_id) for span in (queue, began)} == {
        (request.trace_id, request.span_id)
    }
    assert queue.began_ns <= queue.ended_ns == began.began_ns <= began.ended_ns
    assert began.attributes == {"orchard.sandbox_id": "box"}


async def test_a_failed_start_is_a_failed_span(running: Running, receiver: Receiver) -> None:
    running.runtime.failures = [StartFailed(EndReason.IMAGE_NOT_FOUND, "no image x")]
    (await running.call.post("/sandboxes", {"image": "x", "sandbox_id": "bad"})).expect()
    (await running.call.get("/sandboxes/bad/wait")).expect()
    await running.orchestrator.stop()
    assert only(receiver, "sandbox.start").failed
    assert not only(receiver, CREATE).failed


async def test_a_command_is_a_span_down_to_the_agent(running: Running, receiver: Receiver) -> None:
    await running.call.ready()
    job = await running.call.run("box", "exit 3")
    await running.orchestrator.stop()
    request, command, run = (only(receiver, name) for name in (EXEC, "command", "command.run"))
    assert (command.parent_id, run.parent_id) == (request.span_id, command.span_id)
    assert command.attributes["orchard.exit_code"] == 3
    assert run.began_ns == int(job["started_at"] * 1e9)
    assert request.began_ns <= command.began_ns <= run.began_ns <= run.ended_ns <= command.ended_ns


async def test_a_command_that_is_not_waited_for_belongs_to_its_request(
    running: Running, receiver: Receiver
) -> None:
    await running.call.ready()
    job_id = (await running.call.post("/sandboxes/box/exec", {"command": "true"})).expect()["job_id"]
    (await running.call.get(f"/jobs/{job_id}/wait")).expect()
    await running.orchestrator.stop()
    assert only(receiver, "command").parent_id == only(receiver, EXEC).span_id


async def test_the_callers_trace_is_gone_on_with(running: Running, receiver: Receiver) -> None:
    await running.call.get("/sandboxes", headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})
    await running.orchestrator.stop()
    span = only(receiver, "GET /sandboxes")
    assert (span.trace_id, span.parent_id) == (TRACE, PARENT)


async def test_a_trace_that_its_caller_does_not_record_is_not_sent(
    running: Running, receiver: Receiver
) -> None:
    await running.call.get("/sandboxes", headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})
    await running.orchestrator.stop()
    assert receiver.spans == []


@pytest.mark.parametrize(
    "header", ["", "nonsense", f"00-{'0' * 32}-{PARENT}-01", f"00-{TRACE}-01", "\xff" * 300]
)
async def test_a_malformed_traceparent_begins_a_trace(
    running: Running, receiver: Receiver, header: str
) -> None:
    (await running.call.get("/sandboxes", headers={"traceparent": header})).expect()
    await running.orchestrator.stop()
    span = only(receiver, "GET /sandboxes")
    assert span.parent_id == ""
    assert span.trace_id != TRACE


async def test_requests_do_not_mix_their_traces(running: Running, receiver: Receiver) -> None:
    for _ in range(3):
        await running.call.get("/sandboxes")
    await running.orchestrator.stop()
    spans = receiver.named("GET /sandboxes")
    assert len({span.trace_id for span in spans}) == 3
    assert {span.parent_id for span in spans} == {""}


async def test_probes_are_no_spans(running: Running, receiver: Receiver) -> None:
    for target in ("/health", "/ready", "/metrics"):
        await running.caller(None).get(target)
    await running.orchestrator.stop()
    assert receiver.spans == []


async def test_commands_bodies_paths_and_keys_are_in_no_span(running: Running, receiver: Receiver) -> None:
    await running.caller("alice").ready(env={"TOKEN": "t0ken"})
    await running.caller("alice").run("box", "echo password-of-mine >/dev/null; exit 1")
    await running.caller("alice").get(f"/sandboxes/box/files?path=/secret-name&api_key={KEYS['alice']}")
    await running.orchestrator.stop()
    sent = b"".join(body for _, body in receiver.requests)
    assert b"orchard.exit_code" in sent
    words = ("password-of-mine", "t0ken", "secret-name", *KEYS.values())
    assert [word for word in words if word.encode() in sent] == []


async def test_a_receiver_that_never_answers_holds_neither_requests_nor_the_end(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        running = await start(otel_endpoint=f"http://127.0.0.1:{silent.getsockname()[1]}")
        await running.call.ready()
        await running.orchestrator.stop()


def test_the_endpoint_comes_from_opentelemetrys_own_variable_or_ours() -> None:
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://theirs:4318"}
    assert ServiceSettings.load(environ=environ).otel_endpoint == "http://theirs:4318"
    environ["ORCHARD_OTEL_ENDPOINT"] = "http://ours:4318"
    assert ServiceSettings.load(environ=environ).otel_endpoint == "http://ours:4318"
    assert ServiceSettings.load(environ=environ, otel_endpoint="http://x").otel_endpoint == "http://x"
    assert ServiceSettings.load(environ={}).otel_endpoint is None


def test_an_endpoint_that_is_no_url_is_refused() -> None:
    with pytest.raises(SettingsError, match="otel_endpoint"):
        ServiceSettings(otel_endpoint="localhost:4318")


def python(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("imported", "left_out"),
    [
        ("orchard.env.client", ("opentelemetry",)),
        # FastAPI imports the interface by itself.
        ("orchard.env.orchestrator.server", ("opentelemetry.sdk", "opentelemetry.exporter")),
    ],
)
def test_without_an_endpoint_nothing_of_it_is_imported(imported: str, left_out: tuple[str, ...]) -> None:
    python(
        f"import sys, {imported}\n"
        f"found = [name for name in sys.modules if name.startswith({left_out})]\n"
        "assert not found, found"
    )


def test_without_the_packages_it_is_told_what_to_install() -> None:
    python(
        "import sys; sys.modules['opentelemetry'] = None\n"
        "from orchard.env.errors import SettingsError\n"
        "from orchard.env.orchestrator.tracing import Tracing\n"
        "try: Tracing('http://x')\n"
        "except SettingsError as error: assert 'orchard-agents[otel]' in str(error)\n"
        "else: sys.exit('not refused')"
    )
