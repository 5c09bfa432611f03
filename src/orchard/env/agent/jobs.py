"""Commands: queueing, starting, watching, stopping, and what is kept of them afterwards."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections import deque

from orchard.env.agent import accounts, spawn
from orchard.env.agent.loop import READ, WRITE
from orchard.env.agent.output import OutputWindow

TYPE_CHECKING = False  # importing typing would cost every sandbox most of a megabyte
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from orchard.env.agent.containment import Containment, JobGroup
    from orchard.env.agent.loop import Loop, Timer

_READ_BYTES = 65536
#: After SIGKILL a process can still hang in the kernel; the job ends this long after it all the same.
_UNKILLABLE_S = 1.5
#: Reads per stream after the exit: a background child that never stops writing must not hold the job.
_DRAIN_READS = 64

SIGNAL_NAMES = {s.value: s.name[3:] for s in signal.Signals}


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
        "max_output_bytes", "stdin", "stdin_open", "timeout_s", "user",
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
        self.background = bool(request.get("background"))
        self.concurrent = bool(request.get("concurrent"))
        self.internal = bool(request.get("internal"))

    def same_as(self, other: JobSpec) -> bool:
        return self.command == other.command and self.cwd == other.cwd and self.env == other.env


class Job:
    """One command and its state. `done` callbacks run once, when it has finished."""

    __slots__ = (
        "_done",
        "cancelled",
        "completed_at",
        "created_at",
        "duration_s",
        "error",
        "error_code",
        "exit_code",
        "fds",
        "group",
        "oom_before",
        "oom_killed",
        "pid",
        "queue_s",
        "queued_mono",
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
        "timed_out",
        "timers",
    )  # fmt: skip

    def __init__(self, spec: JobSpec) -> None:
        self.spec = spec
        self.status = "queued"
        self.created_at = time.time()
        self.queued_mono = time.monotonic()
        self.started_at: float | None = None
        self.started_mono = 0.0
        self.completed_at: float | None = None
        self.duration_s: float | None = None
        self.queue_s: float | None = None
        self.exit_code: int | None = None
        self.signal_name: str | None = None
        self.error: str | None = None
        self.error_code: str | None = None
        self.timed_out = False
        self.cancelled: str | None = None
        self.stopping = False
        self.oom_killed = False
        self.oom_before = 0
        self.stdout = OutputWindow(spec.max_output_bytes)
        self.stderr = OutputWindow(spec.max_output_bytes)
        self.pid = 0
        self.group: JobGroup | None = None
        self.fds: dict[int, OutputWindow] = {}
        self.stdin_fd = -1
        self.stdin_buffer = bytearray(spec.stdin)
        self.stdin_waiters: list[Callable[[], None]] = []
        self.timers: list[Timer] = []
        self._done: list[Callable[[Job], None]] = []

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

    def fire_done(self) -> None:
        callbacks, self._done = self._done, []
        for callback in callbacks:
            callback(self)

    def record(self, with_output: bool = True) -> tuple[dict[str, Any], bytes]:
        """The wire form: header and payload (stdout then stderr)."""
        out = self.stdout.value() if with_output else b""
        err = self.stderr.value() if with_output else b""
        record = {
            "job_id": self.spec.job_id,
            "command": self.spec.command,
            "status": self.status,
            "exit_code": self.exit_code,
            "signal": self.signal_name,
            "created_at": self.created_at,
            "started_at": self.started_at,
            "completed_at": self.completed_at,
            "duration_s": self.duration_s,
            "queue_s": self.queue_s,
            "timed_out": self.timed_out,
            "oom_killed": self.oom_killed,
            "error": self.error,
            "error_code": self.error_code,
            "stdout_bytes": self.stdout.total,
            "stderr_bytes": self.stderr.total,
            "stdout_truncated": self.stdout.truncated,
            "stderr_truncated": self.stderr.truncated,
            "stdout_size": len(out),
            "stderr_size": len(err),
        }
        return record, out + err if err else out


class JobTable:
    """All commands of the sandbox.

    One at a time in order of arrival, unless `concurrent` or `background`. The next starts when the main
    process of the one before has exited; what that left running goes on.
    """

    def __init__(
        self,
        loop: Loop,
        containment: Containment,
        defaults: Defaults,
        null_fd: int,
        log: Callable[[str], None],
        retention_s: float = 3600.0,
        retained_bytes: int = 32 << 20,
    ) -> None:
        self._loop = loop
        self._containment = containment
        self.defaults = defaults
        self._null_fd = null_fd
        self._log = log
        self._retention_s = retention_s
        self._retained_cap = retained_bytes
        self._retained = 0
        self.jobs: dict[str, Job] = {}
        self._finished: deque[Job] = deque()
        self._by_pid: dict[int, Job] = {}
        self._waiting: deque[Job] = deque()
        self._active: Job | None = None
        self._lingering: list[JobGroup] = []
        self._advancing = False

    # ------------------------------------------------------------------------------------------ requests

    def submit(self, spec: JobSpec) -> tuple[Job, bool]:
        """Start or queue a command; (job, attached). A known id attaches. Raises `AgentError`."""
        known = self.jobs.get(spec.job_id)
        if known is not None:
            if not known.spec.same_as(spec):
                raise AgentError(
                    "conflict", f"job {spec.job_id} exists with another command; use a new job_id"
                )
            return known, True
        job = Job(spec)
        in_order = not (spec.concurrent or spec.background)
        if in_order and (self._active is not None or self._waiting):
            self.jobs[spec.job_id] = job
            self._waiting.append(job)
            return job, False
        self._check(spec)
        self.jobs[spec.job_id] = job
        if in_order:
            self._active = job
        self._start(job)
        return job, False

    def get(self, job_id: str) -> Job:
        job = self.jobs.get(job_id)
        if job is None:
            raise AgentError("job_not_found", f"job {job_id} is not known to this sandbox")
        return job

    def cancel(self, job: Job, reason: str) -> None:
        """Stop a command as a timeout would; a queued one never starts. Finished ones stay as they are."""
        if job.finished or job.stopping:
            return
        job.cancelled = reason
        if job.status == "queued":
            self._waiting.remove(job)
            self._complete(job, None)
        else:
            self._stop(job)

    def send_signal(self, job: Job, number: int) -> None:
        if job.finished or job.group is None:
            raise AgentError(
                "job_not_running", f"job {job.spec.job_id} is {job.status}; only a running job takes signals"
            )
        if number == signal.SIGKILL:
            job.group.kill()
        else:
            self._signal_group(job.group, number)

    def forget(self, job_id: str) -> None:
        job = self.jobs.get(job_id)
        if job is not None and job.finished:
            self._drop(job)

    def write_stdin(self, job: Job, data: bytes, eof: bool, done: Callable[[], None]) -> None:
        """Queue input; `done` is called when the command has taken it (or no longer can)."""
        if job.finished or not job.spec.stdin_open:
            state = "finished" if job.finished else "running without open input"
            raise AgentError(
                "job_not_running", f"job {job.spec.job_id} is {state}; start it with stdin_open to send input"
            )
        job.stdin_buffer += data
        if eof:
            job.spec.stdin_open = False
        if job.stdin_fd < 0:
            done()
            return
        job.stdin_waiters.append(done)
        self._pump_stdin(job)

    # ------------------------------------------------------------------------------------------ starting

    def _check(self, spec: JobSpec) -> None:
        """Refuse what cannot work; at the command's turn, since an earlier one may have made the directory."""
        cwd = spec.cwd or self.defaults.working_dir
        if not os.path.isdir(cwd):
            raise AgentError(
                "cwd_not_found",
                f"the working directory {cwd!r} does not exist in the sandbox; create it first",
            )
        try:
            accounts.lookup(spec.user or self.defaults.user)
        except accounts.UnknownUser as error:
            raise AgentError("user_not_found", str(error)) from None

    def _environment(self, spec: JobSpec, account: accounts.Account) -> dict[str, str]:
        env = {
            "PATH": spawn.DEFAULT_PATH,
            "HOME": account.home,
            "USER": account.name,
            "LOGNAME": account.name,
        }
        env.update(self.defaults.env)
        env.update(spec.env)
        return env

    def _start(self, job: Job) -> None:
        job.started_at = time.time()
        job.started_mono = time.monotonic()
        job.queue_s = job.started_mono - job.queued_mono
        job.status = "running"
        spec = job.spec
        try:
            self._check(spec)
            account = accounts.lookup(spec.user or self.defaults.user)
            env = self._environment(spec, account)
            command = spawn.resolve(spec.command, spec.login_shell, env["PATH"])
            self._launch(job, command, env, account)
        except Exception as error:
            # Whatever it was, this job ends and the queue goes on.
            self._start_failed(job, error)
            return
        if spec.timeout_s is not None:
            job.timers.append(self._loop.after(spec.timeout_s, lambda: self._timed_out(job)))

    def _launch(
        self, job: Job, command: spawn.Command, env: dict[str, str], account: accounts.Account
    ) -> None:
        spec = job.spec
        out_read, out_write = os.pipe2(os.O_CLOEXEC)
        err_read, err_write = os.pipe2(os.O_CLOEXEC)
        ours, theirs = [out_read, err_read], [out_write, err_write]
        stdin_fd = self._null_fd
        stdin_write = -1
        try:
            if spec.stdin or spec.stdin_open:
                stdin_fd, stdin_write = os.pipe2(os.O_CLOEXEC)
                theirs.append(stdin_fd)
                ours.append(stdin_write)
            group = self._containment.acquire()
            try:
                job.oom_before = self._containment.oom_kills()
                self._containment.enter(group)
                try:
                    pid = spawn.spawn(command, env=env, cwd=spec.cwd or self.defaults.working_dir, account=account,
                                      stdin_fd=stdin_fd, stdout_fd=out_write, stderr_fd=err_write,
                                      null_fd=self._null_fd)  # fmt: skip
                finally:
                    self._containment.leave()
            except BaseException:
                self._containment.release(group)
                raise
        except BaseException:
            for fd in (*ours, *theirs):
                os.close(fd)
            raise
        for fd in theirs:
            os.close(fd)
        job.group = group
        job.pid = pid
        self._by_pid[pid] = job
        for fd, window in ((out_read, job.stdout), (err_read, job.stderr)):
            os.set_blocking(fd, False)
            job.fds[fd] = window
            self._loop.watch(fd, READ, lambda _events, fd=fd: self._readable(job, fd))  # type: ignore[misc]
        if stdin_write >= 0:
            os.set_blocking(stdin_write, False)
            job.stdin_fd = stdin_write
            self._pump_stdin(job)

    def _start_failed(self, job: Job, error: Exception) -> None:
        """A program that is not there or not executable ends like in a shell: 127 or 126 and a line on stderr."""
        if isinstance(error, spawn.SpawnError) and error.stage == "exec":
            missing = error.number in (errno.ENOENT, errno.ENOTDIR)
            job.stderr.write(f"orchard: {error}\n".encode("utf-8", "replace"))
            job.error_code = "command_not_found" if missing else None
            self._complete(job, 127 if missing else 126)
            return
        if isinstance(error, AgentError):
            job.error_code = error.code
            job.error = error.detail
        elif isinstance(error, spawn.SpawnError) and error.stage == "chdir":
            job.error_code = "cwd_not_found"
            job.error = f"the working directory could not be entered: {error}"
        elif isinstance(error, ValueError | accounts.UnknownUser):
            job.error_code = "invalid_request"
            job.error = f"The command could not be started: {error}"
        else:
            job.error_code = "infrastructure_error"
            job.error = f"The command could not be started: {error}"
            if getattr(error, "number", getattr(error, "errno", None)) == errno.EAGAIN:
                job.error += " (the sandbox is at its limit of processes)"
        self._complete(job, None)

    # ------------------------------------------------------------------------------------------- running

    def _readable(self, job: Job, fd: int, reads: int = 4) -> None:
        window = job.fds[fd]
        for _ in range(reads):
            try:
                data = os.read(fd, _READ_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._close_output(job, fd)
                return
            # After the job's end its result is fixed; what a background child still writes is drained so that
            # it never blocks, and dropped.
            if not job.finished:
                window.write(data)
            if len(data) < _READ_BYTES:
                return

    def _close_output(self, job: Job, fd: int) -> None:
        del job.fds[fd]
        self._loop.unwatch(fd)
        os.close(fd)

    def _pump_stdin(self, job: Job) -> None:
        buffer = job.stdin_buffer
        try:
            while buffer:
                with memoryview(buffer) as view:
                    sent = os.write(job.stdin_fd, view[:_READ_BYTES])
                del buffer[:sent]
        except BlockingIOError:
            self._loop.watch(job.stdin_fd, WRITE, lambda _events: self._pump_stdin(job))
            return
        except OSError:
            # The command closed its input: what it did not want is dropped, as in a shell pipeline.
            buffer.clear()
            self._close_stdin(job)
            return
        if job.spec.stdin_open:
            self._loop.unwatch(job.stdin_fd)
            self._release_stdin_waiters(job)
        else:
            self._close_stdin(job)

    def _close_stdin(self, job: Job) -> None:
        if job.stdin_fd >= 0:
            self._loop.unwatch(job.stdin_fd)
            os.close(job.stdin_fd)
            job.stdin_fd = -1
        self._release_stdin_waiters(job)

    def _release_stdin_waiters(self, job: Job) -> None:
        waiters, job.stdin_waiters = job.stdin_waiters, []
        for waiter in waiters:
            waiter()

    # ------------------------------------------------------------------------------------------ stopping

    def _timed_out(self, job: Job) -> None:
        if not job.finished:
            job.timed_out = True
            self._stop(job)

    def _stop(self, job: Job) -> None:
        """SIGTERM, after the grace SIGKILL, to everything the command started; then the job ends in any case."""
        if job.stopping or job.group is None:
            return
        job.stopping = True
        grace_s = job.spec.grace_s
        if grace_s > 0:
            self._signal_group(job.group, signal.SIGTERM)
            job.timers.append(self._loop.after(grace_s, lambda: self._kill(job)))
        else:
            self._kill(job)

    def _kill(self, job: Job) -> None:
        if job.finished or job.group is None:
            return
        job.group.kill()
        job.timers.append(self._loop.after(_UNKILLABLE_S, lambda: self._abandon(job)))

    def _abandon(self, job: Job) -> None:
        if not job.finished:
            self._log(
                f"job {job.spec.job_id}: process {job.pid} did not die after SIGKILL; the job ends without it"
            )
            self._by_pid.pop(job.pid, None)
            self._finish(job, 128 + signal.SIGKILL, "KILL")

    def _signal_group(self, group: JobGroup, number: int) -> None:
        for pid in group.pids():
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue

    # -------------------------------------------------------------------------------------------- ending

    def reap(self) -> None:
        """Collect dead children: main processes of jobs, and orphans that came to the agent as pid 1."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            job = self._by_pid.pop(pid, None)
            if job is not None:
                code = os.waitstatus_to_exitcode(status)
                if code < 0:
                    self._finish(job, 128 - code, SIGNAL_NAMES.get(-code, str(-code)))
                else:
                    self._finish(job, code, None)
        if self._lingering:
            self._release_lingering()

    def _release_lingering(self) -> None:
        still = []
        for group in self._lingering:
            if group.populated():
                still.append(group)
            else:
                self._containment.release(group)
        self._lingering = still

    def _finish(self, job: Job, exit_code: int, signal_name: str | None) -> None:
        group = job.group
        assert group is not None
        if job.stopping:
            # The command itself is gone; its children had the same grace and go now.
            group.kill()
        for fd in list(job.fds):
            self._readable(job, fd, _DRAIN_READS)
        self._close_stdin(job)
        job.signal_name = signal_name
        if exit_code == 128 + signal.SIGKILL or (exit_code != 0 and signal_name is None):
            job.oom_killed = self._containment.oom_kills() > job.oom_before
        job.group = None
        if group.populated():
            self._lingering.append(group)
        else:
            self._containment.release(group)
        self._complete(job, exit_code)

    def _complete(self, job: Job, exit_code: int | None) -> None:
        """The one place where a job becomes terminal."""
        for timer in job.timers:
            timer.cancel()
        job.timers.clear()
        job.exit_code = exit_code
        if job.timed_out:
            job.exit_code = 124
            job.error_code = "timeout"
            job.error = f"Command timed out after {job.spec.timeout_s:g}s"
        elif job.cancelled is not None:
            job.error_code = "cancelled"
            job.error = job.cancelled
        job.completed_at = time.time()
        if job.started_at is not None:
            job.duration_s = time.monotonic() - job.started_mono
        job.status = "succeeded" if job.exit_code == 0 and job.error is None else "failed"
        job.stdin_buffer.clear()
        self._finished.append(job)
        self._retained += job.stdout.size + job.stderr.size
        job.fire_done()
        self._prune()
        if self._active is job:
            self._active = None
            self._next()

    def _next(self) -> None:
        # A loop, not recursion: a thousand queued commands that fail to start must not exhaust the stack.
        if self._advancing:
            return
        self._advancing = True
        try:
            while self._active is None and self._waiting:
                job = self._waiting.popleft()
                self._active = job
                self._start(job)
        finally:
            self._advancing = False

    def _prune(self) -> None:
        """Keep finished jobs for the retention time, within a bound of memory."""
        now = time.time()
        while self._finished:
            oldest = self._finished[0]
            expired = oldest.completed_at is not None and now - oldest.completed_at > self._retention_s
            if not expired and self._retained <= self._retained_cap and len(self._finished) <= 20_000:
                return
            if len(self._finished) == 1 and not expired:
                return
            self._drop(oldest)

    def _drop(self, job: Job) -> None:
        self._finished.remove(job)
        self._retained -= job.stdout.size + job.stderr.size
        del self.jobs[job.spec.job_id]
