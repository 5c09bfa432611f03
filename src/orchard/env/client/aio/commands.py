"""Commands that are started now and waited for later."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TypeAlias

from orchard.env.client.aio import jobs, streams
from orchard.env.client.results import JobResult, JobResultList, OutputChunk, OutputGap
from orchard.env.client.transport import Repeat, Transport, build, encode, path_of
from orchard.env.contract import (
    Base64,
    ExecRequest,
    JobStatus,
    Ok,
    SignalRequest,
    StdinRequest,
)
from orchard.env.errors import JobNotRunning

#: A string runs in a shell; a sequence is exact argv.
Command: TypeAlias = str | Sequence[str]
#: A class with a method `list` cannot name the type in its annotations.
JobResults: TypeAlias = list[JobResult]


def exec_request(command: Command, **fields: object) -> ExecRequest:
    """The request for `command`. Raises `InvalidRequest`."""
    argv = command if isinstance(command, str) else list(command)
    return build(ExecRequest, command=argv, **fields)


class AsyncCommandHandle:
    """A command that was started. It runs on whether or not anybody waits for it."""

    def __init__(
        self, transport: Transport, sandbox_id: str, job_id: str, job: JobResult | None = None
    ) -> None:
        self._transport = transport
        self._sandbox_id = sandbox_id
        self._job_id = job_id
        self._job = job

    @property
    def job_id(self) -> str:
        """The id under which `commands.attach` finds it again, from any client."""
        return self._job_id

    @property
    def sandbox_id(self) -> str:
        """The sandbox it runs in."""
        return self._sandbox_id

    @property
    def job(self) -> JobResult | None:
        """What was last heard of it; None before the first `refresh` or `wait`."""
        return self._job

    @property
    def status(self) -> JobStatus:
        """The status that was last heard of."""
        return self._job.status if self._job is not None else JobStatus.QUEUED

    async def refresh(self) -> JobResult:
        """Ask how it is."""
        self._job = await jobs.fetch(self._transport, self._job_id)
        return self._job

    async def wait(self, timeout_s: float | None = None, *, check: bool = False) -> JobResult:
        """Its result, once it has ended.

        check: raise `CommandFailed` or `CommandTimeout` unless it exited with 0. Raises `SandboxTimeout` (a
        `TimeoutError`) after `timeout_s` seconds; the command goes on. A failure of infrastructure raises its
        own typed error.
        """
        job = await jobs.wait(self._transport, self._job_id, timeout_s)
        self._job = job
        job.raise_for_infrastructure()
        return job.check() if check else job

    async def stream(
        self, stdout_offset: int = 0, stderr_offset: int = 0
    ) -> AsyncIterator[OutputChunk | OutputGap]:
        """Follow its output from the given offsets in bytes on, until it has ended; `job` is its result then.

        Goes on over broken connections, losing and repeating nothing. The service keeps the newest 64 MiB of each
        stream (`max_spool_bytes`) for its readers: what is older comes as an `OutputGap`. Leaving early leaves the
        command alone.
        """
        async for happening in streams.follow(self._transport, self._job_id, stdout_offset, stderr_offset):
            if isinstance(happening, JobResult):
                self._job = happening
            else:
                yield happening

    async def cancel(self) -> JobResult:
        """Stop it and everything it started, as its timeout would (SIGTERM, the grace time, SIGKILL)."""
        try:
            await self._transport.request("DELETE", path_of("jobs", self._job_id))
        except JobNotRunning:
            pass
        return await self.refresh()

    async def signal(self, signal: str) -> None:
        """Send a signal such as "INT" or "SIGUSR1" to every process of the command.

        Raises `JobNotRunning` when it has ended.
        """
        body = encode(build(SignalRequest, signal=signal))
        path = path_of("jobs", self._job_id, "signal")
        await self._transport.request("POST", path, body=body, repeat=Repeat.UNSENT_ONLY)

    async def kill(self) -> None:
        """Send SIGKILL to every process of the command; a command that has ended is fine."""
        try:
            await self.signal("KILL")
        except JobNotRunning:
            pass

    async def send_stdin(self, data: bytes | str = b"", *, eof: bool = False) -> None:
        """Give input to a command started with `stdin_open=True`; text is sent as UTF-8. eof: this is all.

        Waits while the command does not read. Input is never sent twice: when the connection breaks on the
        way, `ConnectionFailed` is raised and it is unknown whether this piece arrived.
        """
        raw = data.encode() if isinstance(data, str) else data
        encoded: Base64 = base64.b64encode(raw).decode("ascii")
        body = encode(StdinRequest.model_construct(data=encoded, eof=eof))
        path = path_of("jobs", self._job_id, "stdin")
        await self._transport.call("POST", path, Ok, body=body, repeat=Repeat.UNSENT_ONLY)

    async def close_stdin(self) -> None:
        """End the command's input."""
        await self.send_stdin(eof=True)


class AsyncCommands:
    """The commands of one sandbox: `sandbox.commands`."""

    def __init__(self, transport: Transport, sandbox_id: str) -> None:
        self._transport = transport
        self._sandbox_id = sandbox_id

    async def start(
        self,
        command: Command,
        *,
        timeout_s: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        login_shell: bool | None = None,
        stdin: str | None = None,
        stdin_open: bool | None = None,
        user: str | None = None,
        grace_s: float | None = None,
        job_id: str | None = None,
        max_output_bytes: int | None = None,
        max_spool_bytes: int | None = None,
        concurrent: bool | None = None,
        background: bool = True,
    ) -> AsyncCommandHandle:
        """Start a command and return at once.

        background: it runs beside the sandbox's other commands, without a timeout unless `timeout_s` is
        given. With `background=False` it takes its turn among them and ends after `timeout_s` (default
        600 s). stdin_open: keep its input open for `send_stdin`. The rest is as for `sandbox.exec`.
        """
        request = exec_request(
            command,
            timeout_seconds=timeout_s,
            cwd=cwd,
            env=None if env is None else dict(env),
            login_shell=login_shell,
            stdin=stdin,
            stdin_open=stdin_open,
            user=user,
            grace_seconds=grace_s,
            job_id=job_id or jobs.new_job_id(),
            max_output_bytes=max_output_bytes,
            max_spool_bytes=max_spool_bytes,
            concurrent=concurrent,
            background=background,
        )
        accepted = await jobs.start(self._transport, self._sandbox_id, request)
        return AsyncCommandHandle(self._transport, self._sandbox_id, accepted.job_id)

    async def attach(self, job_id: str) -> AsyncCommandHandle:
        """The handle of a command that was started before, here or elsewhere. Raises `JobNotFound`."""
        job = await jobs.fetch(self._transport, job_id)
        return AsyncCommandHandle(self._transport, job.sandbox_id, job_id, job)

    async def list(self) -> JobResults:
        """The commands of this sandbox that the service remembers, without their output."""
        path = path_of("sandboxes", self._sandbox_id, "jobs")
        return (await self._transport.call("GET", path, JobResultList)).jobs
