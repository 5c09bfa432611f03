"""The SDK's figures, as `benchmarks.load` but through `AsyncSandboxClient`: what a program in Python sees."""

from __future__ import annotations

import asyncio
import json
import sys
import time

import uvloop

from benchmarks.load import SANDBOX
from benchmarks.samples import Metrics, latency, throughput, timed
from orchard import AsyncSandboxClient


async def create_first_exec(client: AsyncSandboxClient, count: int, _: int) -> Metrics:
    """One after the other: create, exec; then delete."""
    first: list[float] = []
    gone: list[float] = []
    for number in range(count + 10):
        with timed(first):
            sandbox = await client.create(**SANDBOX)
            (await sandbox.exec(["true"])).check()
        with timed(gone):
            await sandbox.delete()
        if number == 9:  # the first ones warm up
            first, gone = [], []
    return {"create_first_exec": latency(first), "delete": latency(gone)}


async def exec_true(client: AsyncSandboxClient, count: int, concurrency: int) -> Metrics:
    """Round trips of `true`, `concurrency` at a time, each in a sandbox of its own."""
    boxes = [await client.create(**SANDBOX) for _ in range(concurrency)]
    samples: list[float] = []
    left = iter(range(count))

    async def drive(number: int) -> None:
        for _ in left:
            with timed(samples):
                (await boxes[number].exec(["true"])).check()

    for box in boxes:
        await box.exec(["true"])
    began = time.perf_counter()
    await asyncio.gather(*(drive(number) for number in range(concurrency)))
    wall_s = time.perf_counter() - began
    await asyncio.gather(*(box.delete() for box in boxes))
    return {f"exec_c{concurrency}": throughput(samples, wall_s)}


async def run(scenario: str, count: int, concurrency: int) -> Metrics:
    # ORCHARD_BASE_URL and ORCHARD_API_KEY say where the service is.
    async with AsyncSandboxClient() as client:
        return await {"create_first_exec": create_first_exec, "exec_true": exec_true}[scenario](
            client, count, concurrency
        )


if __name__ == "__main__":
    print(json.dumps(uvloop.run(run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))))
