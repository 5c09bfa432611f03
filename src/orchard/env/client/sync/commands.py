# Generated from aio/commands.py by tools/generate_sync_client.py; change that and run it.
"""Commands that are started now and waited for later."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from orchard.env.client.aio.commands import AsyncCommandHandle, AsyncCommands
from orchard.env.client.portal import Portal
from orchard.env.client.results import JobResult, OutputChunk, OutputGap
from orchard.env.contract import JobStatus

Command: TypeAlias = str | Sequence[str]

JobResults: TypeAlias = list[JobResult]


class CommandHandle:
    """A command that was started. It runs on whether or not anybody waits for it."""

    def __init__(self, portal: Portal, wrapped: AsyncCommandHandle) -> None:
        self._portal = portal
        self._async = wrapped

    @property
    def job_id(self) -> str:
        """The id under which `commands.attach` finds it again, from any client."""
        return self._async.job_id

    @property
    def sandbox_id(self) -> str:
        """The sandbox it runs in."""
        return self._async.sandbox_id

    @property
    def job(self) -> JobResult | None:
        """What was last heard of it; None before the first `refresh` or `wait`."""
        return self._async.job

    @property
    def status(self) -> JobStatus:
        """The status that was last heard of."""
        return self._async.status

    def refresh(self) -> JobResult:
        """Ask how it is."""
        return self._portal.call(self._async.refresh())

    def wait(self, timeout_s: float | None = None, *, check: bool = False) -> JobResult:
        """Its result, once it has ended.

        check: raise `CommandFailed` or `CommandTimeout` unless it exited with 0. Raises `SandboxTimeout` (a
        `TimeoutError`) after `timeout_s` seconds; the command goes on. A failure of infrastructure raises its
        own typed error.
        """
        return self._portal.call(self._async.wait(timeout_s, check=check))

    def stream(self, stdout_offset: int = 0, stderr_offset: int = 0) -> Iterator[OutputChunk | OutputGap]:
        """Follow its output from the given offsets in bytes on, until it has ended; `job` is its result then.

        Goes on over broken connections, losing and repeating nothing. The service keeps the newest 64 MiB of each
        stream (`max_spool_bytes`) for its readers: what is older comes as an `OutputGap`. Leaving early leaves the
        command alone.
        """
        yield from self._portal.iterate(self._async.stream(stdout_offset, stderr_offset))

    def cancel(self) -> JobResult:
        """Stop it and everything it started, as its timeout would (SIGTERM, the grace time, SIGKILL)."""
        return self._portal.call(self._async.cancel())

    def signal(self, signal: str) -> None:
        """Send a signal such as "INT" or "SIGUSR1" to every process of the command.

        Raises `JobNotRunning` when it has ended.
        """
        self._portal.call(self._async.signal(signal))

    def kill(self) -> None:
        """Send SIGKILL to every process of the command; a command that has ended is fine."""
        self._portal.call(self._async.kill())

    def send_stdin(self, data: bytes | str = b"", *, eof: bool = False) -> None:
        """Give input to a command started with `stdin_open=True`; text is sent as UTF-8. eof: this is all.

        Waits while the command does not read. Input is never sent twice: when the connection breaks on the
        way, `ConnectionFailed` is raised and it is unknown whether this piece arrived.
        """
        self._portal.call(self._async.send_stdin(data, eof=eof))

    def close_stdin(self) -> None:
        """End the command's input."""
        self._portal.call(self._async.close_stdin())


class Commands:
    """The commands of one sandbox: `sandbox.commands`."""

    def __init__(self, portal: Portal, wrapped: AsyncCommands) -> None:
        self._portal = portal
        self._async = wrapped

    def start(
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
    ) -> CommandHandle:
        """Start a command and return at once.

        background: it runs beside the sandbox's other commands, without a timeout unless `timeout_s` is
        given. With `background=False` it takes its turn among them and ends after `timeout_s` (default
        600 s). stdin_open: keep its input open for `send_stdin`. The rest is as for `sandbox.exec`.
        """
        return CommandHandle(
            self._portal,
            self._portal.call(
                self._async.start(
                    command,
                    timeout_s=timeout_s,
                    cwd=cwd,
                    env=env,
                    login_shell=login_shell,
                    stdin=stdin,
                    stdin_open=stdin_open,
                    user=user,
                    grace_s=grace_s,
                    job_id=job_id,
                    max_output_bytes=max_output_bytes,
                    max_spool_bytes=max_spool_bytes,
                    concurrent=concurrent,
                    background=background,
                )
            ),
        )

    def attach(self, job_id: str) -> CommandHandle:
        """The handle of a command that was started before, here or elsewhere. Raises `JobNotFound`."""
        return CommandHandle(self._portal, self._portal.call(self._async.attach(job_id)))

    def list(self) -> JobResults:
        """The commands of this sandbox that the service remembers, without their output."""
        return self._portal.call(self._async.list())
