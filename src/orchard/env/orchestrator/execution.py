"""Running commands: once per job id, followed to their end whatever happens to connections.

The agent inside the sandbox owns a job; here is known which jobs there are, whose they are, and, once finished,
their result. A job that was acknowledged always ends in a terminal state: its own, or that of its sandbox.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from orchard.env.contract import (
    DEFAULT_MAX_OUTPUT_BYTES,
    EndReason,
    ExecRequest,
    JobStatus,
    OnDisconnect,
)
from orchard.env.errors import (
    AgentUnreachable,
    Conflict,
    InfrastructureError,
    InternalError,
    JobNotFound,
    LifetimeExceeded,
    OrchardError,
    Overloaded,
)
from orchard.env.orchestrator.agents import Agents
from orchard.env.orchestrator.jobtable import JobTable, LiveJob, exec_digest, finished_head, output_json
from orchard.env.orchestrator.lifecycle import Lifecycle, stopping
from orchard.env.orchestrator.responses import json_bytes
from orchard.env.orchestrator.sandbox import Sandbox
from orchard.env.orchestrator.settings import ServiceSettings
from orchard.env.orchestrator.stores.base import JobRecord, Store
from orchard.env.runtimes.base import Runtime

_log = logging.getLogger(__name__)
_RECONNECT_MIN_S, _RECONNECT_MAX_S = 0.02, 1.0
#: Finished jobs that a sandbox's agent may keep, to be streamed, before it is told to forget them.
_AGENT_KEEPS = 1000
#: An agent that says nothing must not keep the service from starting.
_ADOPT_S = 10.0
_NEVER_ARRIVED = "the command had not reached its sandbox when the service stopped: it did not run"


class Execution:
    """Starts commands and brings every one to its end; see the module's docstring."""

    def __init__(self, settings: ServiceSettings, runtime: Runtime, store: Store, table: JobTable, agents: Agents,
                 lifecycle: Lifecycle) -> None:  # fmt: skip
        self._settings = settings
        self._runtime = runtime
        self._store = store
        self._table = table
        self._agents = agents
        self._lifecycle = lifecycle
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closing = False
        lifecycle.dependents.append(self)

    # ------------------------------------------------------------------------------------------ running

    async def execute(
        self, sandbox: Sandbox, body: ExecRequest, disconnected: Callable[[], Awaitable[None]]
    ) -> bytes:
        """Run a command, or attach to the one that runs or ran under its job id; the JSON of the answer.

        `disconnected` returns when the caller has gone away. Raises what the command is refused with.
        """
        digest = exec_digest(body)
        known = await self._known(sandbox, body, digest)
        if isinstance(known, JobRecord):
            return known.json() if body.wait else _queued(known.job_id)
        arguments = self._arguments(sandbox, body) if known is None else {}
        job = known or self._admit(sandbox, body, digest)
        if not body.wait:
            if known is None:
                await self._accept(job, arguments, body)
            job.acknowledged = True
            self._table.save_start(job)
            await self._store.flush()
            return _queued(job.job_id)
        if known is not None:
            record = await job.finished()
        elif body.on_disconnect is OnDisconnect.KILL:
            record = await self._run_attended(job, arguments, body, disconnected)
        else:
            record = await self._run(job, arguments, body)
        await self._store.flush()
        return record.json()

    async def _known(self, sandbox: Sandbox, body: ExecRequest, digest: str) -> LiveJob | JobRecord | None:
        """The job that the request's id stands for already. Raises `Conflict` when that is another command."""
        if body.job_id is None:
            return None
        known: LiveJob | JobRecord | None = self._table.live(sandbox.owner, body.job_id)
        if known is None:
            known = await self._table.finished(sandbox.owner, body.job_id)
            # Asking the store may have taken a while: somebody else may have begun it.
            known = self._table.live(sandbox.owner, body.job_id) or known
        if known is not None:
            _check_same(known, sandbox, body, digest)
        return known

    def _admit(self, sandbox: Sandbox, body: ExecRequest, digest: str) -> LiveJob:
        """A new job, which the caller has to run."""
        if self._closing:
            raise stopping("the command was not started")
        if len(self._table) >= self._settings.max_jobs:
            raise Overloaded(
                f"{len(self._table)} commands are running already; try again in a moment", retry_after_s=2.0
            )
        if (error := sandbox.gone()) is not None:
            raise error
        job = LiveJob(body.job_id or "job-" + os.urandom(8).hex(), sandbox, body.command, digest)
        # A command in the background may run for good: it does not speak for its client being alive.
        job.keeps_lease = not body.background
        if job.keeps_lease:
            self._lifecycle.hold(sandbox)
        self._table.add(job)
        return job

    def _arguments(self, sandbox: Sandbox, body: ExecRequest) -> dict[str, Any]:
        """The fields of the agent's `exec`. Raises `LifetimeExceeded`."""
        left_s = max(0.0, sandbox.ttl_deadline - time.monotonic())
        timeout_s = body.timeout_seconds
        if timeout_s is None:
            if not body.background:
                timeout_s = min(self._settings.command_timeout_s, left_s)
        elif timeout_s > left_s:
            raise LifetimeExceeded(
                f"timeout_seconds {timeout_s:g} is longer than the {left_s:.1f} s that sandbox {sandbox.sandbox_id} has"
                " left; ask for less, or PATCH its ttl_seconds first"
            )
        arguments: dict[str, Any] = {
            "command": body.command,
            "timeout_s": timeout_s,
            "max_output_bytes": DEFAULT_MAX_OUTPUT_BYTES
            if body.max_output_bytes is None
            else body.max_output_bytes,
        }
        if body.max_spool_bytes is not None:
            arguments["max_spool_bytes"] = body.max_spool_bytes
        for name, value in (
            ("grace_s", body.grace_seconds), ("cwd", body.cwd), ("env", body.env), ("user", body.user),
            ("login_shell", body.login_shell), ("stdin_open", body.stdin_open), ("background", body.background),
            ("concurrent", body.concurrent), ("session", body.session),
        ):  # fmt: skip
            if value:
                arguments[name] = value
        return arguments

    async def _run(self, job: LiveJob, arguments: dict[str, Any], body: ExecRequest) -> JobRecord:
        """Start it and see it through. Raises what it is refused with."""
        stdin = body.stdin.encode() if body.stdin else b""
        try:
            channel = await self._runtime.channel(job.sandbox.sandbox_id)
            header, payload = await channel.call(
                "exec", stdin, job_id=job.job_id, wait=True, stdin_size=len(stdin), **arguments
            )
        except AgentUnreachable:
            return await self._follow(job, lambda: self._exec_again(job, arguments, stdin))
        except OrchardError as error:
            self._refuse(job, error)
            raise
        except Exception as error:
            self._refuse(
                job, InternalError(f"unforeseen {type(error).__name__} while running the command: {error}")
            )
            raise
        return self._complete(job, header["job"], payload)

    async def _run_attended(self, job: LiveJob, arguments: dict[str, Any], body: ExecRequest,
                            disconnected: Callable[[], Awaitable[None]]) -> JobRecord:  # fmt: skip
        """As `_run`, but cancelled when the caller goes away."""
        run = self._spawn(self._run(job, arguments, body))
        gone = asyncio.ensure_future(disconnected())
        try:
            await asyncio.wait({run, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not run.done():
                await self.cancel(job, "cancelled: its client disconnected")
            record: JobRecord = await run
            return record
        finally:
            gone.cancel()

    async def open_terminal(self, sandbox: Sandbox, body: ExecRequest, rows: int, cols: int) -> LiveJob:
        """Start a command that has a terminal; it lives whether or not anybody is connected to it.

        Raises what the command is refused with.
        """
        arguments = self._arguments(sandbox, body)
        job = self._admit(sandbox, body, exec_digest(body))
        job.terminal = True
        await self._accept(job, {**arguments, "pty": [rows, cols]}, body)
        job.acknowledged = True
        self._table.save_start(job)
        await self._store.flush()
        return job

    async def _accept(self, job: LiveJob, arguments: dict[str, Any], body: ExecRequest) -> None:
        """Start it; it is followed to its end behind the caller's back. Raises what it is refused with."""
        stdin = body.stdin.encode() if body.stdin else b""
        try:
            header, payload = await self._call_exec(job, arguments, stdin)
        except AgentUnreachable:
            self._spawn(self._follow(job, lambda: self._exec_again(job, arguments, stdin)))
            return
        except OrchardError as error:
            self._refuse(job, error)
            raise
        except Exception as error:
            self._refuse(
                job, InternalError(f"unforeseen {type(error).__name__} while starting the command: {error}")
            )
            raise
        if header["job"]["status"] in ("succeeded", "failed"):
            self._complete(job, header["job"], payload)
        else:
            job.pid = header["job"].get("pid")
            self._spawn(self._follow(job, lambda: self._exec_again(job, arguments, stdin)))

    async def _call_exec(
        self, job: LiveJob, arguments: dict[str, Any], stdin: bytes
    ) -> tuple[dict[str, Any], bytes]:
        channel = await self._runtime.channel(job.sandbox.sandbox_id)
        return await channel.call(
            "exec", stdin, job_id=job.job_id, wait=False, stdin_size=len(stdin), **arguments
        )

    async def _exec_again(self, job: LiveJob, arguments: dict[str, Any], stdin: bytes) -> None:
        """The agent does not know the job: the request never reached it, and may be sent again."""
        await self._call_exec(job, arguments, stdin)

    async def _follow(self, job: LiveJob, start_again: Callable[[], Awaitable[None]] | None) -> JobRecord:
        """Wait for the end of a job that its agent has been told of, through broken connections.

        It ends with its own result, with its sandbox, or, when the agent stays out of reach, with both.
        """
        pause_s = _RECONNECT_MIN_S
        lost_at: float | None = None
        while job.record is None:
            if self._closing:
                raise stopping(f"job {job.job_id} goes on")
            asked_at = time.monotonic()
            try:
                channel = await self._runtime.channel(job.sandbox.sandbox_id)
                header, payload = await channel.call("job", job_id=job.job_id, wait=True)
                return self._complete(job, header["job"], payload)
            except AgentUnreachable:
                # A connection that held is not one more failure of those before it.
                if lost_at is None or time.monotonic() - asked_at > _RECONNECT_MAX_S:
                    lost_at, pause_s = time.monotonic(), _RECONNECT_MIN_S
            except JobNotFound:
                if start_again is None:
                    return self._fail(job, _NEVER_ARRIVED)
                try:
                    await start_again()
                except AgentUnreachable:
                    lost_at = lost_at or time.monotonic()
                except OrchardError as error:
                    self._refuse(job, error)
                    return await job.finished()
                continue
            except OrchardError as error:
                return self._fail(job, error.detail, error.code)
            if lost_at is not None and time.monotonic() - lost_at > self._settings.agent_lost_after_s:
                message = f"its agent could not be reached for {self._settings.agent_lost_after_s:g} s"
                self._lifecycle.end(job.sandbox, EndReason.AGENT_LOST, message)
                continue
            # The sandbox's end cuts the pause short.
            await _wait_for(job.sandbox.ended, pause_s)
            pause_s = min(2 * pause_s, _RECONNECT_MAX_S)
        return job.record

    def _complete(self, job: LiveJob, answer: dict[str, Any], payload: bytes) -> JobRecord:
        if job.record is not None:
            return job.record
        record = self._table.complete(job, finished_head(job, answer), output_json(answer, payload))
        self._after(job)
        sandbox = job.sandbox
        sandbox.kept.append(job.job_id)
        if len(sandbox.kept) > _AGENT_KEEPS:
            half = len(sandbox.kept) // 2
            forgotten, sandbox.kept = sandbox.kept[:half], sandbox.kept[half:]
            self._spawn(self._forget(sandbox, forgotten))
        return record

    async def _forget(self, sandbox: Sandbox, job_ids: list[str]) -> None:
        """Let the agent free what is durable here."""
        try:
            await self._store.flush()
            channel = await self._runtime.channel(sandbox.sandbox_id)
            await channel.call("forget", job_ids=job_ids)
        except OrchardError as error:
            _log.debug("an agent keeps finished jobs: %s", error, extra={"sandbox_id": sandbox.sandbox_id})

    def _fail(self, job: LiveJob, error: str, code: str = InfrastructureError.code) -> JobRecord:
        record = self._table.fail(job, error, code, infra=True)
        self._after(job)
        return record

    def _refuse(self, job: LiveJob, error: OrchardError) -> None:
        self._table.refuse(job, error)
        self._after(job)

    def _after(self, job: LiveJob) -> None:
        if job.keeps_lease:
            job.keeps_lease = False
            self._lifecycle.release(job.sandbox)

    def sandbox_ended(self, sandbox: Sandbox, error: OrchardError) -> None:
        """Its commands have ended with it."""
        for job in list(sandbox.jobs.values()):
            self._table.fail(
                job, f"the sandbox ended while the command ran: {error.detail}", error.code, infra=error.infra
            )
            self._after(job)

    async def cancel(self, job: LiveJob, why: str) -> None:
        """Stop it as a timeout would: its grace, then kill. Returns when its agent has seen to it."""
        try:
            header, payload = await self._agents.call(job.sandbox, "cancel", job_id=job.job_id, reason=why)
        except JobNotFound:
            return  # it is on its way there: its end comes by the one who runs it
        except OrchardError:
            if job.record is None:
                raise
        else:
            self._complete(job, header["job"], payload)

    # ------------------------------------------------------------------------------------------ restart

    async def adopt(self, sandbox: Sandbox, known: list[JobRecord]) -> None:
        """Take over the jobs of a sandbox that outlived an earlier run of the service."""
        try:
            async with asyncio.timeout(_ADOPT_S):
                header, _ = await self._agents.call(sandbox, "jobs")
        except TimeoutError:
            raise AgentUnreachable(f"its agent said nothing for {_ADOPT_S:g} s") from None
        digests = {record.job_id: record.digest for record in known}
        for answer in header["jobs"]:
            job_id = answer["job_id"]
            noted = await self._store.job(sandbox.owner, job_id)
            # One of another sandbox is not this agent's to tell of.
            if noted is not None and (noted.finished_at or noted.sandbox_id != sandbox.sandbox_id):
                continue
            job = LiveJob(job_id, sandbox, answer["command"], digests.pop(job_id, ""), answer["created_at"])
            job.acknowledged = True
            job.keeps_lease = not answer.get("background")
            job.pid = answer.get("pid")
            job.terminal = job.pid is not None
            if job.keeps_lease:
                self._lifecycle.hold(sandbox)
            self._table.add(job)
            self._spawn(self._follow(job, None))
        for record in known:
            if record.job_id in digests:
                self.orphaned(sandbox, record, _NEVER_ARRIVED, InfrastructureError.code, infra=True)

    def orphaned(self, sandbox: Sandbox, record: JobRecord, error: str, code: str, *, infra: bool) -> None:
        """A job of an earlier run that nobody can say anything of any more."""
        head = json.loads(record.head)
        job = LiveJob(record.job_id, sandbox, head["command"], record.digest, head["created_at"])
        self._table.fail(job, error, code, infra=infra)

    async def close(self) -> None:
        """Stop following; the jobs go on in their sandboxes."""
        self._closing = True
        self._table.close(stopping("the command goes on"))
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=1.0)

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended_task)
        return task

    def _ended_task(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, OrchardError):
            _log.error("following a command failed in an unforeseen way", exc_info=error)


async def _wait_for(event: asyncio.Event, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        pass


def _check_same(known: LiveJob | JobRecord, sandbox: Sandbox, body: ExecRequest, digest: str) -> None:
    """Raise `Conflict` when a job id stands for something else. A job found again in an agent has no digest; its
    command tells."""
    where = known.sandbox.sandbox_id if isinstance(known, LiveJob) else known.sandbox_id
    if known.digest:
        same = known.digest == digest
    else:
        command = known.command if isinstance(known, LiveJob) else json.loads(known.head)["command"]
        same = command == body.command
    if where != sandbox.sandbox_id or not same:
        raise Conflict(f"job {known.job_id} is another command or on another sandbox; use a new job_id")


def _queued(job_id: str) -> bytes:
    return json_bytes({"job_id": job_id, "status": JobStatus.QUEUED.value})
