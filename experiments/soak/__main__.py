"""`python -m experiments.soak`: see the package. Prints what was found; exits with 1 if anything is wrong."""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import machine
from experiments.soak.clients import LEASE_S
from experiments.soak.strikes import ClientProcesses, Strikes, come_back, faketime_library, stepped_clock
from experiments.soak.verdict import Verdict, latencies, read, until_gone
from tests.conformance.runtimes import RUNTIMES
from tests.support.machine import Leftovers, resident_bytes
from tests.support.redis import RedisServer
from tests.support.service import Service, live_sandboxes

RESULTS = Path(__file__).resolve().parent.parent / "results"
CLIENT_PROCESSES = 4
#: What ten minutes leave there, and some: results, files, spools.
DISK_MIB = 1024


def soak(folder: Path, seconds: float, clients: int, seed: int) -> dict[str, Any]:
    """Runs it; figures, strikes and faults (empty lists if all is well). Needs root and redis-server."""
    rng = random.Random(seed)
    disk = folder / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "soak", str(disk)], check=True)
    redis = RedisServer().start()
    runtime = RUNTIMES["local"]
    clock = folder / "clock" if faketime_library() is not None else None
    options = (*runtime.serve_arguments, "--redis-url", redis.url, "--max-starting", "4")
    key = f"soak-{seed}"
    services = [
        Service(disk / "state", arguments=options, api_key=key, name="-A", logs=folder),
        Service(disk / "state", arguments=options, api_key=key, name="-B", logs=folder,
                environment=stepped_clock(clock) if clock is not None else {}),
    ]  # fmt: skip
    try:
        with ThreadPoolExecutor() as pool:
            list(pool.map(Service.start, services))
        memory_before = [resident_bytes(service.pid) for service in services]
        processes = ClientProcesses(folder, services, CLIENT_PROCESSES, clients // CLIENT_PROCESSES, rng)
        strikes = Strikes(services, redis, processes, disk, clock, rng)
        began = time.monotonic()
        strikes.run(seconds)
        stuck = processes.stop()
        wall_s = time.monotonic() - began
        _mend(services, redis, disk)
        owed = read(folder)
        verdict = Verdict(owed, services[0].rest, strikes.killed_agents, processes.killed)
        verdict.find()
        abandoned = {box for box, client in owed.ready.items() if client in processes.killed}
        outlived = until_gone(services[1].rest, abandoned, LEASE_S + 30)
        memory_after = [resident_bytes(service.pid) for service in services]
        leftovers = _end(services, disk, owed.asked)
    finally:
        for service in services:
            if service.running:
                service.kill()
        redis.end()
        subprocess.run(["umount", "-l", str(disk)], check=False)
    faults = verdict.faults() | {
        "clients that hang": stuck, "strikes that failed": strikes.failures, "outlived their client": outlived,
        "leftovers": leftovers,
    }  # fmt: skip
    return {
        "seed": seed, "seconds": round(wall_s, 1), "clients": clients, "stepped_clock": clock is not None,
        "strikes": dict(sorted(strikes.counts.items())), "acknowledged_commands": len(owed.acked),
        "sandboxes": len(owed.ready), "checked": dict(verdict.checked), "sandboxes_not_ready": dict(owed.unready),
        "actions": latencies(owed), "service_mib_before": [round(b / 2**20, 1) for b in memory_before],
        "service_mib_after": [round(b / 2**20, 1) for b in memory_after],
        "faults": {name: found[:20] for name, found in faults.items()},
        "fault_counts": {name: len(found) for name, found in faults.items()},
    }  # fmt: skip


def _mend(services: list[Service], redis: RedisServer, disk: Path) -> None:
    """Everything runs again before anything is looked at."""
    (disk / "filler").unlink(missing_ok=True)
    if redis.running:
        redis.thaw()
    else:
        redis.start()
    for service in services:
        if not service.running:
            come_back(service)


def _end(services: list[Service], disk: Path, sandbox_ids: set[str]) -> list[str]:
    """Deletes all and stops; what is left on the machine."""
    services[0].delete_all()
    left = [f"{each['sandbox_id']} is still listed" for each in live_sandboxes(services[1].rest)]
    for service in services:
        code = service.stop()
        if code != 0:
            left.append(f"a service ended with {code}: {service.log()[-500:]}")
    state = disk / "state"
    for service in services:
        for place in [state, *(state / "seats").glob("[0-9]*")]:
            try:
                Leftovers(service.mark, place, sandbox_ids, RUNTIMES["local"].tags(place)).check()
            except AssertionError as error:
                left.append(str(error)[:2000])
    return left


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.soak")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seed", type=int, default=20261130)
    parser.add_argument("--output", type=Path, help="where the JSON goes (default: experiments/results/)")
    options = parser.parse_args()
    document = machine.describe()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        document["result"] = soak(Path(folder), options.seconds, options.clients, options.seed)
    output = options.output or RESULTS / f"soak-{document['date'][:10]}-{document['commit'][:8]}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
    print(json.dumps(document["result"], indent=2, ensure_ascii=False))
    if any(document["result"]["fault_counts"].values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
