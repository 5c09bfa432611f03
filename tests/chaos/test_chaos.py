"""kill -9 of the orchestrator, of agents and of clients at random moments under load.

Whatever dies: every acknowledged job ends with a result or a reason, results once seen stay as they were, no
command runs twice, and in the end nothing is left on the machine.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.chaos.load import IMAGE, Ledger, Worker, check_ran_once, settle
from tests.conformance.runtimes import RUNTIMES
from tests.support.machine import Leftovers, kill, namespace_init, pids, pids_with_argument, status_field
from tests.support.rest import Box, new_id
from tests.support.service import Service, live_sandboxes
from tests.support.waiting import eventually

SEED = int(os.environ.get("ORCHARD_CHAOS_SEED", "20240607"))
SECONDS = float(os.environ.get("ORCHARD_CHAOS_SECONDS", "10"))
WORKERS = 6


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    """A service of one's own; at the end nothing of it may be left."""
    server = Service(tmp_path / "state", arguments=("--runtime", "local", "--max-starting", "4")).start()
    yield server
    if not server.running:
        server.start()
    ids = {s["sandbox_id"] for s in live_sandboxes(server.rest)}
    server.delete_all()
    assert server.stop() == 0, server.log()
    Leftovers(server.mark, server.state_dir, ids, RUNTIMES["local"].tags(server.state_dir)).check()


@contextmanager
def load(service: Service, rng: random.Random) -> Iterator[Ledger]:
    """Workers that run commands until the block ends."""
    ledger, stop = Ledger(), threading.Event()
    workers = [Worker(service, ledger, stop, rng.randrange(1 << 30)) for _ in range(WORKERS)]
    for worker in workers:
        worker.start()
    try:
        yield ledger
    finally:
        stop.set()
        for worker in workers:
            worker.join(60)


def disturb(rng: random.Random, strike: Callable[[], object], pauses_s: tuple[float, float]) -> None:
    """Strikes at random moments for SECONDS."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        time.sleep(rng.uniform(*pauses_s))
        strike()


def agents() -> dict[int, str]:
    """The agents on this machine (process 1 of a pid namespace) and the host names of their sandboxes."""
    found = {}
    for pid in pids():
        inner = (status_field(pid, "NSpid") or "").split()
        if len(inner) == 2 and inner[1] == "1":
            found[pid] = pid_host_name(pid)
    return found


def pid_host_name(pid: int) -> str:
    done = subprocess.run(
        ["nsenter", "-t", str(pid), "-u", "uname", "-n"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


def test_a_killed_orchestrator_loses_nothing(service: Service) -> None:
    rng = random.Random(SEED)
    kills = 0

    def strike() -> None:
        nonlocal kills
        service.kill()
        time.sleep(rng.uniform(0, 0.5))
        service.start()
        kills += 1

    with load(service, rng) as ledger:
        disturb(rng, strike, (0.3, 2.5))
    assert kills >= 2
    assert ledger.wrong == [], f"seed {SEED}"
    assert len(ledger.jobs) >= WORKERS
    assert ledger.lost == {}, "a sandbox was lost although only the orchestrator died"
    settle(service.rest, ledger)
    check_ran_once(service.rest, ledger)


def test_an_orchestrator_killed_while_it_comes_back_loses_nothing(service: Service) -> None:
    rng = random.Random(SEED + 1)
    with load(service, rng) as ledger:
        time.sleep(1.5)
        for _ in range(3):
            service.kill()
            process = subprocess.Popen(
                service.command(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            time.sleep(rng.uniform(0.2, 2.0))
            process.kill()
            process.wait()
            service.start()
            time.sleep(0.5)
    assert ledger.wrong == [], f"seed {SEED}"
    settle(service.rest, ledger)
    check_ran_once(service.rest, ledger)


def test_killed_agents_are_told_from_failed_commands(service: Service) -> None:
    rng = random.Random(SEED + 2)

    def strike() -> None:
        names = {s["sandbox_id"] for s in live_sandboxes(service.rest)}
        mine = [pid for pid, name in agents().items() if name in names]
        if mine:
            kill(rng.choice(mine))

    with load(service, rng) as ledger:
        disturb(rng, strike, (0.1, 0.8))
    assert ledger.wrong == [], f"seed {SEED}"
    assert ledger.lost, "agents were killed"
    assert set(ledger.lost.values()) <= {"agent_lost", "runtime_error", "agent_did_not_start"}
    settle(service.rest, ledger)
    check_ran_once(service.rest, ledger)


def test_everything_killed_at_once_leaves_a_working_service(service: Service) -> None:
    """The orchestrator, its helpers and some agents die together; the service comes back and tells what happened."""
    rng = random.Random(SEED + 3)
    with load(service, rng) as ledger:
        time.sleep(2.5)
        names = {s["sandbox_id"] for s in live_sandboxes(service.rest)}
        doomed = rng.sample([pid for pid, name in agents().items() if name in names], 3)
        helpers = [p for p in pids() if status_field(p, "PPid") == str(service.pid)]
        for pid in (service.pid, *helpers, *doomed):
            kill(pid)
        service.process.wait()
        service.start()
        time.sleep(1.5)
    assert ledger.wrong == [], f"seed {SEED}"
    settle(service.rest, ledger)
    check_ran_once(service.rest, ledger)
    box = service.rest.create(IMAGE)
    assert box.alive()


CLIENT = """
import sys
from orchard.env.client import SandboxClient
client = SandboxClient(base_url=sys.argv[1], api_key=sys.argv[2])
sandbox = client.create("host", labels={"run": sys.argv[3]}, heartbeat_timeout=3)
sandbox.start_heartbeat(0.5)
n = 0
while True:
    job_id = f"{sandbox.sandbox_id[:40]}-{n}"
    command = f"echo {job_id} >> /tmp/ran; sleep 0.1; echo out-{job_id}"
    handle = sandbox.commands.start(command, job_id=job_id, background=False)
    print(sandbox.sandbox_id, job_id, flush=True)
    if n % 3: handle.wait()
    n += 1
"""


def test_killed_clients_leave_no_sandbox_and_no_open_job(service: Service, tmp_path: Path) -> None:
    rng = random.Random(SEED + 4)
    label = new_id("run")
    outputs = [tmp_path / f"client{n}" for n in range(4)]
    clients = []
    for path in outputs:
        with path.open("wb") as out:
            command = [sys.executable, "-c", CLIENT, service.base_url, service.api_key or "", label]
            clients.append(subprocess.Popen(command, stdout=out))
    try:
        eventually(lambda: all(path.read_text().count("\n") > 3 for path in outputs), "all clients work", 60)
        for client in clients:
            time.sleep(rng.uniform(0, 0.5))
            client.send_signal(signal.SIGKILL)
    finally:
        for client in clients:
            client.kill()
            client.wait()
    rest = service.rest
    eventually(lambda: not rest.get("/sandboxes", label=f"run={label}", status="ready").expect(200)["sandboxes"],
               "their sandboxes are gone", 30)  # fmt: skip
    lines = [
        line.split() for path in outputs for line in path.read_text().splitlines() if len(line.split()) == 2
    ]
    for sandbox_id, job_id in lines:
        assert Box(rest, sandbox_id).post_exec("true").json["reason"] == "heartbeat", f"seed {SEED}"
        job = rest.wait_job(job_id, 10)
        assert job["status"] == "succeeded" or job["error"], f"seed {SEED}: {job}"


def test_a_killed_command_is_a_result_and_nothing_more(service: Service) -> None:
    """SIGKILL from outside to commands: an exit code, no infrastructure failure, and the sandbox goes on."""
    rng = random.Random(SEED + 5)
    box = service.rest.create(IMAGE)
    for _ in range(10):
        tag = f"{rng.randrange(10**6, 10**7)}.5"
        job_id = box.start(["/bin/sleep", tag])
        (pid,) = eventually(lambda tag=tag: pids_with_argument(tag), "it runs")  # type: ignore[misc]
        assert namespace_init(pid) != pid
        kill(pid)
        job = service.rest.wait_job(job_id)
        assert (job["exit_code"], job["signal"], job["infra"]) == (137, "KILL", False)
    assert box.alive()
