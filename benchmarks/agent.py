"""The agent without HTTP: a command through its channel against a bare spawn of the same command.

Both in this process, in turns, so that they see the same machine.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.samples import Metrics, latency, timed
from benchmarks.scale import Scale
from orchard.env.runtimes.base import AgentChannel, SandboxSpec
from orchard.env.runtimes.registry import make_runtime

NAME = "agent (no HTTP)"
TRUE = "/usr/bin/true"
ALIVE = 50


def missing() -> str | None:
    """Why it cannot be measured here, or None."""
    return None if os.geteuid() == 0 else "the local runtime needs root"


def measure(scale: Scale) -> Metrics:
    with tempfile.TemporaryDirectory(prefix="bench-agent-") as folder:
        return uvloop.run(_measure(Path(folder), scale.execs // 2))


async def _measure(state_dir: Path, count: int) -> Metrics:
    runtime = make_runtime("local", state_dir)
    await runtime.start()
    specs = [SandboxSpec(sandbox_id=f"bench{number}", image="host") for number in range(ALIVE)]
    try:
        handles = [await runtime.create(spec, lambda _: None) for spec in specs]
        channel = await runtime.channel(specs[0].sandbox_id)
        metrics = await _exec_and_spawn(channel, count)
        shares = [_proportional_bytes(handle.state) / 2**20 for handle in handles]
        metrics["agent_memory"] = {"pss_mib": round(sum(shares) / ALIVE, 3), "n": ALIVE}
    finally:
        for spec in specs:
            await runtime.delete(spec.sandbox_id)
        await runtime.close()
    return metrics


async def _exec_and_spawn(channel: AgentChannel, count: int) -> Metrics:
    through_agent: list[float] = []
    bare: list[float] = []
    for number in range(count + 20):
        with timed(through_agent):
            answer, _ = await channel.call("exec", job_id=f"job{number}", command=[TRUE], wait=True)
        if answer["job"]["exit_code"] != 0:
            raise RuntimeError(f"exec of {TRUE}: {answer}")
        with timed(bare):
            _spawn()
        await channel.call("forget", job_ids=[f"job{number}"])
    agent, spawn = latency(through_agent[20:]), latency(bare[20:])
    over = {"p50_ms": round(agent["p50_ms"] - spawn["p50_ms"], 3)}
    return {"agent_exec": agent, "spawn": spawn, "agent_over_spawn": over}


def _spawn() -> None:
    os.waitpid(os.posix_spawn(TRUE, [TRUE], {}), 0)


def _proportional_bytes(state: Mapping[str, Any]) -> int:
    """Proportional set size of the agent: what it shares with others counts in equal parts."""
    text = Path(f"/proc/{state['pid']}/smaps_rollup").read_text()
    found = re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0
