"""Looking at commands and steering them, by job id, for those who may."""

from __future__ import annotations

import asyncio
import base64
import signal

from orchard.env.contract import SignalRequest, StdinRequest
from orchard.env.errors import InvalidRequest, JobNotFound, JobNotRunning, OrchardError, SandboxTimeout
from orchard.env.orchestrator.agents import Agents
from orchard.env.orchestrator.auth import Principal
from orchard.env.orchestrator.execution import Execution
from orchard.env.orchestrator.jobtable import JobTable, LiveJob, finished_head
from orchard.env.orchestrator.responses import json_bytes
from orchard.env.orchestrator.sandbox import Sandbox
from orchard.env.orchestrator.settings import ServiceSettings
from orchard.env.orchestrator.stores.base import NO_OUTPUT, JobRecord, Store

#: Looking at a running job asks its agent, for at most this long.
_LOOK_S = 2.0


class Jobs:
    """Answers are JSON, ready to be sent."""

    def __init__(self, settings: ServiceSettings, store: Store, table: JobTable, agents: Agents,
                 execution: Execution) -> None:  # fmt: skip
        self._settings = settings
        self._store = store
        self._table = table
        self._agents = agents
        self._execution = execution

    async def find(self, principal: Principal, job_id: str) -> LiveJob | JobRecord:
        """Raises `JobNotFound`, the same for unknown and others'."""
        found = await self._table.visible(principal, job_id)
        if found is None:
            raise JobNotFound(
                f"job {job_id:.80} does not exist (finished ones are kept for {self._settings.job_retention_s:g} s)"
            )
        return found

    async def known(self, principal: Principal, job_id: str) -> bool:
        """Whether there is such a job that the caller may see."""
        return await self._table.visible(principal, job_id) is not None

    async def look(self, principal: Principal, job_id: str) -> bytes:
        """A job as JSON, as it is now."""
        job = await self.find(principal, job_id)
        if isinstance(job, JobRecord):
            return job.json()
        head = job.head()
        try:
            async with asyncio.timeout(_LOOK_S):
                header, _ = await self._agents.call(job.sandbox, "job", job_id=job.job_id)
                if header["job"]["status"] not in ("succeeded", "failed"):
                    head = finished_head(job, header["job"])
                else:
                    # Its end is on its way here.
                    return (await job.finished()).json()
        except (TimeoutError, OrchardError):
            pass
        job.acknowledged = True
        if job.record is None:
            self._table.save_start(job)
        await self._store.flush()
        return job.record.json() if job.record is not None else json_bytes(head)[:-1] + NO_OUTPUT

    async def wait(self, principal: Principal, job_id: str, timeout_s: float | None) -> bytes:
        """A job as JSON when it has finished. Raises `SandboxTimeout` when the time is over first."""
        job = await self.find(principal, job_id)
        record = job if isinstance(job, JobRecord) else await self._finished(job, timeout_s)
        await self._store.flush()
        return record.json()

    async def _finished(self, job: LiveJob, timeout_s: float | None) -> JobRecord:
        try:
            async with asyncio.timeout(timeout_s):
                return await job.finished()
        except TimeoutError:
            job.acknowledged = True
            raise SandboxTimeout(
                f"job {job.job_id} has not finished after {timeout_s:g} s; wait again, or DELETE it"
            ) from None

    async def listing(self, sandbox: Sandbox) -> bytes:
        """The jobs of a live sandbox as JSON, without their output, oldest first."""
        header, _ = await self._agents.call(sandbox, "jobs")
        parts = []
        for answer in header["jobs"]:
            job = sandbox.jobs.get(answer["job_id"]) or LiveJob(
                answer["job_id"], sandbox, answer["command"], ""
            )
            parts.append(json_bytes(finished_head(job, answer))[:-1] + NO_OUTPUT)
        return b'{"jobs":[' + b",".join(parts) + b"]}"

    # ----------------------------------------------------------------------------------------- steering

    async def cancel(self, principal: Principal, job_id: str) -> bytes:
        """Stop it as a timeout would (grace, then kill); its JSON. A finished one stays as it is."""
        job = await self.find(principal, job_id)
        if isinstance(job, JobRecord):
            return job.json()
        job.acknowledged = True
        await self._execution.cancel(job, "cancelled on request")
        record = await job.finished()
        await self._store.flush()
        return record.json()

    async def signal(self, principal: Principal, job_id: str, body: SignalRequest) -> None:
        """Send a signal to all of its processes."""
        number = signal_number(body.signal)
        job = await self._running(principal, job_id)
        await self._agents.call(job.sandbox, "signal", job_id=job.job_id, signal=number)

    async def stdin(self, principal: Principal, job_id: str, body: StdinRequest) -> None:
        """Input for a command with open stdin; returns when there is room for it."""
        job = await self._running(principal, job_id)
        await self._agents.call(
            job.sandbox, "stdin", base64.b64decode(body.data), job_id=job.job_id, eof=body.eof
        )

    async def _running(self, principal: Principal, job_id: str) -> LiveJob:
        job = await self.find(principal, job_id)
        if isinstance(job, JobRecord):
            raise JobNotRunning(f"job {job_id} has finished; only a running one takes signals and input")
        return job


def signal_number(name: str) -> int:
    text = name.upper().removeprefix("SIG")
    if text.isascii() and text.isdigit() and len(text) <= 2 and 1 <= int(text) <= 64:
        return int(text)
    try:
        return signal.Signals[f"SIG{text}"].value
    except KeyError:
        raise InvalidRequest(
            f"signal {name!r} is unknown: use a name such as TERM, INT, KILL, HUP or USR1"
        ) from None
