"""The SDK over a bad connection: nothing runs twice, nothing is lost, and 503 is waited out."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

from orchard.env import errors
from tests.conformance.conftest import NewBox
from tests.conformance.runtimes import Images
from tests.support.faults import Fault, Proxy, faulty_proxy
from tests.support.rest import Rest, new_id
from tests.support.sdk import collected, open_sdk
from tests.support.service import Service
from tests.support.waiting import eventually


@pytest.fixture
async def proxy(service: Service) -> AsyncIterator[Proxy]:
    async with faulty_proxy(service.base_url) as running:
        yield running


@pytest.fixture(params=["async", "sync"])
async def through(request: pytest.FixtureRequest, proxy: Proxy, service: Service) -> AsyncIterator[Any]:
    """A client that speaks through the proxy."""
    async with open_sdk(request.param, proxy.base_url, service.api_key) as client:
        yield client


def first(fault: Fault, method: str, ending: str) -> Any:
    """`fault` for the first request of `method` whose path ends so."""
    return lambda m, p, n: fault if (m, n) == (method, 0) and p.endswith(ending) else Fault.NONE


@pytest.mark.parametrize("fault", [Fault.LOST_ANSWER, Fault.BAD_GATEWAY, Fault.OVERLOADED, Fault.CUT])
async def test_a_command_runs_once_and_its_result_arrives(
    through: Any, proxy: Proxy, new_box: NewBox, fault: Fault
) -> None:
    box = new_box()
    sandbox = await through.get(box.id)
    proxy.decide = first(fault, "POST", "/exec")
    job = await sandbox.exec("echo x >> /tmp/n; wc -l < /tmp/n")
    assert job.stdout == "1\n"
    assert box.out("wc -l < /tmp/n") == "1\n"


@pytest.mark.parametrize("fault", [Fault.LOST_ANSWER, Fault.OVERLOADED, Fault.CUT])
async def test_a_creation_makes_one_sandbox(
    through: Any, proxy: Proxy, rest: Rest, images: Images, fault: Fault
) -> None:
    label = new_id("once")
    proxy.decide = first(fault, "POST", "/sandboxes")
    sandbox = await through.create(images.full, labels={"run": label})
    assert [s.sandbox_id for s in await collected(through.list(labels={"run": label}))] == [
        sandbox.sandbox_id
    ]
    await sandbox.delete()


@pytest.mark.parametrize("fault", [Fault.LOST_ANSWER, Fault.OVERLOADED, Fault.CUT])
async def test_a_deletion_may_be_repeated(through: Any, proxy: Proxy, new_box: NewBox, fault: Fault) -> None:
    box = new_box()
    sandbox = await through.get(box.id)
    proxy.decide = first(fault, "DELETE", box.id)
    await sandbox.delete()
    assert box.rest.get(box.path).code == "sandbox_deleted"


@pytest.mark.parametrize("fault", [Fault.LOST_ANSWER, Fault.CUT])
async def test_reading_is_repeated(through: Any, proxy: Proxy, new_box: NewBox, fault: Fault) -> None:
    box = new_box()
    box.write("/tmp/f", b"content")
    sandbox = await through.get(box.id)
    proxy.decide = first(fault, "GET", "/files")
    assert await sandbox.files.read("/tmp/f") == b"content"


async def test_input_is_never_sent_twice(through: Any, proxy: Proxy, new_box: NewBox) -> None:
    box = new_box()
    sandbox = await through.get(box.id)
    handle = await sandbox.commands.start("cat", stdin_open=True)
    proxy.decide = first(Fault.LOST_ANSWER, "POST", "/stdin")
    with pytest.raises(errors.ConnectionFailed):
        await handle.send_stdin("once\n")
    await handle.send_stdin(eof=True)
    assert (await handle.wait(30)).stdout == "once\n"


async def test_a_patch_is_never_sent_twice(through: Any, proxy: Proxy, new_box: NewBox) -> None:
    box = new_box()
    sandbox = await through.get(box.id)
    proxy.decide = first(Fault.LOST_ANSWER, "POST", "/apply_patch")
    with pytest.raises(errors.ConnectionFailed):
        await sandbox.apply_patch("--- /dev/null\n+++ b/new\n@@ -0,0 +1 @@\n+x\n", cwd="/tmp")
    assert proxy.count("POST", "/apply_patch") == 1
    assert box.read("/tmp/new") == b"x\n"


async def test_errors_of_the_request_are_not_repeated(through: Any, proxy: Proxy) -> None:
    sandbox_id = new_id()
    with pytest.raises(errors.SandboxNotFound):
        await through.get(sandbox_id)
    assert proxy.count("GET", sandbox_id) == 1


async def test_a_service_that_is_not_there_is_a_typed_error() -> None:
    for flavour in ("async", "sync"):
        async with open_sdk(flavour, "http://127.0.0.1:1", "key") as client:
            with pytest.raises(errors.ConnectionFailed) as caught:
                await client.health()
            assert isinstance(caught.value, ConnectionError)
            assert (caught.value.retryable, caught.value.infra) == (True, True)


PROGRAM = """
import signal, sys, time
from orchard.env.client import SandboxClient
client = SandboxClient(base_url=sys.argv[1], api_key=sys.argv[2], cleanup=True)
lease = {"heartbeat_timeout": 2} if sys.argv[5] == "lease" else {}
sandbox = client.create(sys.argv[3], labels={"run": sys.argv[4]}, **lease)
if sys.argv[5] == "lease": sandbox.start_heartbeat(0.3)
print(sandbox.sandbox_id, flush=True)
if sys.argv[5] == "raise": raise RuntimeError("the program fails")
if sys.argv[5] == "exit": sys.exit(3)
time.sleep(300)
"""


def program(service: Service, images: Images, label: str, how: str) -> tuple[subprocess.Popen[str], str]:
    command = [
        sys.executable,
        "-c",
        PROGRAM,
        service.base_url,
        service.api_key or "",
        images.full,
        label,
        how,
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


@pytest.mark.parametrize("how", ["raise", "exit"])
def test_a_program_that_ends_cleans_up(service: Service, rest: Rest, images: Images, how: str) -> None:
    process, sandbox_id = program(service, images, new_id(), how)
    assert process.wait(60) != 0
    assert rest.get(f"/sandboxes/{sandbox_id}").code == "sandbox_deleted"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_program_ended_by_a_signal_cleans_up(
    service: Service, rest: Rest, images: Images, number: int
) -> None:
    process, sandbox_id = program(service, images, new_id(), "wait")
    process.send_signal(number)
    assert process.wait(60) != 0
    assert rest.get(f"/sandboxes/{sandbox_id}").code == "sandbox_deleted"


def test_a_killed_programs_sandbox_goes_with_its_lease(service: Service, rest: Rest, images: Images) -> None:
    label = new_id("run")
    process, sandbox_id = program(service, images, label, "lease")
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    answer = eventually(
        lambda: (a := rest.get(f"/sandboxes/{sandbox_id}")).status == 404 and a, "it is gone", 20
    )
    assert answer.json["reason"] == "heartbeat"
    assert rest.get("/sandboxes", label=f"run={label}", status="ready").expect(200)["sandboxes"] == []
