# Generated from aio/sandbox.py by tools/generate_sync_client.py; change that and run it.
"""A sandbox as an object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from orchard.env.client.aio.sandbox import AsyncSandbox
from orchard.env.client.portal import Portal
from orchard.env.client.results import JobResult
from orchard.env.client.sync.commands import Command, Commands
from orchard.env.client.sync.files import FileEntries, Files, LocalPath
from orchard.env.client.sync.sessions import Sessions
from orchard.env.client.sync.terminals import Terminal
from orchard.env.client.sync.tunnels import Tunnels
from orchard.env.contract import (
    FileWritten,
    Heartbeat,
    OnDisconnect,
    PatchResult,
    SandboxInfo,
    SandboxLogs,
    SandboxStats,
    SandboxStatus,
)


class Sandbox:
    """One sandbox of the service; made by `client.create` and `client.get`.

    As a context manager it deletes the sandbox at the end of the block, and when the program ends inside it.
    """

    def __init__(self, portal: Portal, wrapped: AsyncSandbox) -> None:
        self._portal = portal
        self._async = wrapped

    def __repr__(self) -> str:
        return repr(self._async).replace("<Async", "<", 1)

    @property
    def sandbox_id(self) -> str:
        """Its id."""
        return self._async.sandbox_id

    @property
    def info(self) -> SandboxInfo:
        """What was last heard of it; `refresh` asks again."""
        return self._async.info

    @property
    def status(self) -> SandboxStatus:
        """The status that was last heard of."""
        return self._async.status

    @property
    def commands(self) -> Commands:
        """Commands that are started now and waited for later."""
        return Commands(self._portal, self._async.commands)

    @property
    def sessions(self) -> Sessions:
        """Named shells; see `exec(session=…)`."""
        return Sessions(self._portal, self._async.sessions)

    @property
    def tunnels(self) -> Tunnels:
        """Ports inside it that lead to targets of the operator."""
        return Tunnels(self._portal, self._async.tunnels)

    @property
    def files(self) -> Files:
        """Its files."""
        return Files(self._portal, self._async.files)

    def refresh(self) -> SandboxInfo:
        """Ask how it is. Raises `SandboxFailed`, `SandboxDeleted` or `SandboxNotFound` when it is no more."""
        return self._portal.call(self._async.refresh())

    def wait_ready(self, timeout_s: float | None = None) -> SandboxInfo:
        """Wait until it is ready.

        Raises `SandboxFailed` with the reason when it cannot start, `SandboxTimeout` after `timeout_s`
        seconds (default: what it was created with, plus its time in the create queue).
        """
        return self._portal.call(self._async.wait_ready(timeout_s))

    def pty(
        self,
        command: Sequence[str] | None = None,
        *,
        rows: int = 24,
        cols: int = 80,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        login_shell: bool = False,
    ) -> Terminal:
        """Start a command in a terminal: exact argv, or a login shell when none is given.

        rows, cols: its size in characters. TERM is xterm-256color unless `env` says otherwise.
        """
        return Terminal(
            self._portal,
            self._portal.call(
                self._async.pty(command, rows=rows, cols=cols, env=env, cwd=cwd, login_shell=login_shell)
            ),
        )

    def attach_pty(self, pty_id: str, *, since: int = 0, takeover: bool = False) -> Terminal:
        """Connect to a terminal that was opened before, here or elsewhere. since: the offset in bytes of its output from
        which to show it (0: all that is kept). Raises `Conflict` when somebody else is connected, unless `takeover`."""
        return Terminal(
            self._portal, self._portal.call(self._async.attach_pty(pty_id, since=since, takeover=takeover))
        )

    def delete(self) -> None:
        """Delete it and everything in it. Repeating is fine."""
        self._portal.call(self._async.delete())

    def delete_at_exit(self) -> None:
        """Delete it when the program ends, also by SIGTERM or Ctrl-C. A `with` block does so by itself."""
        return self._async.delete_at_exit()

    def update(
        self,
        *,
        ttl_seconds: float | None = None,
        labels: Mapping[str, str] | None = None,
        allow_egress: Sequence[str] | None = None,
    ) -> SandboxInfo:
        """Change it: `ttl_seconds` counts anew from now, `labels` replaces all labels, `allow_egress` is all that it
        may reach from then on (whatever network it was created with)."""
        return self._portal.call(
            self._async.update(ttl_seconds=ttl_seconds, labels=labels, allow_egress=allow_egress)
        )

    def heartbeat(self) -> Heartbeat:
        """Renew its lease. After the first heartbeat, a sandbox without one for its lease time is removed."""
        return self._portal.call(self._async.heartbeat())

    def start_heartbeat(self, interval_s: float = 30.0) -> None:
        """Send a heartbeat now and every `interval_s` seconds in the background, until it is gone."""
        self._portal.call(self._async.start_heartbeat(interval_s))

    def stop_heartbeat(self) -> None:
        """Send no more heartbeats in the background."""
        self._portal.call(self._async.stop_heartbeat())

    def stats(self) -> SandboxStats:
        """Its use of cpu, memory, processes and disk, now."""
        return self._portal.call(self._async.stats())

    def logs(self) -> SandboxLogs:
        """The log of its life and of its agent."""
        return self._portal.call(self._async.logs())

    def exec(
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
        return self._portal.call(
            self._async.exec(
                command,
                timeout_s=timeout_s,
                cwd=cwd,
                env=env,
                login_shell=login_shell,
                stdin=stdin,
                user=user,
                grace_s=grace_s,
                on_disconnect=on_disconnect,
                job_id=job_id,
                max_output_bytes=max_output_bytes,
                concurrent=concurrent,
                session=session,
                check=check,
            )
        )

    def get_job(self, job_id: str) -> JobResult:
        """A command of this service by its id, as it is now. Raises `JobNotFound`."""
        return self._portal.call(self._async.get_job(job_id))

    def apply_patch(
        self, patch: str, *, timeout_s: float | None = None, cwd: str | None = None, strip: int | None = None
    ) -> PatchResult:
        """Apply a patch, byte for byte: with `git apply` in a git tree, else with `patch`.

        strip: leading path components to cut (default 1). Never sent twice: after `ConnectionFailed` it is
        unknown whether it was applied. Raises `PatchToolMissing` when the image has neither tool.
        """
        return self._portal.call(self._async.apply_patch(patch, timeout_s=timeout_s, cwd=cwd, strip=strip))

    def upload_file(self, local_path: LocalPath, remote_path: str) -> None:
        """The same as `files.upload`."""
        self._portal.call(self._async.upload_file(local_path, remote_path))

    def upload_content(
        self, content: bytes | str, remote_path: str, *, mode: int | None = None
    ) -> FileWritten:
        """The same as `files.write`, with the content first."""
        return self._portal.call(self._async.upload_content(content, remote_path, mode=mode))

    def download_file(self, remote_path: str, local_path: LocalPath) -> None:
        """The same as `files.download`."""
        self._portal.call(self._async.download_file(remote_path, local_path))

    def download_content(self, remote_path: str) -> bytes:
        """The same as `files.read`."""
        return self._portal.call(self._async.download_content(remote_path))

    def list_files(self, remote_path: str = "/") -> FileEntries:
        """The same as `files.list`."""
        return self._portal.call(self._async.list_files(remote_path))

    def __enter__(self) -> Self:
        self.delete_at_exit()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._portal.call(self._async.__aexit__(kind, error, trace))
