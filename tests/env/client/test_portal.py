"""The synchronous client: threads, interruptions, forks, ends."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest

from orchard.env.client import ClientSettings, SandboxClient
from tests.env.client.scripted import ScriptedService


def _portal_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "orchard-portal"}


def test_many_threads_share_one_client(sync_client: SandboxClient) -> None:
    sandbox = sync_client.create("host")
    before = _portal_threads()
    with ThreadPoolExecutor(32) as threads:
        jobs = list(threads.map(lambda n: sandbox.exec(["echo", str(n)]), range(100)))
    assert len({job.job_id for job in jobs}) == 100
    assert _portal_threads() <= before  # clients of other tests may have ended meanwhile


def test_a_closed_client_has_no_thread_and_says_so(settings: ClientSettings) -> None:
    before = _portal_threads()
    client = SandboxClient(settings=settings)
    client.health()
    assert len(_portal_threads() - before) == 1
    client.close()
    client.close()
    assert _portal_threads() <= before
    with pytest.raises(RuntimeError, match="closed"):
        client.health()


def test_a_forgotten_client_takes_its_thread_along(settings: ClientSettings) -> None:
    before = _portal_threads()
    client = SandboxClient(settings=settings)
    client.health()
    (thread,) = _portal_threads() - before
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del client
        gc.collect()
        thread.join(10)
    assert not thread.is_alive()


def test_objects_keep_the_portal_of_a_forgotten_client(settings: ClientSettings) -> None:
    sandbox = SandboxClient(settings=settings).create("host")
    gc.collect()
    assert sandbox.exec("true").ok


def test_the_pages_of_a_list_are_fetched_as_they_are_needed(
    service: ScriptedService, sync_client: SandboxClient
) -> None:
    made = {sync_client.create("host").sandbox_id for _ in range(5)}
    pages = sync_client.list(page_size=2)
    first = next(pages)
    assert len(service.requests("GET", "/sandboxes")) == 1
    assert {first.sandbox_id, *(each.sandbox_id for each in pages)} == made
    assert len(service.requests("GET", "/sandboxes")) == 3


def test_a_child_of_fork_works_and_leaves_the_parent_alone(
    service: ScriptedService, settings: ClientSettings
) -> None:
    client = SandboxClient(settings=settings, cleanup=True)
    sandbox = client.create("host")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking a program with threads
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            fine = sandbox.exec("true").ok and client.health().status == "healthy"
            client.close()
            code = 0 if fine else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    # The child cleaned up nothing of its parent's, and the parent's connections still work.
    assert sandbox.sandbox_id in service.sandboxes
    assert sandbox.exec("true").ok
    client.close()
    assert service.sandboxes == {}


PROGRAM = """
import asyncio, os, signal, sys
from orchard.env.client import AsyncSandboxClient, SandboxClient

def say(*words):
    print(*words, flush=True)

{body}
"""

LEAVE = {
    "end": "pass",
    "exit": "sys.exit(3)",
    "error": "raise RuntimeError('the program failed')",
    "sigterm": "os.kill(os.getpid(), signal.SIGTERM); signal.pause()",
    "sigint": "os.kill(os.getpid(), signal.SIGINT); signal.pause()",
}


def run_program(service: ScriptedService, body: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "ORCHARD_BASE_URL": service.base_url}
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM.format(body=body)],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("way", LEAVE)
def test_what_a_program_owns_is_deleted_however_it_ends(service: ScriptedService, way: str) -> None:
    body = f"""
client = SandboxClient(cleanup=True)
for _ in range(12):
    client.create("host")
say("created")
{LEAVE[way]}
"""
    done = run_program(service, body)
    assert done.stdout == "created\n", done.stderr
    assert len(service.keys) == 12
    assert service.sandboxes == {}


@pytest.mark.parametrize("way", ["sigterm", "sigint"])
def test_a_with_block_is_left_on_a_signal(service: ScriptedService, way: str) -> None:
    body = f"""
async def main():
    async with AsyncSandboxClient() as client, await client.create("host"):
        say("created")
        os.kill(os.getpid(), signal.{way.upper()})
        await asyncio.sleep(60)

asyncio.run(main())
"""
    done = run_program(service, body)
    assert done.stdout == "created\n", done.stderr
    assert len(service.keys) == 1
    assert service.sandboxes == {}


def test_without_cleanup_sandboxes_live_on(service: ScriptedService) -> None:
    done = run_program(service, "say(SandboxClient().create('host').sandbox_id)")
    assert done.returncode == 0, done.stderr
    assert list(service.sandboxes) == done.stdout.split()


def test_a_signal_handler_of_the_program_is_respected(service: ScriptedService) -> None:
    body = """
signal.signal(signal.SIGTERM, lambda *_: say("mine"))
client = SandboxClient(cleanup=True)
client.create("host")
os.kill(os.getpid(), signal.SIGTERM)
say("still here")
"""
    done = run_program(service, body)
    assert done.stdout == "mine\nstill here\n", done.stderr
    assert service.sandboxes == {}


def test_an_interrupted_call_is_cancelled_and_its_clean_up_awaited(service: ScriptedService) -> None:
    body = """
from orchard.env.client.portal import Portal

async def endless():
    os.kill(os.getpid(), signal.SIGINT)
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.sleep(0.01)
        say("cleaned")

portal = Portal()
try:
    portal.call(endless())
except KeyboardInterrupt:
    say("interrupted")
portal.close()
"""
    done = run_program(service, body)
    assert done.stdout == "cleaned\ninterrupted\n", done.stderr


def test_few_descriptors_make_requests_wait_instead_of_failing(service: ScriptedService) -> None:
    body = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (200, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

async def main():
    async with AsyncSandboxClient() as client:
        sandbox = await client.create("host")
        jobs = await asyncio.gather(*(sandbox.exec("true") for _ in range(500)))
        say(sum(job.ok for job in jobs))

asyncio.run(main())
"""
    done = run_program(service, body)
    assert done.stdout == "500\n", done.stderr


def test_the_client_needs_no_server_package(service: ScriptedService) -> None:
    body = """
client = SandboxClient()
client.health()
client.close()
foreign = {"fastapi", "starlette", "uvicorn", "uvloop", "httptools", "prometheus_client", "pyroute2"}
say(sorted(foreign & set(sys.modules)))
"""
    assert run_program(service, body).stdout == "[]\n"
