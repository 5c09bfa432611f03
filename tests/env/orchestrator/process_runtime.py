"""A small runtime for tests of the orchestrator alone: sandboxes are directories, agents live in this process and
run real commands without isolation. What a test cannot provoke in the real one, it can here: slow and failing
starts, channels that break while the agent lives, sandboxes that die, a runtime that cannot free."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchard.env.contract import EndReason
from orchard.env.errors import AgentUnreachable, CwdNotFound, JobNotFound
from orchard.env.runtimes.base import Handle, Postmortem, SandboxSpec, Usage


@dataclass
class AgentJob:
    job_id: str
    command: str | list[str]
    internal: bool
    created_at: float = field(default_factory=time.time)
    started_at: float | None = None
    completed_at: float | None = None
    status: str = "queued"
    exit_code: int | None = None
    signal: str | None = None
    error: str | None = None
    error_code: str | None = None
    timed_out: bool = False
    stdout: bytes = b""
    stderr: bytes = b""
    process: asyncio.subprocess.Process | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def record(self) -> dict[str, Any]:
        finished = self.completed_at is not None
        duration = self.completed_at - self.started_at if self.completed_at and self.started_at else None
        return {
            "job_id": self.job_id, "command": self.command, "status": self.status, "exit_code": self.exit_code,
            "signal": self.signal, "created_at": self.created_at, "started_at": self.started_at,
            "completed_at": self.completed_at, "duration_s": duration, "queue_s": 0.0,
            "timed_out": self.timed_out, "oom_killed": False, "error": self.error, "error_code": self.error_code,
            "stdout_bytes": len(self.stdout), "stderr_bytes": len(self.stderr), "stdout_truncated": False,
            "stderr_truncated": False, "stdout_size": len(self.stdout) if finished else 0,
            "stderr_size": len(self.stderr) if finished else 0,
            "session_reset": False,
        }  # fmt: skip


def _is_directory(path: str) -> bool:
    return Path(path).is_dir()


class Agent:
    """Owns the jobs of one sandbox. `runs` counts every start of a command."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.jobs: dict[str, AgentJob] = {}
        self.runs = 0
        self.killed = False
        self.forgotten: list[str] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def exec(self, payload: bytes, args: dict[str, Any]) -> AgentJob:
        cwd = args.get("cwd") or str(self.folder)
        if not _is_directory(cwd):
            raise CwdNotFound(f"{cwd} does not exist")
        job = self.jobs.get(args["job_id"])
        if job is None:
            job = self.jobs[args["job_id"]] = AgentJob(
                args["job_id"], args["command"], bool(args.get("internal"))
            )
            task = asyncio.create_task(self._run(job, cwd, payload, args.get("timeout_s")))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return job

    async def _run(self, job: AgentJob, cwd: str, stdin: bytes, timeout_s: float | None) -> None:
        self.runs += 1
        argv = ["sh", "-c", job.command] if isinstance(job.command, str) else job.command
        job.started_at, job.status = time.time(), "running"
        pipe = asyncio.subprocess.PIPE
        try:
            job.process = await asyncio.create_subprocess_exec(
                *argv, stdin=pipe, stdout=pipe, stderr=pipe, cwd=cwd, start_new_session=True
            )
        except FileNotFoundError:
            job.exit_code, job.error_code = 127, "command_not_found"
            self._finish(job)
            return
        if self.killed or job.error is not None:
            self._kill(job)  # stopped while it was being started
        try:
            async with asyncio.timeout(timeout_s):
                job.stdout, job.stderr = await job.process.communicate(stdin)
            job.exit_code = job.process.returncode
        except TimeoutError:
            self._kill(job)
            job.exit_code, job.timed_out, job.error, job.error_code = 124, True, "timed out", "timeout"
        if job.exit_code is not None and job.exit_code < 0:
            job.signal, job.exit_code = signal.Signals(-job.exit_code).name[3:], 128 - job.exit_code
        self._finish(job)

    def _finish(self, job: AgentJob) -> None:
        job.completed_at = time.time()
        job.status = "succeeded" if job.exit_code == 0 and job.error is None else "failed"
        job.done.set()

    def _kill(self, job: AgentJob) -> None:
        if job.process is not None and job.process.returncode is None:
            with suppress(ProcessLookupError):  # killed before, and its end not yet seen
                os.killpg(job.process.pid, signal.SIGKILL)

    def cancel(self, job: AgentJob, reason: str) -> None:
        if job.completed_at is None:
            job.error, job.error_code = reason, "cancelled"
            self._kill(job)

    async def quiet(self) -> None:
        """Returns when no command runs."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def kill(self) -> None:
        self.killed = True
        for job in self.jobs.values():
            self._kill(job)


class Channel:
    """Answers come from the agent; `broken` ends every call under way, the agent lives on."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.broken = asyncio.Event()
        self.calls: list[str] = []

    @property
    def closed(self) -> bool:
        return self.broken.is_set()

    async def close(self) -> None:
        self.broken.set()

    async def call(self, op: str, payload: bytes = b"", /, **args: Any) -> tuple[dict[str, Any], bytes]:
        self.calls.append(op)
        if self.closed:
            raise AgentUnreachable("the channel is broken")
        answer = asyncio.create_task(self._answer(op, payload, args))
        broken = asyncio.create_task(self.broken.wait())
        await asyncio.wait({answer, broken}, return_when=asyncio.FIRST_COMPLETED)
        broken.cancel()
        if not answer.done():
            answer.cancel()
            raise AgentUnreachable("the channel broke")
        return answer.result()

    async def _answer(self, op: str, payload: bytes, args: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        agent = self._agent
        if op == "exec":
            job = await agent.exec(payload, args)
        elif op == "jobs":
            return {"jobs": [job.record() for job in agent.jobs.values() if not job.internal]}, b""
        elif op == "forget":
            agent.forgotten += args["job_ids"]
            for job_id in args["job_ids"]:
                agent.jobs.pop(job_id, None)
            return {}, b""
        elif args["job_id"] not in agent.jobs:
            raise JobNotFound("unknown to the agent")
        else:
            job = agent.jobs[args["job_id"]]
        if op == "cancel":
            agent.cancel(job, args["reason"])
        if args.get("wait") or op == "cancel":
            await job.done.wait()
        return {"job": job.record()}, job.stdout + job.stderr if job.completed_at else b""


@dataclass
class ProcessHandle:
    sandbox_id: str
    state: dict[str, Any]


@dataclass
class Place:
    """What outlives an orchestrator: sandboxes by id. Give one place to several runtimes, one after the other."""

    folder: Path
    agents: dict[str, Agent] = field(default_factory=dict)
    everyone: list[Agent] = field(default_factory=list)

    async def end(self) -> None:
        """Nothing runs any more."""
        for agent in self.everyone:
            agent.kill()
        for agent in self.everyone:
            await agent.quiet()


class ProcessRuntime:
    """gate: starts wait for it. failures: raised by the next starts. delete_failures: raised by the next deletes."""

    name = "process"

    def __init__(self, place: Place) -> None:
        self.place = place
        self.on_death: Callable[[str, Postmortem], None] = lambda _id, _postmortem: None
        self.gate = asyncio.Event()
        self.gate.set()
        self.failures: list[Exception] = []
        self.delete_failures: list[Exception] = []
        self.channels: dict[str, Channel] = {}
        self.unreachable: set[str] = set()
        self.starting = 0
        self.most_starting = 0
        self.created: list[str] = []

    async def start(self) -> None: ...

    async def close(self) -> None:
        for channel in self.channels.values():
            await channel.close()

    async def create(self, spec: SandboxSpec, progress: Callable[[str], None] = lambda _line: None) -> Handle:
        self.starting += 1
        self.most_starting = max(self.most_starting, self.starting)
        try:
            await self.gate.wait()
            if self.failures:
                raise self.failures.pop(0)
            folder = self.place.folder / spec.sandbox_id
            folder.mkdir()
            agent = self.place.agents[spec.sandbox_id] = Agent(folder)
            self.place.everyone.append(agent)
            self.created.append(spec.sandbox_id)
            progress("directory made")
            return ProcessHandle(spec.sandbox_id, {"folder": str(folder)})
        finally:
            self.starting -= 1

    async def delete(self, sandbox_id: str) -> Postmortem:
        if self.delete_failures:
            raise self.delete_failures.pop(0)
        agent = self.place.agents.pop(sandbox_id, None)
        if agent is not None:
            agent.kill()
        self.break_channel(sandbox_id)
        return Postmortem(EndReason.DELETED, peak_memory_bytes=4096, agent_log=("1.5 last words",))

    async def channel(self, sandbox_id: str) -> Channel:
        agent = self.place.agents.get(sandbox_id)
        if agent is None or sandbox_id in self.unreachable:
            raise AgentUnreachable("no agent there")
        channel = self.channels.get(sandbox_id)
        if channel is None or channel.closed:
            channel = self.channels[sandbox_id] = Channel(agent)
        return channel

    async def adopt(self, states: Mapping[str, dict[str, Any]]) -> dict[str, Handle | Postmortem]:
        found: dict[str, Handle | Postmortem] = {}
        for sandbox_id, state in states.items():
            if sandbox_id in self.place.agents:
                found[sandbox_id] = ProcessHandle(sandbox_id, state)
            else:
                found[sandbox_id] = Postmortem(EndReason.AGENT_LOST, "it was gone")
        for sandbox_id in set(self.place.agents) - set(states):
            self.place.agents.pop(sandbox_id).kill()
        return found

    async def usage(self, sandbox_id: str) -> Usage:
        return Usage(pids=1)

    async def agent_log(self, sandbox_id: str) -> list[str]:
        return ["12.5 agent started"]

    async def resources(self) -> dict[str, Any]:
        return {"cpu_cores": 1.0, "memory_bytes": 1, "memory_available_bytes": 1}

    def describe(self) -> list[str]:
        return ["no isolation at all"]

    # ------------------------------------------------------------------------------------------- faults

    def break_channel(self, sandbox_id: str) -> None:
        """The connection ends; the agent lives on."""
        channel = self.channels.get(sandbox_id)
        if channel is not None:
            channel.broken.set()

    def die(self, sandbox_id: str, postmortem: Postmortem) -> None:
        """The sandbox ends by itself."""
        self.place.agents.pop(sandbox_id).kill()
        self.break_channel(sandbox_id)
        self.on_death(sandbox_id, postmortem)
