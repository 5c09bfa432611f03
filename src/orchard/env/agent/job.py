"""One command: what was asked for, and what became of it."""

from __future__ import annotations

import time

from orchard.env.agent.output import Output

TYPE_CHECKING = False  # importing typing would cost every sandbox most of a megabyte
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from orchard.env.agent.containment import JobGroup
    from orchard.env.agent.loop import Timer
    from orchard.env.agent.output import Spool
    from orchard.env.agent.sessions import Turn


class AgentError(Exception):
    """An answer of the kind `error`: a code of the service's error table and a text that says what to do."""

    def __init__(self, code: str, detail: str, **extra: Any) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail
        self.extra = extra


class Defaults:
    """What every command of this sandbox starts from."""

    def __init__(self) -> None:
        self.env: dict[str, str] = {}
        self.working_dir = "/"
        self.user = "root"


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"text expected, not {type(value).__name__}")
    return value


class JobSpec:
    """One command as asked for; times in seconds, sizes in bytes. timeout_s None: no limit."""

    __slots__ = (
        "background", "command", "concurrent", "cwd", "env", "grace_s", "internal", "job_id", "login_shell",
        "max_output_bytes", "max_spool_bytes", "pty", "session", "stdin", "stdin_open", "timeout_s", "user",
    )  # fmt: skip

    def __init__(self, request: dict[str, Any], stdin: bytes) -> None:
        """From the fields of an `exec` request; KeyError or TypeError where they are missing or of a wrong type."""
        self.job_id: str = _text(request["job_id"])
        command = request["command"]
        if isinstance(command, list) and not command:
            raise TypeError("command is an empty list")
        self.command: str | list[str] = (
            [_text(arg) for arg in command] if isinstance(command, list) else _text(command)
        )
        self.timeout_s = None if request.get("timeout_s") is None else float(request["timeout_s"])
        self.grace_s = float(request.get("grace_s") or 0.0)
        self.cwd: str | None = request.get("cwd")
        self.env = {_text(name): _text(value) for name, value in (request.get("env") or {}).items()}
        self.user: str | None = request.get("user")
        self.login_shell = bool(request.get("login_shell"))
        self.stdin = stdin
        self.stdin_open = bool(request.get("stdin_open"))
        self.max_output_bytes = int(request.get("max_output_bytes", 1 << 20))
        self.max_spool_bytes = int(request.get("max_spool_bytes", 64 << 20))
        self.background = bool(request.get("background"))
        self.concurrent = bool(request.get("concurrent"))
        self.internal = bool(request.get("internal"))
        self.session: str | None = None if request.get("session") is None else _text(request["session"])
        size = request.get("pty")
        #: Rows and columns of its terminal, if it has one.
        self.pty: tuple[int, int] | None = None if size is None else (int(size[0]), int(size[1]))
        if self.pty:
            self.stdin_open = True

    def same_as(self, other: JobSpec) -> bool:
        return self.command == other.command and self.cwd == other.cwd and self.env == other.env


class Job:
    """One command and its state. `done` callbacks run once, when it has finished."""

    __slots__ = (
        "_done",
        "cancelled",
        "completed_at",
        "created_at",
        "drained",
        "duration_s",
        "dying",
        "ended_mono",
        "error",
        "error_code",
        "exit_code",
        "fds",
        "gone_by",
        "group",
        "oom_before",
        "oom_killed",
        "pid",
        "queue_s",
        "queued_mono",
        "session_reset",
        "signal_name",
        "spec",
        "started_at",
        "started_mono",
        "status",
        "stderr",
        "stdin_buffer",
        "stdin_fd",
        "stdin_waiters",
        "stdout",
        "stopping",
        "terminal_fd",
        "timed_out",
        "timers",
        "turn",
        "watchers",
    )  # fmt: skip

    def __init__(self, spec: JobSpec, spool: Spool) -> None:
        self.spec = spec
        self.status = "queued"
        self.created_at = time.time()
        self.queued_mono = time.monotonic()
        self.started_at: float | None = None
        self.started_mono = 0.0
        self.completed_at: float | None = None
        self.ended_mono = 0.0
        self.duration_s: float | None = None
        self.queue_s: float | None = None
        self.exit_code: int | None = None
        self.signal_name: str | None = None
        self.error: str | None = None
        self.error_code: str | None = None
        self.timed_out = False
        self.cancelled: str | None = None
        self.stopping = False
        self.gone_by = 0.0
        self.dying = False
        self.oom_killed = False
        self.oom_before = 0
        self.stdout = Output(spec.max_output_bytes, spool, spec.max_spool_bytes)
        self.stderr = Output(spec.max_output_bytes, spool, spec.max_spool_bytes)
        self.pid = 0
        self.group: JobGroup | None = None
        self.fds: dict[int, Output] = {}
        self.stdin_fd = -1
        self.terminal_fd = -1
        self.drained = False
        self.turn: Turn | None = None
        self.session_reset = False
        self.stdin_buffer = bytearray(spec.stdin)
        self.stdin_waiters: list[Callable[[], None]] = []
        self.timers: list[Timer] = []
        self._done: list[Callable[[Job], None]] = []
        self.watchers: list[Callable[[], None]] = []

    @property
    def finished(self) -> bool:
        return self.completed_at is not None

    def when_done(self, callback: Callable[[Job], None]) -> None:
        if self.finished:
            callback(self)
        else:
            self._done.append(callback)

    def forget_callback(self, callback: Callable[[Job], None]) -> None:
        if callback in self._done:
            self._done.remove(callback)

    def fire_watchers(self) -> None:
        """There is more output, or there will be none: whoever waits for that looks again."""
        watchers, self.watchers = self.watchers, []
        for watcher in watchers:
            watcher()

    def fire_done(self) -> None:
        callbacks, self._done = self._done, []
        for callback in callbacks:
            callback(self)

    def record(self) -> tuple[dict[str, Any], bytes]:
        """The wire form: header without what has its default value, and payload (stdout then stderr)."""
        out, err = self.stdout.value(), self.stderr.value()
        return self._header(len(out), len(err)), out + err if err else out

    def listing(self) -> dict[str, Any]:
        """The wire form in a list: with the command, without output."""
        return {**self._header(0, 0), "command": self.spec.command, "background": self.spec.background}

    def _header(self, stdout_size: int, stderr_size: int) -> dict[str, Any]:
        record: dict[str, Any] = {
            "job_id": self.spec.job_id,
            "status": self.status,
            "created_at": self.created_at,
        }
        for name, value in (
            ("exit_code", self.exit_code), ("signal", self.signal_name), ("started_at", self.started_at),
            ("completed_at", self.completed_at), ("duration_s", self.duration_s), ("queue_s", self.queue_s),
            ("error", self.error), ("error_code", self.error_code),
        ):  # fmt: skip
            if value is not None:
                record[name] = value
        if self.spec.pty:
            record["pid"] = self.pid
        if self.timed_out:
            record["timed_out"] = True
        if self.oom_killed:
            record["oom_killed"] = True
        if self.session_reset:
            record["session_reset"] = True
        for name, output, size in (
            ("stdout", self.stdout, stdout_size),
            ("stderr", self.stderr, stderr_size),
        ):
            if output.total:
                record[f"{name}_bytes"] = output.total
                record[f"{name}_size"] = size
                record[f"{name}_truncated"] = output.truncated
        return record
