"""swe-rex (PyPI): its server run as a program from its own environment, driven over HTTP by our raw client.

A sandbox is a server process. There is no isolation at all: commands run on the machine as the same user. Its
server runs commands one after the other whatever the concurrency, so one server takes all the load.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import time
from pathlib import Path

import uvloop

from benchmarks.load import share
from benchmarks.samples import Metrics, latency, memory_available, memory_each, run_threads, throughput, timed
from benchmarks.scale import Scale
from benchmarks.wire import Address, BenchError, Connection

NAME = "swe-rex"
REQUIREMENT = "swe-rex==1.4.0"
ENVIRONMENT = Path(__file__).resolve().parents[2] / ".venv-swerex"
TRUE = json.dumps({"command": ["true"], "shell": False}).encode()
START_WITHIN_S = 60


def missing() -> str | None:
    """Why it cannot be measured here, or None; installs it on the first call."""
    done = ENVIRONMENT / ".installed"
    if done.exists() and done.read_text() == REQUIREMENT:
        return None
    for command in (
        [sys.executable, "-m", "venv", "--clear", str(ENVIRONMENT)],
        [str(ENVIRONMENT / "bin/python"), "-m", "pip", "install", "--quiet", REQUIREMENT],
    ):
        result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if result.returncode:
            return f"{REQUIREMENT} cannot be installed: {result.stderr.strip()[-300:]}"
    done.write_text(REQUIREMENT)
    return None


def describe() -> str:
    return REQUIREMENT


class Server:
    """One `swerex-remote` on a free port of the loopback device; ready when it accepts."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.token = secrets.token_hex(16)
        command = [str(ENVIRONMENT / "bin/swerex-remote"), "--host", "127.0.0.1", "--port", str(self.port)]
        self._process = subprocess.Popen(
            [*command, "--auth-token", self.token],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        )
        self._wait()

    def _wait(self) -> None:
        give_up = time.monotonic() + START_WITHIN_S
        while time.monotonic() < give_up and self._process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                time.sleep(0.002)
        raise BenchError(f"swerex-remote did not start (exit code {self._process.poll()})")

    @property
    def address(self) -> Address:
        return Address(f"http://127.0.0.1:{self.port}", self.token)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


async def run_true(connection: Connection) -> None:
    status, body = await connection.request("POST", "/execute", TRUE)
    if status != 200 or b'"exit_code":0' not in body:
        raise BenchError(f"swe-rex: HTTP {status} {body[:300]!r}")


async def _exec(server: Server, count: int, concurrency: int, warm_up: int = 10) -> dict[str, float]:
    connections = await server.address.connect_many(concurrency)
    samples: list[float] = []

    async def one(connection: Connection) -> None:
        with timed(samples):
            await run_true(connection)

    await share(connections, warm_up * concurrency, one)
    samples.clear()
    wall_s = await share(connections, count, one)
    for connection in connections:
        connection.close()
    return throughput(samples, wall_s)


def measure(scale: Scale) -> Metrics:
    """Smaller numbers of servers, since each takes its time and tens of megabytes."""
    metrics: Metrics = {}
    servers: list[Server] = []

    def first(_: int) -> None:
        servers.append(Server())
        uvloop.run(_exec(servers[-1], 1, 1, warm_up=0))

    try:
        few = max(2, scale.sequential // 30)
        metrics["create_first_exec"] = run_threads(few, 1, first)
        deletes = run_threads(few, 1, lambda _: servers.pop().stop())
        metrics["delete"] = {key: deletes[key] for key in latency([0.0])}
        before = memory_available()
        idle = max(8, scale.idle // 20)
        metrics["creates_c8"] = run_threads(idle, 8, lambda _: servers.append(Server()))
        metrics["idle_memory"] = memory_each(before, memory_available(), idle)
        for concurrency in (1, 8, 64):
            metrics[f"exec_c{concurrency}"] = uvloop.run(_exec(servers[0], scale.execs // 4, concurrency))
    finally:
        for server in servers:
            server.stop()
    metrics["lifecycle"] = {**run_threads(max(4, scale.lifecycles // 50), 8, _live), "success_rate": 1.0}
    return metrics


def _live(_: int) -> None:
    server = Server()
    try:
        uvloop.run(_exec(server, 4, 1, warm_up=0))
    finally:
        server.stop()
