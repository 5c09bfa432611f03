"""The raw load generator: `python -m benchmarks.load SCENARIO [N] [CONCURRENCY]`, a process of its own.

ORCHARD_BASE_URL and ORCHARD_API_KEY say where the service is. Prints the metrics as one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable

import uvloop

from benchmarks.samples import Metrics, latency, memory_available, memory_each, throughput, timed
from benchmarks.wire import Address, BenchError, Connection

#: Limits as they are set in practice: each costs a control group its share of the creation time.
SANDBOX = {"image": "host", "memory": "512Mi", "pids": 256}
TRUE = json.dumps({"command": ["true"], "wait": True}).encode()
#: The four commands of the stress test, with what each must print.
COMMANDS: tuple[tuple[str | list[str], str], ...] = (
    (["true"], ""),
    ("echo one > /tmp/number", ""),
    (["cat", "/tmp/number"], "one\n"),
    ("test -d /usr && echo there", "there\n"),
)


async def create(connection: Connection) -> str:
    """A ready sandbox's id."""
    answer = await connection.json("POST", "/sandboxes?wait=120", SANDBOX)
    if answer["status"] != "ready":
        raise BenchError(f"sandbox is {answer['status']}: {answer.get('status_message')}")
    sandbox_id: str = answer["sandbox_id"]
    return sandbox_id


async def delete(connection: Connection, sandbox_id: str) -> None:
    await connection.json("DELETE", f"/sandboxes/{sandbox_id}")


async def run_true(connection: Connection, sandbox_id: str) -> None:
    status, body = await connection.request("POST", f"/sandboxes/{sandbox_id}/exec", TRUE)
    if status != 200 or b'"succeeded"' not in body:
        raise BenchError(f"exec of true: HTTP {status} {body[:300]!r}")


async def share(
    connections: list[Connection], count: int, work: Callable[[Connection], Awaitable[None]]
) -> float:
    """`work` `count` times, each connection taking the next when it is free; the wall time in seconds."""
    left = iter(range(count))

    async def drive(connection: Connection) -> None:
        for _ in left:
            await work(connection)

    began = time.perf_counter()
    await asyncio.gather(*(drive(connection) for connection in connections))
    return time.perf_counter() - began


async def create_first_exec(address: Address, count: int, _: int) -> Metrics:
    """One after the other: create, wait, exec; then delete."""
    connection = await address.connect()
    ready, first, gone = [], [], []
    for number in range(count + 10):
        with timed(first):
            with timed(ready):
                sandbox_id = await create(connection)
            await run_true(connection, sandbox_id)
        with timed(gone):
            await delete(connection, sandbox_id)
        if number == 9:  # the first ones warm up
            ready, first, gone = [], [], []
    return {"create_first_exec": latency(first), "create": latency(ready), "delete": latency(gone)}


async def creates(address: Address, count: int, concurrency: int) -> Metrics:
    """Creations at a concurrency; the sandboxes live until all are there. Once before, not counted: what is made for
    each place of a sandbox when it is first used (a user namespace) is there from then on."""
    connections = await address.connect_many(concurrency)
    samples: list[float] = []
    made: list[str] = []

    async def one(connection: Connection) -> None:
        with timed(samples):
            made.append(await create(connection))

    await share(connections, count, one)
    await remove_all(connections, made)
    samples.clear()
    made.clear()
    wall_s = await share(connections, count, one)
    deletes_s = await remove_all(connections, made)
    return {
        f"creates_c{concurrency}": throughput(samples, wall_s),
        f"deletes_c{concurrency}": {"per_s": round(count / deletes_s, 1), "n": count},
    }


async def remove_all(connections: list[Connection], made: list[str]) -> float:
    """Deletes all at the connections' concurrency; the wall time in seconds."""
    rest = list(made)

    async def one(connection: Connection) -> None:
        await delete(connection, rest.pop())

    return await share(connections, len(made), one)


async def exec_true(address: Address, count: int, concurrency: int) -> Metrics:
    """Round trips of `true`, each connection with a sandbox of its own."""
    connections = await address.connect_many(concurrency)
    boxes = {connection: await create(connection) for connection in connections}
    samples: list[float] = []

    async def one(connection: Connection) -> None:
        with timed(samples):
            await run_true(connection, boxes[connection])

    await share(connections, 10 * concurrency, one)
    samples.clear()
    wall_s = await share(connections, count, one)
    await remove_all(connections, list(boxes.values()))
    return {f"exec_c{concurrency}": throughput(samples, wall_s)}


async def idle_memory(address: Address, count: int, concurrency: int) -> Metrics:
    """The fall of MemAvailable while `count` sandboxes are there and do nothing."""
    connections = await address.connect_many(concurrency)
    for _ in range(2):  # caches of the service and the kernel fill first
        await remove_all(connections, [await create(connections[0]) for _ in range(20)])
    made: list[str] = []

    async def one(connection: Connection) -> None:
        made.append(await create(connection))

    before = memory_available()
    await share(connections, count, one)
    after = memory_available()
    await remove_all(connections, made)
    return {"idle_memory": memory_each(before, after, count)}


async def lifecycle(address: Address, count: int, concurrency: int) -> Metrics:
    """The stress test: all sandboxes at once, each on its own connection: create, four commands, delete."""
    connections = await address.connect_many(concurrency)
    samples: list[float] = []
    failures: list[str] = []

    async def one(connection: Connection) -> None:
        try:
            with timed(samples):
                await live(connection)
        except BenchError as error:
            failures.append(str(error))

    wall_s = await share(connections, count, one)
    result = {**throughput(samples, wall_s), "n": count, "success_rate": 1 - len(failures) / count}
    if failures:
        result["first_failure"] = failures[0][:500]
    return {"lifecycle": result}


async def live(connection: Connection) -> None:
    sandbox_id = await create(connection)
    for command, printed in COMMANDS:
        payload = {"command": command, "wait": True}
        job = await connection.json("POST", f"/sandboxes/{sandbox_id}/exec", payload)
        if job["status"] != "succeeded" or job["stdout"] != printed:
            raise BenchError(f"{command} gave {job['status']}, {job['stdout']!r}, {job['stderr']!r}")
    await delete(connection, sandbox_id)


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (create_first_exec, creates, exec_true, idle_memory, lifecycle)
}


def main() -> None:
    scenario = SCENARIOS[sys.argv[1]]
    count, concurrency = int(sys.argv[2]), int(sys.argv[3])
    address = Address(os.environ["ORCHARD_BASE_URL"], os.environ["ORCHARD_API_KEY"])
    print(json.dumps(uvloop.run(scenario(address, count, concurrency))))


if __name__ == "__main__":
    main()
