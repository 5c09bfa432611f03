"""Traces from a program through the SDK and the service to the agent."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import Tracer

from orchard.env.client import AsyncSandboxClient, SandboxClient
from tests.support.otlp import Receiver, receiving
from tests.support.rest import Rest
from tests.support.service import Service
from tests.support.waiting import eventually

IMAGE = "host"
EXEC = "POST /sandboxes/{sandbox_id}/exec"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as running:
        yield running


@pytest.fixture
def traced(
    own_service: Callable[..., Service], receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> Service:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    return own_service("--otel-endpoint", receiver.endpoint)


@pytest.fixture
def tracer() -> Tracer:
    return TracerProvider(shutdown_on_exit=False).get_tracer("a program")


def chain(receiver: Receiver, name: str) -> list[str]:
    """The names of a span and of those above it."""
    by_id = {span.span_id: span for span in receiver.spans}
    span = receiver.named(name)[0]
    names = [span.name]
    while span.parent_id in by_id:
        span = by_id[span.parent_id]
        names.append(span.name)
    return [*names, span.parent_id]


async def test_the_asynchronous_sdk_passes_the_active_span_on(
    traced: Service, receiver: Receiver, tracer: Tracer
) -> None:
    async with AsyncSandboxClient(traced.base_url, traced.api_key) as client:
        with tracer.start_as_current_span("work") as span:
            async with await client.create(IMAGE) as sandbox:
                await sandbox.exec("true")
    own = f"{span.get_span_context().span_id:016x}"
    eventually(lambda: receiver.named("command.run") and receiver.named("sandbox.start"), "the spans arrive")
    eventually(lambda: chain(receiver, "command.run") == ["command.run", "command", EXEC, own], "its chain")
    eventually(
        lambda: chain(receiver, "sandbox.start") == ["sandbox.start", "POST /sandboxes", own], "and that"
    )


def test_the_synchronous_sdk_does_the_same(traced: Service, receiver: Receiver, tracer: Tracer) -> None:
    with (
        SandboxClient(traced.base_url, traced.api_key) as client,
        tracer.start_as_current_span("work") as span,
    ):
        client.create(IMAGE).delete()
    own = f"{span.get_span_context().span_id:016x}"
    eventually(
        lambda: receiver.named("POST /sandboxes") and chain(receiver, "POST /sandboxes")[-1] == own,
        "the request is a child of the program's span",
    )


def test_what_is_left_is_sent_when_the_service_stops(traced: Service, receiver: Receiver) -> None:
    traced.rest.get("/sandboxes/none")
    assert traced.stop() == 0
    assert receiver.named("GET /sandboxes/{sandbox_id}")


def test_without_a_receiver_the_service_works_and_stops(own_service: Callable[..., Service]) -> None:
    service = own_service("--otel-endpoint", "http://127.0.0.1:9")
    rest: Rest = service.rest
    with rest.sandbox(IMAGE) as box:
        assert box.alive()
    assert service.stop() == 0
