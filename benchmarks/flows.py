"""Bytes in quantity: `python -m benchmarks.flows SCENARIO MIB COUNT`, a process of its own.

A plain socket reads and writes, so that what is measured is the service's share and not a client library's.
ORCHARD_BASE_URL and ORCHARD_API_KEY say where the service is. Prints the metrics as one JSON object.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import aiohttp

from benchmarks.load import SANDBOX
from benchmarks.samples import Metrics, latency, timed
from benchmarks.wire import BenchError
from orchard import AsyncSandboxClient, SandboxClient
from orchard.env.client import Sandbox

_PIECE = 1 << 20
#: Sandboxes that the terminals are spread over.
_PTY_SANDBOXES = 10


def speed(mib: int, wall_s: float) -> dict[str, float]:
    """Megabytes (10^6) a second."""
    return {"mb_per_s": round(mib * 1.048576 / wall_s, 1), "wall_s": round(wall_s, 3), "mib": mib}


class Exchange:
    """One request over a connection of its own."""

    def __init__(self, method: str, path: str, size: int = 0) -> None:
        parts = urlsplit(os.environ["ORCHARD_BASE_URL"])
        self._sock = socket.create_connection((parts.hostname, parts.port or 80))
        lines = [
            f"{method} {path} HTTP/1.1", f"host: {parts.netloc}", f"x-api-key: {os.environ['ORCHARD_API_KEY']}",
            f"content-length: {size}", "connection: close", "", "",
        ]  # fmt: skip
        self._sock.sendall("\r\n".join(lines).encode())

    def send(self, size: int) -> None:
        """So many zero bytes."""
        piece = bytes(_PIECE)
        for _ in range(size // _PIECE):
            self._sock.sendall(piece)

    def receive(self) -> int:
        """The number of bytes of the whole answer, head and chunk marks included; BenchError unless it is a 200."""
        buffer = memoryview(bytearray(_PIECE))
        total = count = self._sock.recv_into(buffer)
        if not bytes(buffer[:12]).endswith(b" 200"):
            raise BenchError(f"no answer: {bytes(buffer[:300])!r}")
        while count:
            count = self._sock.recv_into(buffer)
            total += count
        self._sock.close()
        return total


@contextmanager
def a_sandbox() -> Iterator[Sandbox]:
    with SandboxClient() as client, client.create(SANDBOX["image"]) as sandbox:
        yield sandbox


def expect_all(received: int, mib: int) -> None:
    if received < mib << 20:
        raise BenchError(f"{received} bytes came of {mib << 20}")


def raw_stream(mib: int, _: int) -> Metrics:
    """What a command writes, as plain bytes at one reader."""
    with a_sandbox() as sandbox:
        began = time.perf_counter()
        handle = sandbox.commands.start(
            ["head", "-c", str(mib << 20), "/dev/zero"], max_spool_bytes=mib << 20
        )
        expect_all(Exchange("GET", f"/jobs/{handle.job_id}/stream?raw=stdout").receive(), mib)
        return {"raw_stream": speed(mib, time.perf_counter() - began)}


def file_up(mib: int, _: int) -> Metrics:
    """A file into a sandbox."""
    with a_sandbox() as sandbox:
        began = time.perf_counter()
        exchange = Exchange(
            "PUT", f"/sandboxes/{sandbox.sandbox_id}/files/content?path=/tmp/f", size=mib << 20
        )
        exchange.send(mib << 20)
        exchange.receive()
        wall_s = time.perf_counter() - began
        if sandbox.files.stat("/tmp/f").size != mib << 20:
            raise BenchError("the file is not whole")
        return {"file_up": speed(mib, wall_s)}


def file_down(mib: int, _: int) -> Metrics:
    """A file out of a sandbox."""
    with a_sandbox() as sandbox:
        sandbox.exec(f"head -c {mib << 20} /dev/zero > /tmp/f").check()
        began = time.perf_counter()
        expect_all(
            Exchange("GET", f"/sandboxes/{sandbox.sandbox_id}/files/content?path=/tmp/f").receive(), mib
        )
        return {"file_down": speed(mib, time.perf_counter() - began)}


def sdk_stream(mib: int, _: int) -> Metrics:
    """The same as events at the SDK."""

    async def follow() -> float:
        async with AsyncSandboxClient() as client, await client.create(SANDBOX["image"]) as sandbox:
            began = time.perf_counter()
            handle = await sandbox.commands.start(
                ["head", "-c", str(mib << 20), "/dev/zero"], max_spool_bytes=mib << 20
            )
            received = 0
            async for happening in handle.stream():
                received += len(getattr(happening, "data", b""))
            expect_all(received, mib)
            return time.perf_counter() - began

    return {"sdk_stream": speed(mib, asyncio.run(follow()))}


def ptys(_: int, count: int) -> Metrics:
    """Terminals with `cat`, all open at once: opening each, and a byte there and back, one after the other and while
    all the others are open."""

    async def measure() -> Metrics:
        opening: list[float] = []
        trips: list[float] = []
        headers = {"X-API-Key": os.environ["ORCHARD_API_KEY"]}
        async with AsyncSandboxClient() as client, aiohttp.ClientSession(
            os.environ["ORCHARD_BASE_URL"], headers=headers, connector=aiohttp.TCPConnector(limit=0)
        ) as session:  # fmt: skip
            boxes = [await client.create(SANDBOX["image"]) for _ in range(_PTY_SANDBOXES)]
            began = time.perf_counter()
            turns = asyncio.Semaphore(16)

            async def begin(number: int) -> aiohttp.ClientWebSocketResponse:
                async with turns:
                    with timed(opening):
                        box = boxes[number % _PTY_SANDBOXES]
                        terminal = await session.ws_connect(f"/sandboxes/{box.sandbox_id}/exec/pty")
                        await terminal.send_json({"type": "init", "cmd": ["cat"], "rows": 24, "cols": 80})
                        await frame(terminal, "ready")
                return terminal

            terminals = await asyncio.gather(*(begin(number) for number in range(count)))
            wall_s = time.perf_counter() - began
            for terminal in terminals:
                with timed(trips):
                    await terminal.send_json({"type": "stdin", "data": base64.b64encode(b"x").decode()})
                    await frame(terminal, "stdout")
            await asyncio.gather(*(terminal.close() for terminal in terminals))
            await asyncio.gather(*(box.delete() for box in boxes))
        return {"pty_open": {**latency(opening), "wall_s": round(wall_s, 3)}, "pty_echo": latency(trips)}

    return asyncio.run(measure())


async def frame(terminal: aiohttp.ClientWebSocketResponse, kind: str) -> None:
    message = await terminal.receive_json()
    if message["type"] != kind:
        raise BenchError(f"expected {kind}, got {message}")


SCENARIOS: dict[str, Callable[[int, int], Metrics]] = {
    scenario.__name__: scenario for scenario in (raw_stream, file_up, file_down, sdk_stream, ptys)
}


if __name__ == "__main__":
    print(json.dumps(SCENARIOS[sys.argv[1]](int(sys.argv[2]), int(sys.argv[3]))))
