"""A sandbox as an object."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from orchard.env.client.aio import jobs
from orchard.env.client.aio.commands import AsyncCommands, Command, exec_request
from orchard.env.client.aio.files import AsyncFiles, FileEntries, LocalPath
from orchard.env.client.aio.sessions import AsyncSessions
from orchard.env.client.aio.terminals import AsyncTerminal, attach_terminal, open_terminal
from orchard.env.client.aio.tunnels import AsyncTunnels
from orchard.env.client.exits import OwnedSandboxes
from orchard.env.client.results import JobResult
from orchard.env.client.transport import Repeat, Transport, build, encode, path_of, wait_query
from orchard.env.contract import (
    Deleted,
    FileWritten,
    Heartbeat,
    OnDisconnect,
    PatchRequest,
    PatchResult,
    PatchSandbox,
    SandboxInfo,
    SandboxLogs,
    SandboxStats,
    SandboxStatus,
)
from orchard.env.errors import NotFound, OrchardError, SandboxFailed, SandboxTimeout, from_body

logger = logging.getLogger(__name__)

#: The service itself ends a sandbox that is not ready in time; this is how much later the client gives up.
_READY_SLACK_S = 30.0


class AsyncSandbox:
    """One sandbox of the service; made by `client.create` and `client.get`.

    As a context manager it deletes the sandbox at the end of the block, and when the program ends inside it.
    """

    def __init__(self, transport: Transport, owned: OwnedSandboxes, info: SandboxInfo) -> None:
        self._transport = transport
        self._owned = owned
        self._info = info
        self._commands = AsyncCommands(transport, info.sandbox_id)
        self._files = AsyncFiles(transport, info.sandbox_id)
        self._heart: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._info.sandbox_id} {self._info.image!r} {self._info.status}>"

    @property
    def sandbox_id(self) -> str:
        """Its id."""
        return self._info.sandbox_id

    @property
    def info(self) -> SandboxInfo:
        """What was last heard of it; `refresh` asks again."""
        return self._info

    @property
    def status(self) -> SandboxStatus:
        """The status that was last heard of."""
        return self._info.status

    @property
    def commands(self) -> AsyncCommands:
        """Commands that are started now and waited for later."""
        return self._commands

    @property
    def sessions(self) -> AsyncSessions:
        """Named shells; see `exec(session=…)`."""
        return AsyncSessions(self._transport, self.sandbox_id)

    @property
    def tunnels(self) -> AsyncTunnels:
        """Ports inside it that lead to targets of the operator."""
        return AsyncTunnels(self._transport, self.sandbox_id)

    @property
    def files(self) -> AsyncFiles:
        """Its files."""
        return self._files

    # ----------------------------------------------------------------------------------------- life and death

    async def refresh(self) -> SandboxInfo:
        """Ask how it is. Raises `SandboxFailed`, `SandboxDeleted` or `SandboxNotFound` when it is no more."""
        self._info = await self._transport.call("GET", self._path(), SandboxInfo)
        return self._info

    async def wait_ready(self, timeout_s: float | None = None) -> SandboxInfo:
        """Wait until it is ready.

        Raises `SandboxFailed` with the reason when it cannot start, `SandboxTimeout` after `timeout_s`
        seconds (default: what it was created with, plus its time in the create queue).
        """
        limit_s = self._info.timeout + _READY_SLACK_S if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        while True:
            slice_s = max(0.0, min(self._transport.settings.wait_slice_s, deadline - time.monotonic()))
            try:
                self._info = await self._transport.call(
                    "GET",
                    self._path("wait"),
                    SandboxInfo,
                    query=wait_query(slice_s),
                    silence_s=slice_s + self._transport.settings.request_timeout_s,
                )
            except SandboxTimeout:
                await self.refresh()
            if self._info.ready or self._info.status in (SandboxStatus.READY, SandboxStatus.PAUSED):
                return self._info
            if self._info.status in (SandboxStatus.FAILED, SandboxStatus.DELETED):
                raise self._failure()
            if timeout_s is None and self._info.queue_position is not None:
                deadline = time.monotonic() + limit_s
            if time.monotonic() >= deadline:
                raise SandboxTimeout(f"sandbox {self.sandbox_id} is not ready after {limit_s:g} s")

    async def pty(
        self,
        command: Sequence[str] | None = None,
        *,
        rows: int = 24,
        cols: int = 80,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        login_shell: bool = False,
    ) -> AsyncTerminal:
        """Start a command in a terminal: exact argv, or a login shell when none is given.

        rows, cols: its size in characters. TERM is xterm-256color unless `env` says otherwise.
        """
        return await open_terminal(
            self._transport,
            self.sandbox_id,
            command,
            rows=rows,
            cols=cols,
            env=env,
            cwd=cwd,
            login_shell=login_shell,
        )

    async def attach_pty(self, pty_id: str, *, since: int = 0, takeover: bool = False) -> AsyncTerminal:
        """Connect to a terminal that was opened before, here or elsewhere. since: the offset in bytes of its output from
        which to show it (0: all that is kept). Raises `Conflict` when somebody else is connected, unless `takeover`."""
        return await attach_terminal(self._transport, self.sandbox_id, pty_id, since, takeover=takeover)

    async def delete(self) -> None:
        """Delete it and everything in it. Repeating is fine."""
        await self.stop_heartbeat()
        try:
            await self._transport.call("DELETE", self._path(), Deleted)
        except NotFound:
            pass  # it ended by itself or was deleted before
        self._owned.discard(self.sandbox_id)
        self._info = self._info.model_copy(update={"status": SandboxStatus.DELETED, "ready": False})

    def delete_at_exit(self) -> None:
        """Delete it when the program ends, also by SIGTERM or Ctrl-C. A `with` block does so by itself."""
        self._owned.prepare()
        self._owned.add(self.sandbox_id)

    async def update(
        self,
        *,
        ttl_seconds: float | None = None,
        labels: Mapping[str, str] | None = None,
        allow_egress: Sequence[str] | None = None,
    ) -> SandboxInfo:
        """Change it: `ttl_seconds` counts anew from now, `labels` replaces all labels, `allow_egress` is all that it
        may reach from then on (whatever network it was created with)."""
        request = build(
            PatchSandbox,
            ttl_seconds=ttl_seconds,
            labels=None if labels is None else dict(labels),
            allow_egress=None if allow_egress is None else list(allow_egress),
        )
        self._info = await self._transport.call("PATCH", self._path(), SandboxInfo, body=encode(request))
        return self._info

    async def heartbeat(self) -> Heartbeat:
        """Renew its lease. After the first heartbeat, a sandbox without one for its lease time is removed."""
        return await self._transport.call("POST", self._path("heartbeat"), Heartbeat)

    async def start_heartbeat(self, interval_s: float = 30.0) -> None:
        """Send a heartbeat now and every `interval_s` seconds in the background, until it is gone."""
        await self.stop_heartbeat()
        await self.heartbeat()
        self._heart = asyncio.create_task(self._beat(interval_s), name=f"heartbeat {self.sandbox_id}")

    async def stop_heartbeat(self) -> None:
        """Send no more heartbeats in the background."""
        heart, self._heart = self._heart, None
        if heart is None or heart.get_loop() is not asyncio.get_running_loop():
            return
        heart.cancel()
        await asyncio.wait({heart})

    async def stats(self) -> SandboxStats:
        """Its use of cpu, memory, processes and disk, now."""
        return await self._transport.call("GET", self._path("stats"), SandboxStats)

    async def logs(self) -> SandboxLogs:
        """The log of its life and of its agent."""
        return await self._transport.call("GET", self._path("logs"), SandboxLogs)

    # ----------------------------------------------------------------------------------------------- commands

    async def exec(
        self,
        command: Command,
        *,
        timeout_s: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        login_shell: bool | None = None,
        stdin: str | None = None,
        user: str | None = None,
        grace_s: float | None = None,
        on_disconnect: OnDisconnect | str | None = None,
        job_id: str | None = None,
        max_output_bytes: int | None = None,
        concurrent: bool | None = None,
        session: str | None = None,
        check: bool = False,
    ) -> JobResult:
        """Run a command to its end.

        command: a string runs in a shell, a sequence is exact argv. timeout_s: default 600; the time in the
        queue behind earlier commands of this sandbox does not count. login_shell: read the profile files
        first. stdin: its input, empty if not given. grace_s: time between SIGTERM and SIGKILL at the timeout
        (default 0). on_disconnect: "keep" (default) or "kill" the command when this client goes away. job_id:
        your own id; a command with a known id is never run again, its result is returned. max_output_bytes:
        of each stream, in the result (default 1 MiB). concurrent: do not wait for earlier commands. check:
        raise `CommandFailed` or `CommandTimeout` unless it exits with 0. session: a named shell that keeps its
        directory, variables and functions from one command to the next; `session_reset` of the result says when a
        command's changes to it are lost.

        A lost connection neither runs the command twice nor loses its result. When infrastructure fails
        instead of the command, the typed error is raised (`infra` is true), never a result.
        """
        request = exec_request(
            command,
            timeout_seconds=timeout_s,
            cwd=cwd,
            env=None if env is None else dict(env),
            login_shell=login_shell,
            stdin=stdin,
            user=user,
            grace_seconds=grace_s,
            on_disconnect=on_disconnect,
            job_id=job_id or jobs.new_job_id(),
            max_output_bytes=max_output_bytes,
            concurrent=concurrent,
            session=session,
        )
        job = await jobs.run(self._transport, self.sandbox_id, request)
        job.raise_for_infrastructure()
        return job.check() if check else job

    async def get_job(self, job_id: str) -> JobResult:
        """A command of this service by its id, as it is now. Raises `JobNotFound`."""
        return await jobs.fetch(self._transport, job_id)

    async def apply_patch(
        self,
        patch: str,
        *,
        timeout_s: float | None = None,
        cwd: str | None = None,
        strip: int | None = None,
    ) -> PatchResult:
        """Apply a patch, byte for byte: with `git apply` in a git tree, else with `patch`.

        strip: leading path components to cut (default 1). Never sent twice: after `ConnectionFailed` it is
        unknown whether it was applied. Raises `PatchToolMissing` when the image has neither tool.
        """
        request = build(PatchRequest, patch=patch, timeout_seconds=timeout_s, cwd=cwd, strip=strip)
        silence_s = (timeout_s or 600.0) + self._transport.settings.request_timeout_s
        return await self._transport.call(
            "POST",
            self._path("apply_patch"),
            PatchResult,
            body=encode(request),
            repeat=Repeat.UNSENT_ONLY,
            silence_s=silence_s,
        )

    # ------------------------------------------------------------------------------ files, by published names

    async def upload_file(self, local_path: LocalPath, remote_path: str) -> None:
        """The same as `files.upload`."""
        await self._files.upload(local_path, remote_path)

    async def upload_content(
        self, content: bytes | str, remote_path: str, *, mode: int | None = None
    ) -> FileWritten:
        """The same as `files.write`, with the content first."""
        return await self._files.write(remote_path, content, mode=mode)

    async def download_file(self, remote_path: str, local_path: LocalPath) -> None:
        """The same as `files.download`."""
        await self._files.download(remote_path, local_path)

    async def download_content(self, remote_path: str) -> bytes:
        """The same as `files.read`."""
        return await self._files.read(remote_path)

    async def list_files(self, remote_path: str = "/") -> FileEntries:
        """The same as `files.list`."""
        return await self._files.list(remote_path)

    # ---------------------------------------------------------------------------------------- context manager

    async def __aenter__(self) -> Self:
        self.delete_at_exit()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            await self.delete()
        except OrchardError as failure:
            if error is None:
                raise
            # The error of the block matters more; the exit hook tries once more.
            logger.warning("sandbox %s could not be deleted: %s", self.sandbox_id, failure)

    # ---------------------------------------------------------------------------------------------- internals

    def _path(self, *more: str) -> str:
        return path_of("sandboxes", self._info.sandbox_id, *more)

    def _failure(self) -> OrchardError:
        info = self._info
        detail = info.status_message or (info.death.message if info.death else "") or "it did not start"
        body: dict[str, object] = {
            "code": SandboxFailed.code if info.status is SandboxStatus.FAILED else "sandbox_deleted",
            "detail": f"sandbox {info.sandbox_id}: {detail}",
            "reason": info.reason.value if info.reason else None,
        }
        if info.death is not None:
            body["death"] = info.death.model_dump(mode="json")
        return from_body(404, body)

    async def _beat(self, interval_s: float) -> None:
        pid = os.getpid()
        while os.getpid() == pid:
            await asyncio.sleep(interval_s)
            try:
                await self.heartbeat()
            except NotFound as error:
                logger.warning("no more heartbeats: %s", error)
                return
            except OrchardError as error:
                logger.warning("a heartbeat of sandbox %s failed: %s", self.sandbox_id, error)
