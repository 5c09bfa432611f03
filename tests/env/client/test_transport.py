"""What is sent again and what is not, and what errors come out."""

from __future__ import annotations

import asyncio
import socket
import warnings
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from orchard.env import errors
from orchard.env.client import AsyncSandboxClient, ClientSettings, RetryPolicy
from tests.env.client.scripted import (
    ScriptedService,
    bad_gateway_after,
    drop_after,
    drop_before,
    error,
    normally,
    reply,
    silence_after,
)


async def test_the_key_is_sent(service: ScriptedService, client: AsyncSandboxClient) -> None:
    await client.health()
    assert service.seen[0].headers["X-API-Key"] == "a key"


async def test_503_is_repeated(service: ScriptedService, client: AsyncSandboxClient) -> None:
    service.on("GET", "/health", error(503, "overloaded"), reply(503, "gateway says no"), drop_before)
    assert (await client.health()).status == "healthy"
    assert len(service.requests("GET", "/health")) == 4


async def test_retry_after_longer_than_the_total_is_raised_at_once(
    service: ScriptedService, client: AsyncSandboxClient
) -> None:
    service.on("GET", "/health", reply(503, {"detail": "busy", "code": "overloaded"}, Retry_After="900"))
    with pytest.raises(errors.Overloaded) as caught:
        await client.health()
    assert caught.value.retry_after_s == 900
    assert len(service.seen) == 1


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, "cwd_not_found", errors.CwdNotFound),
        (401, "unauthorized", errors.Unauthorized),
        (403, "forbidden", errors.Forbidden),
        (404, "sandbox_dead", errors.SandboxFailed),
        (409, "conflict", errors.Conflict),
        (422, "invalid_request", errors.InvalidRequest),
        (429, "quota_exceeded", errors.QuotaExceeded),
        (500, "internal_error", errors.InternalError),
        (503, "runtime_refused", errors.RuntimeRefused),
    ],
)
async def test_other_errors_are_raised_at_once_as_their_type(
    service: ScriptedService,
    client: AsyncSandboxClient,
    status: int,
    code: str,
    kind: type[errors.OrchardError],
) -> None:
    body = {"detail": "why", "code": code, "reason": "ttl", "request_id": "r1", "retryable": False}
    service.on("GET", "/health", reply(status, body))
    with pytest.raises(kind) as caught:
        await client.health()
    assert (caught.value.detail, caught.value.reason, caught.value.request_id) == ("why", "ttl", "r1")
    assert len(service.seen) == 1


async def test_a_foreign_answer_says_so(service: ScriptedService, client: AsyncSandboxClient) -> None:
    service.on("GET", "/health", reply(500, "<html>oops</html>"))
    with pytest.raises(errors.InfrastructureError, match="an Orchard service"):
        await client.health()
    service.on("GET", "/resources", reply(200, "<html>hello</html>"))
    with pytest.raises(errors.InfrastructureError, match="does not understand"):
        await client.resources()


async def test_a_repeated_create_makes_one_sandbox(
    service: ScriptedService, client: AsyncSandboxClient
) -> None:
    service.on("POST", "/sandboxes", drop_after, bad_gateway_after, error(503, "agent_unreachable"))
    sandbox = await client.create("host")
    assert list(service.sandboxes) == [sandbox.sandbox_id]
    sent = service.requests("POST", "/sandboxes")
    assert len(sent) == 4
    assert len({each.body["idempotency_key"] for each in sent}) == 1


@pytest.mark.parametrize("fault", [drop_after, bad_gateway_after, silence_after])
async def test_a_lost_answer_neither_runs_a_command_twice_nor_loses_its_result(
    service: ScriptedService, settings: ClientSettings, fault: object
) -> None:
    async with AsyncSandboxClient(settings=replace(settings, wait_slice_s=0.3)) as client:
        sandbox = await client.create("host")
        service.on("POST", f"/sandboxes/{sandbox.sandbox_id}/exec", fault)  # type: ignore[arg-type]
        service.waits_over = 2
        job = await sandbox.exec("echo out")
    assert job.stdout == "out\n"
    assert service.starts == {job.job_id: 1}
    assert len(service.requests("POST", f"/sandboxes/{sandbox.sandbox_id}/exec")) == 1
    assert len(service.requests("GET", f"/jobs/{job.job_id}/wait")) == 3


async def test_a_command_that_never_arrived_is_sent_again_under_its_id(
    service: ScriptedService, client: AsyncSandboxClient
) -> None:
    sandbox = await client.create("host")
    path = f"/sandboxes/{sandbox.sandbox_id}/exec"
    service.on("POST", path, drop_before, error(503, "overloaded"), drop_before)
    job = await sandbox.exec("echo out", job_id="mine")
    assert (job.job_id, service.starts) == ("mine", {"mine": 1})
    assert {each.body["job_id"] for each in service.requests("POST", path)} == {"mine"}


async def test_kill_on_disconnect_keeps_its_connection(
    service: ScriptedService, settings: ClientSettings
) -> None:
    async with AsyncSandboxClient(settings=replace(settings, wait_slice_s=0.05)) as client:
        sandbox = await client.create("host")
        service.barrier = 2
        command = sandbox.exec("sleep 60", on_disconnect="kill", job_id="one")
        running = asyncio.ensure_future(asyncio.wait_for(command, 30))
        path = "/jobs/one"
        looked = asyncio.Event()
        still = reply(200, _running("one", sandbox.sandbox_id))
        loop = asyncio.get_running_loop()

        async def third(*args: Any) -> Any:
            loop.call_soon_threadsafe(looked.set)
            return await still(*args)

        service.on("GET", path, still, still, third, *[still] * 10_000)
        await asyncio.wait_for(looked.wait(), 30)
        # The first request is still open; the second command lets both end.
        assert not running.done()
        assert (await sandbox.exec("true")).ok
        assert (await running).ok
    assert len(service.requests("POST", f"/sandboxes/{sandbox.sandbox_id}/exec")) == 2


def _running(job_id: str, sandbox_id: str) -> dict[str, object]:
    return {
        "job_id": job_id,
        "sandbox_id": sandbox_id,
        "command": "x",
        "status": "running",
        "created_at": 1.0,
    }


async def test_input_and_signals_are_never_sent_twice(
    service: ScriptedService, client: AsyncSandboxClient
) -> None:
    sandbox = await client.create("host")
    handle = await sandbox.commands.start("cat", stdin_open=True)
    service.on("POST", f"/jobs/{handle.job_id}/stdin", drop_after)
    with pytest.raises(errors.ConnectionFailed):
        await handle.send_stdin("once")
    service.on("POST", f"/jobs/{handle.job_id}/signal", bad_gateway_after)
    with pytest.raises(errors.ConnectionFailed):
        await handle.signal("USR1")
    assert len(service.requests("POST", f"/jobs/{handle.job_id}/stdin")) == 1
    assert len(service.requests("POST", f"/jobs/{handle.job_id}/signal")) == 1


async def test_input_is_repeated_when_it_was_surely_not_taken(
    service: ScriptedService, client: AsyncSandboxClient
) -> None:
    sandbox = await client.create("host")
    handle = await sandbox.commands.start("cat", stdin_open=True)
    service.on("POST", f"/jobs/{handle.job_id}/stdin", error(503, "overloaded"))
    await handle.send_stdin("once", eof=True)
    assert [each.body["eof"] for each in service.requests("POST", f"/jobs/{handle.job_id}/stdin")] == [
        True,
        True,
    ]


async def test_retries_end(service: ScriptedService, settings: ClientSettings) -> None:
    hasty = replace(settings, retry=RetryPolicy(total_s=0.2, base_s=0.01, cap_s=0.02))
    service.on("GET", "/health", *[drop_before] * 1000)
    async with AsyncSandboxClient(settings=hasty) as client:
        with pytest.raises(errors.ConnectionFailed) as caught:
            await client.health()
    assert caught.value.infra
    assert caught.value.retryable
    assert 1 < len(service.seen) < 1000


async def test_an_address_without_a_service_is_named_with_what_to_do() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        quick = ClientSettings(base_url=url, retry=RetryPolicy(first_contact_s=0.2))
        async with AsyncSandboxClient(settings=quick) as client:
            with pytest.raises(errors.ConnectionFailed, match=f"{url}.*orchard serve.*ORCHARD_BASE_URL"):
                await client.create("host")


async def test_a_service_that_restarts_is_waited_for(settings: ClientSettings) -> None:
    first = ScriptedService().start()
    port = int(first.base_url.rsplit(":", 1)[1])
    async with AsyncSandboxClient(settings=replace(settings, base_url=first.base_url)) as client:
        await client.health()
        await asyncio.to_thread(first.stop)
        waiting = asyncio.ensure_future(client.health())
        await asyncio.sleep(0)
        assert not waiting.done()
        again = await asyncio.to_thread(ScriptedService(port=port).start)
        assert (await waiting).status == "healthy"
    await asyncio.to_thread(again.stop)


async def test_another_major_version_warns_once(service: ScriptedService, client: AsyncSandboxClient) -> None:
    service.version = "2.3"
    with pytest.warns(UserWarning, match=r"2\.3"):
        await client.health()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        await client.health()


async def test_a_minor_version_is_fine(service: ScriptedService, client: AsyncSandboxClient) -> None:
    service.version = "1.9"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        await client.health()


async def test_a_thousand_commands_at_once(service: ScriptedService, client: AsyncSandboxClient) -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4096:
        pytest.skip("needs 4,096 open files, both ends of the connections being in this process")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    sandbox = await client.create("host")
    # None is answered before all have arrived: a limit below 1,000 connections would never end.
    service.barrier = 1000
    jobs = await asyncio.gather(*(sandbox.exec(["true"]) for _ in range(1000)))
    assert all(job.ok for job in jobs)
    assert len({job.job_id for job in jobs}) == 1000


def test_one_client_in_one_loop_after_another(settings: ClientSettings) -> None:
    client = AsyncSandboxClient(settings=settings)
    for _ in range(3):
        assert asyncio.run(client.health()).status == "healthy"
    asyncio.run(client.close())


async def test_a_closed_client_says_so(settings: ClientSettings) -> None:
    client = AsyncSandboxClient(settings=settings)
    await client.health()
    await client.close()
    await client.close()
    with pytest.raises(errors.ConnectionFailed, match="closed"):
        await client.health()


async def test_requests_that_cannot_be_right_are_refused_here(
    service: ScriptedService, client: AsyncSandboxClient
) -> None:
    sandbox = await client.create("host")
    before = len(service.seen)
    for call in (
        lambda: client.create("host", cpu="many"),
        lambda: client.create("host", sandbox_id="Not An Id"),
        lambda: sandbox.exec([]),
        lambda: sandbox.exec("true", timeout_s=-1),
        lambda: sandbox.exec("nul\0byte"),
        lambda: sandbox.exec(["lone surrogate \udc80"]),
    ):
        with pytest.raises(errors.InvalidRequest):
            await call()
    assert len(service.seen) == before


def test_settings_come_from_arguments_then_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ORCHARD_BASE_URL", "SANDBOX_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    assert AsyncSandboxClient().base_url == "http://localhost:8000"
    monkeypatch.setenv("SANDBOX_BASE_URL", "http://second/")
    assert AsyncSandboxClient().base_url == "http://second"
    monkeypatch.setenv("ORCHARD_BASE_URL", "https://first/below/")
    client = AsyncSandboxClient()
    assert client.base_url == "https://first/below"
    assert AsyncSandboxClient("http://argument").base_url == "http://argument"
    monkeypatch.setenv("ORCHARD_BASE_URL", "http://later")
    assert client.base_url == "https://first/below"
    with pytest.raises(errors.InvalidRequest, match="http://"):
        AsyncSandboxClient("localhost:8000")


def test_the_key_is_in_no_representation(settings: ClientSettings) -> None:
    assert "a key" not in repr(settings)


# -- several services


def closed_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@pytest.fixture
async def other() -> AsyncIterator[ScriptedService]:
    running = ScriptedService().start()
    yield running
    running.stop()


async def test_the_next_service_is_asked_when_one_is_not_there(
    service: ScriptedService, settings: ClientSettings
) -> None:
    both = replace(settings, base_url=f"http://127.0.0.1:{closed_port()}, {service.base_url}/")
    async with AsyncSandboxClient(settings=both) as client:
        assert (await client.health()).status == "healthy"
        await client.health()
    assert len(service.requests("GET", "/health")) == 2


async def test_the_next_service_is_asked_when_one_stops(
    service: ScriptedService, other: ScriptedService, settings: ClientSettings
) -> None:
    both = replace(settings, base_url=f"{service.base_url},{other.base_url}")
    async with AsyncSandboxClient(settings=both) as client:
        service.on("GET", "/health", error(503, "infrastructure_error"))
        await client.health()
        service.on("GET", "/health", normally)
        # Twice: the HTTP library itself repeats once over a connection that was kept.
        other.on("GET", "/health", drop_before, drop_before)
        await client.health()
    assert len(service.requests("GET", "/health")) == 2
    assert len(other.requests("GET", "/health")) == 3


async def test_what_may_not_be_repeated_is_not_sent_to_another_service(
    service: ScriptedService, other: ScriptedService, settings: ClientSettings
) -> None:
    both = replace(settings, base_url=f"{service.base_url},{other.base_url}")
    async with AsyncSandboxClient(settings=both) as client:
        sandbox = await client.create("host")
        path = f"/sandboxes/{sandbox.sandbox_id}/files/move"
        service.on("POST", path, drop_before)
        with pytest.raises(errors.ConnectionFailed, match=service.base_url):
            await sandbox.files.move("/a", "/b")
        assert other.requests("POST", path) == []


@pytest.mark.parametrize("url", ["http://a,b", "http://a,", ",http://a", "http://a,ftp://b"])
def test_each_of_several_urls_must_be_one(url: str) -> None:
    with pytest.raises(errors.InvalidRequest, match="base_url"):
        ClientSettings(base_url=url)


async def test_what_is_wrong_as_a_whole_is_said_without_the_validators_words(
    client: AsyncSandboxClient,
) -> None:
    with pytest.raises(errors.InvalidRequest, match=r"^allow_egress narrows"):
        await client.create("host", block_network=False, allow_egress=["a.example"])
