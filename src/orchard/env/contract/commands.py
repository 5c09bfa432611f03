"""Commands, their results, sessions."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, model_validator

from orchard.env.contract.base import Answer, Base64, Env, JobId, Request, Seconds, Text


class OnDisconnect(StrEnum):
    KEEP = "keep"
    KILL = "kill"


SessionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


class ExecRequest(Request):
    """POST /sandboxes/{id}/exec.

    command: a string runs in a shell, a list is exact argv. stdin: text given to the command, after which its
    input ends (closed at once when not given). stdin_open: keep the input open after `stdin` for
    POST /jobs/{id}/stdin, until its `eof`. grace_seconds: time between SIGTERM and SIGKILL when it is
    stopped. job_id: client-chosen; a repeated request with it never runs the command twice. background: like
    `concurrent`, without a default timeout, and its processes outlive nothing but the sandbox. concurrent: do
    not wait for earlier commands of this sandbox. max_output_bytes: per stream, in the job object (default
    1 MiB). max_spool_bytes: per stream, what GET /jobs/{id}/stream can go back to (default 64 MiB). session: a named
    shell: the command takes over the directory, variables, functions, aliases and options that the last one of the
    same session left (in images without bash: the directory and exported variables).
    """

    command: Annotated[Text, Field(min_length=1)] | Annotated[list[Text], Field(min_length=1)]
    timeout_seconds: Seconds | None = None
    cwd: Annotated[Text, Field(min_length=1, max_length=4096)] | None = None
    env: Env | None = None
    login_shell: bool | None = None
    wait: bool | None = None
    stdin: str | None = None
    stdin_open: bool | None = None
    user: Annotated[Text, Field(min_length=1, max_length=128)] | None = None
    grace_seconds: Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False)] | None = None
    on_disconnect: OnDisconnect | None = None
    job_id: JobId | None = None
    max_output_bytes: Annotated[int, Field(ge=0, le=64 << 20)] | None = None
    max_spool_bytes: Annotated[int, Field(ge=0, le=512 << 20)] | None = None
    background: bool | None = None
    concurrent: bool | None = None
    session: SessionName | None = None

    @model_validator(mode="after")
    def _argv_has_a_program(self) -> ExecRequest:
        if isinstance(self.command, list) and not self.command[0]:
            raise ValueError("command[0] must name a program")
        return self


class StreamName(StrEnum):
    STDOUT = "stdout"
    STDERR = "stderr"


class JobStatus(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"

    @property
    def terminal(self) -> bool:
        return self in (JobStatus.SUCCEEDED, JobStatus.FAILED)


class Job(Answer):
    """A command and what became of it. Times are Unix seconds, durations seconds.

    status `failed`: non-zero exit, signal, timeout, cancel or infrastructure; `error` is set for the last
    three only and `error_code` names which (`timeout`, `cancelled`, or a code of the error table). exit_code
    is 128+n after signal n, 124 after a timeout (told apart by `timed_out`). stdout and stderr are text with
    undecodable bytes replaced; `*_bytes` are true totals. session_reset: what the command changed in its session is
    lost (it was killed or replaced its shell), the session is what it was before it.
    """

    job_id: str
    sandbox_id: str
    command: str | list[str]
    status: JobStatus
    stdout: str = ""
    stderr: str = ""
    exit_code: int | None = None
    created_at: float
    started_at: float | None = None
    completed_at: float | None = None
    error: str | None = None
    error_code: str | None = None
    timed_out: bool = False
    signal: str | None = None
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    stdout_truncated: bool = False
    stderr_truncated: bool = False
    duration_seconds: float | None = None
    queue_seconds: float | None = None
    oom_killed: bool = False
    session_reset: bool = False
    infra: bool = False


class JobQueued(Answer):
    job_id: str
    status: JobStatus = JobStatus.QUEUED


class JobList(Answer):
    jobs: list[Job]


class SessionInfo(Answer):
    """A session. Times are Unix seconds. busy: a command of it runs."""

    name: str
    created_at: float
    used_at: float
    busy: bool


class SessionList(Answer):
    sessions: list[SessionInfo]


class SignalRequest(Request):
    """POST /jobs/{id}/signal: a name with or without SIG ("TERM", "SIGINT"), sent to all of the job."""

    signal: Annotated[str, Field(min_length=1, max_length=16, pattern=r"^[A-Za-z0-9+-]+$")]


class StdinRequest(Request):
    """POST /jobs/{id}/stdin: bytes for a command started with `stdin_open`; `eof` ends its input."""

    data: Base64 = ""
    eof: bool = False


class Ok(Answer):
    status: Literal["ok"] = "ok"
