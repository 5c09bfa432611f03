"""Terminals: commands with a pseudo-terminal, which outlive the connections to them.

A terminal is a job like any other: its output is kept by the agent, so that a connection that comes back sees what it
missed, and a restart of the service changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from pydantic import ValidationError

from orchard.env.contract import ExecRequest
from orchard.env.errors import Conflict, JobNotFound, JobNotRunning, OrchardError
from orchard.env.orchestrator.agents import Agents
from orchard.env.orchestrator.auth import Principal
from orchard.env.orchestrator.execution import Execution
from orchard.env.orchestrator.jobs import Jobs, signal_number
from orchard.env.orchestrator.jobtable import LiveJob
from orchard.env.orchestrator.responses import from_validation
from orchard.env.orchestrator.sandbox import Sandbox
from orchard.env.orchestrator.stores.base import JobRecord

_log = logging.getLogger(__name__)
_LET_GO_S = 0.5
#: A login shell, with bash where there is one.
_SHELL = ["sh", "-c", "command -v bash >/dev/null 2>&1 && exec bash -l; exec sh -l"]


class Holder:
    """A connection to a terminal. leave: called when another takes the terminal over."""

    def __init__(self, leave: Callable[[], None]) -> None:
        self.leave = leave
        self.gone = asyncio.Event()


class Terminals:
    """detached_s: a terminal to which nobody has come back for so long is ended."""

    def __init__(self, jobs: Jobs, execution: Execution, agents: Agents, detached_s: float) -> None:
        self._jobs = jobs
        self._execution = execution
        self._agents = agents
        self._detached_s = detached_s
        self._holders: dict[tuple[str, str], Holder] = {}
        self._timers: dict[tuple[str, str], asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(
        self, sandbox: Sandbox, command: list[str] | None, rows: int, cols: int, *, env: dict[str, str] | None,
        cwd: str | None, login_shell: bool,
    ) -> LiveJob:  # fmt: skip
        """A new terminal. Raises what the command is refused with."""
        try:
            body = ExecRequest(
                command=command or _SHELL, env={"TERM": "xterm-256color", **(env or {})}, cwd=cwd,
                login_shell=login_shell, background=True,
            )  # fmt: skip
        except ValidationError as error:
            raise from_validation(error) from None
        return await self._execution.open_terminal(sandbox, body, rows, cols)

    async def find(self, principal: Principal, sandbox: Sandbox, pty_id: str) -> LiveJob | JobRecord:
        """One that was opened before, also one that has ended. Raises `JobNotFound`."""
        job = await self._jobs.find(principal, pty_id)
        where = job.sandbox.sandbox_id if isinstance(job, LiveJob) else job.sandbox_id
        if where != sandbox.sandbox_id or (isinstance(job, LiveJob) and not job.terminal):
            raise JobNotFound(f"sandbox {sandbox.sandbox_id} has no terminal {pty_id:.80}")
        return job

    async def attach(self, job: LiveJob, holder: Holder, *, takeover: bool) -> None:
        """Hold the terminal. Raises `Conflict` when somebody else does, unless `takeover`."""
        while (other := self._holders.get(job.key)) is not None:
            if takeover:
                other.leave()
                break
            try:
                # One that has just closed its connection is still being let go.
                async with asyncio.timeout(_LET_GO_S):
                    await other.gone.wait()
            except TimeoutError:
                raise Conflict(
                    f"terminal {job.job_id} is in use; connect with takeover=1 to take it over"
                ) from None
        self._holders[job.key] = holder
        timer = self._timers.pop(job.key, None)
        if timer is not None:
            timer.cancel()

    def detach(self, job: LiveJob, holder: Holder) -> None:
        """The connection has ended; the terminal waits for another."""
        holder.gone.set()
        if self._holders.get(job.key) is not holder:
            return
        del self._holders[job.key]
        self._expect(job)

    def adopt(self, sandbox: Sandbox) -> None:
        """Those that an earlier run of the service has opened wait for their users."""
        for job in sandbox.jobs.values():
            if job.terminal and job.key not in self._holders:
                self._expect(job)

    def _expect(self, job: LiveJob) -> None:
        if job.record is None:
            loop = asyncio.get_running_loop()
            self._timers[job.key] = loop.call_later(self._detached_s, self._abandoned, job)

    def _abandoned(self, job: LiveJob) -> None:
        self._timers.pop(job.key, None)
        task = asyncio.get_running_loop().create_task(
            self.hang_up(job, "nobody was connected to the terminal")
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def hang_up(self, job: LiveJob, why: str = "the terminal was closed") -> None:
        """End it and everything that runs in it."""
        try:
            await self._execution.cancel(job, why)
        except OrchardError as error:
            _log.info("a terminal could not be closed: %s", error, extra={"job_id": job.job_id})

    async def write(self, job: LiveJob, data: bytes) -> None:
        """Typed input; returns when there is room for more. After its end it goes nowhere."""
        try:
            await self._agents.call(job.sandbox, "stdin", data, job_id=job.job_id, eof=False)
        except (JobNotRunning, JobNotFound):
            return

    async def resize(self, job: LiveJob, rows: int, cols: int) -> None:
        try:
            await self._agents.call(job.sandbox, "resize", job_id=job.job_id, rows=rows, cols=cols)
        except (JobNotRunning, JobNotFound):
            return

    async def signal(self, job: LiveJob, name: str) -> None:
        """To all of its processes. Raises `InvalidRequest` for a name that is no signal."""
        number = signal_number(name)
        try:
            await self._agents.call(job.sandbox, "signal", job_id=job.job_id, signal=number)
        except (JobNotRunning, JobNotFound):
            return
