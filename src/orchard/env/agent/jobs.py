"""Commands: queueing, starting, watching, stopping, and what is kept of them afterwards."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections import deque

from orchard.env.agent import accounts, spawn, terminal
from orchard.env.agent.job import AgentError, Defaults, Job, JobSpec
from orchard.env.agent.launching import Launcher
from orchard.env.agent.pipes import Pipes
from orchard.env.agent.sessions import Sessions, SessionsFull, Turn
from orchard.env.agent.surroundings import Surroundings

TYPE_CHECKING = False  # importing typing would cost every sandbox most of a megabyte
if TYPE_CHECKING:
    from collections.abc import Callable

    from orchard.env.agent.containment import Containment, JobGroup
    from orchard.env.agent.loop import Loop
    from orchard.env.agent.output import Spool

#: After SIGKILL a process can still hang in the kernel; the job ends this long after it all the same.
_UNKILLABLE_S = 1.5
#: How often dying processes are looked at.
_DYING_POLL_S = 0.005
_TERMINAL_DRAIN_S = 0.02

#: Ways for a command to end that are errors of the request: it never ran, and is told as such to who waits.
REFUSALS = ("cwd_not_found", "user_not_found", "invalid_request", "conflict")
SIGNAL_NAMES = {s.value: s.name[3:] for s in signal.Signals}


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
        spool: Spool,
        log: Callable[[str], None],
        retention_s: float = 3600.0,
        retained_bytes: int = 32 << 20,
    ) -> None:
        self._loop = loop
        self._pipes = Pipes(loop)
        self._containment = containment
        self._launcher = Launcher(containment, self._pipes, null_fd)
        self._spool = spool
        spool.reclaim = self._reclaim
        self.surroundings = Surroundings(defaults)
        # Whether the sandbox has no process but the agent, and how many were killed for memory when last asked.
        self._alone = True
        self._oom_kills = 0
        self._log = log
        self._retention_s = retention_s
        self._retained_cap = retained_bytes
        self._retained = 0
        self.jobs: dict[str, Job] = {}
        self.sessions = Sessions()
        self._finished: deque[Job] = deque()
        self._by_pid: dict[int, Job] = {}
        self._ended: deque[tuple[Job, int]] = deque()
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
        job = Job(spec, self._spool)
        in_order = not (spec.concurrent or spec.background)
        if in_order and (self._active is not None or self._waiting):
            self.jobs[spec.job_id] = job
            self._waiting.append(job)
            return job, False
        self.jobs[spec.job_id] = job
        if in_order:
            self._active = job
        self._start(job)
        if job.error_code in REFUSALS:
            self._drop(job)
            raise AgentError(job.error_code, job.error or "")
        return job, False

    def warm_up(self) -> None:
        """Do ahead what the first command would have to wait for."""
        try:
            account = self.surroundings.default_account()
        except accounts.UnknownUser:
            return  # commands will be told
        if account.uid == os.geteuid() and set(account.groups) != set(os.getgroups()):
            # Commands of the agent's own user are spawned without setting ids: they have what the agent has.
            os.setgroups(account.groups)

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
        self._pipes.pump_stdin(job)

    # ------------------------------------------------------------------------------------------ starting

    def _start(self, job: Job) -> None:
        job.started_at = time.time()
        job.started_mono = time.monotonic()
        job.queue_s = job.started_mono - job.queued_mono
        job.status = "running"
        spec = job.spec
        try:
            account = self.surroundings.account(spec)
            env, path = self.surroundings.environment(spec, account)
            argv: str | list[str] = spec.command
            if spec.session is not None:
                job.turn = self._turn(spec.session, spec.env)
                argv = job.turn.argv(spec.command, spawn.session_shell(), back=spec.cwd is None)
            command = spawn.resolve(argv, spec.login_shell, path)
            directory_fd = self.surroundings.directory(spec)
            try:
                # While nothing ran, nothing can have been killed: what was read last still holds.
                job.oom_before = self._oom_kills if self._alone else self._containment.oom_kills()
                self._launcher.launch(job, command, env, account, directory_fd)
            finally:
                os.close(directory_fd)
            self._by_pid[job.pid] = job
            self._alone = False
        except Exception as error:
            # Whatever it was, this job ends and the queue goes on.
            self._start_failed(job, error)
            return
        if spec.timeout_s is not None:
            job.timers.append(self._loop.after(spec.timeout_s, lambda: self._timed_out(job)))

    def _turn(self, name: str, env: dict[str, str]) -> Turn:
        session = self.sessions.get(name)
        if session.busy:
            raise AgentError(
                "conflict",
                f"a command of session {name} runs already; they take turns: do not start them concurrently",
            )
        return Turn(session, env)

    def resize(self, job: Job, rows: int, cols: int) -> None:
        """Set the size of its terminal in characters."""
        if job.terminal_fd not in job.fds:
            raise AgentError("job_not_running", f"job {job.spec.job_id} has no terminal, or not any more")
        terminal.resize(job.terminal_fd, rows, cols)

    def _start_failed(self, job: Job, error: Exception) -> None:
        """A program that is not there or not executable ends like in a shell: 127 or 126, and a line that says so."""
        if isinstance(error, spawn.SpawnError) and error.stage == "exec":
            missing = error.number in (errno.ENOENT, errno.ENOTDIR)
            said = f"orchard: {error}".encode("utf-8", "replace")
            if job.spec.pty is not None:
                job.stdout.write(said + b"\r\n")
            else:
                job.stderr.write(said + b"\n")
            job.error_code = "command_not_found" if missing else None
            self._complete(job, 127 if missing else 126)
            return
        if isinstance(error, SessionsFull):
            error = AgentError("invalid_request", "the sandbox holds 256 sessions; delete some first")
        if isinstance(error, AgentError):
            job.error_code = error.code
            job.error = error.detail
        elif isinstance(error, spawn.SpawnError) and error.stage == "chdir":
            job.error_code = "cwd_not_found"
            job.error = f"the working directory could not be entered: {error}"
        elif isinstance(error, ValueError):
            job.error_code = "invalid_request"
            job.error = f"The command could not be started: {error}"
        else:
            job.error_code = "infrastructure_error"
            job.error = f"The command could not be started: {error}"
            if getattr(error, "number", getattr(error, "errno", None)) == errno.EAGAIN:
                job.error += " (the sandbox is at its limit of processes)"
        self._complete(job, None)

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
        self._collect()
        while self._ended:
            job, code = self._ended.popleft()
            if code < 0:
                self._finish(job, 128 - code, SIGNAL_NAMES.get(-code, str(-code)))
            else:
                self._finish(job, code, None)
        if self._lingering:
            self._release_lingering()

    def _collect(self) -> None:
        """Wait for whatever has died; jobs whose main process was among it go to `_ended`, with exit code or -signal."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                # As process 1 the agent has every orphan for a child: no child means no process at all.
                self._alone = True
                break
            if pid == 0:
                break
            job = self._by_pid.pop(pid, None)
            if job is not None:
                self._ended.append((job, os.waitstatus_to_exitcode(status)))

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
        if group is None:
            return  # it was abandoned meanwhile
        if job.stopping:
            # The command itself is gone; its children had the same grace and go now. The answer waits until they
            # are: who reads "timed out" may count on nothing of it running any more.
            group.kill()
            now = time.monotonic()
            job.gone_by = job.gone_by or now + _UNKILLABLE_S
            if group.populated():
                job.dying = True
            elif job.dying:
                # The group is left a moment before the dead can be collected: one more look.
                job.dying = False
            else:
                now = job.gone_by
            if now < job.gone_by:
                self._loop.after(_DYING_POLL_S, lambda: self._finish(job, exit_code, signal_name))
                return
            self._collect()
            if self._ended:
                self._loop.after(0, self.reap)
        if job.terminal_fd >= 0 and not job.drained:
            # The kernel hands a terminal's last output on a moment after it was written.
            job.drained = True
            self._loop.after(_TERMINAL_DRAIN_S, lambda: self._finish(job, exit_code, signal_name))
            return
        self._pipes.finish(job)
        job.signal_name = signal_name
        # The limit is the whole sandbox's: beside other running commands only a failure is put down to it.
        if exit_code != 0 or not self._by_pid:
            self._oom_kills = self._containment.oom_kills()
            job.oom_killed = self._oom_kills > job.oom_before
        job.group = None
        if not self._alone and group.populated():
            self._lingering.append(group)
        else:
            self._containment.release(group)
        self._complete(job, exit_code)

    def _complete(self, job: Job, exit_code: int | None) -> None:
        """The one place where a job becomes terminal."""
        for timer in job.timers:
            timer.cancel()
        job.timers.clear()
        if job.turn is not None:
            job.session_reset = not job.turn.end() and job.pid > 0
            job.turn = None
        job.exit_code = exit_code
        if job.timed_out:
            job.exit_code = 124
            job.error_code = "timeout"
            job.error = f"Command timed out after {job.spec.timeout_s:g}s"
        elif job.cancelled is not None:
            job.error_code = "cancelled"
            job.error = job.cancelled
        job.completed_at = time.time()
        job.ended_mono = time.monotonic()
        if job.started_at is not None:
            job.duration_s = job.ended_mono - job.started_mono
        job.status = "succeeded" if job.exit_code == 0 and job.error is None else "failed"
        job.stdin_buffer.clear()
        self._finished.append(job)
        self._retained += job.stdout.memory_bytes + job.stderr.memory_bytes
        job.fire_done()
        job.fire_watchers()
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
        now = time.monotonic()
        while self._finished:
            oldest = self._finished[0]
            expired = now - oldest.ended_mono > self._retention_s
            if not expired and self._retained <= self._retained_cap and len(self._finished) <= 20_000:
                return
            if len(self._finished) == 1 and not expired:
                return
            self._drop(oldest)

    def _reclaim(self) -> bool:
        """Make room in the spool: of the command that ended first, only what its record needs is kept."""
        return any(job.stdout.shrink() | job.stderr.shrink() for job in self._finished)

    def _drop(self, job: Job) -> None:
        self._finished.remove(job)
        self._retained -= job.stdout.memory_bytes + job.stderr.memory_bytes
        job.stdout.release()
        job.stderr.release()
        del self.jobs[job.spec.job_id]
