"""The REST models: the one boundary that client, orchestrator and runtimes share.

Names and meanings of the fields are those of the REST contract (`timeout` and `timeout_seconds` are in
seconds, `cpu` and `memory` are Kubernetes quantities). Requests refuse unknown fields; `null` for an
optional field means "not given". Answers may gain fields within a major version.
"""

from __future__ import annotations

import base64
import binascii
import re
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from orchard.env.egress import EgressDenial, normalised

API_VERSION = "1.0"
VERSION_HEADER = "X-Orchard-Version"
KEY_HEADER = "X-API-Key"
REQUEST_ID_HEADER = "X-Request-ID"

DEFAULT_READY_TIMEOUT_S = 600.0
DEFAULT_COMMAND_TIMEOUT_S = 600.0
DEFAULT_TTL_S = 24 * 3600.0
DEFAULT_MAX_OUTPUT_BYTES = 1 << 20
FINISHED_JOB_RETENTION_S = 3600.0
#: Of one sandbox.
MAX_TUNNELS = 32
#: Files through the JSON endpoints; the agent moves them in chunks, but JSON holds them whole.
MAX_JSON_FILE_BYTES = 256 << 20

_ID = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\Z")
_ID_HINT = "use 1 to 63 of a-z, 0-9 and '-', beginning and ending with a letter or digit"


def valid_id(value: str) -> str:
    """`value` if it is a valid client-chosen id, else ValueError."""
    if not _ID.match(value):
        raise ValueError(f"invalid id {value!r:.80}: {_ID_HINT}")
    return value


_SUFFIX = {
    "": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15,
    "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50,
}  # fmt: skip


def parse_cpu(value: str) -> float:
    """Cores from a Kubernetes quantity: "2" → 2.0, "500m" → 0.5. ValueError if malformed or not positive."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)(m?)", value)
    if not match:
        raise ValueError(f"invalid cpu {value!r:.40}: write cores as '2' or '0.5', or thousandths as '500m'")
    cores = float(match[1]) / (1000 if match[2] else 1)
    if cores < 0.01:
        raise ValueError(f"invalid cpu {value!r:.40}: at least 10m")
    return cores


def parse_bytes(value: str) -> int:
    """Bytes from a Kubernetes quantity: "8Gi" → 8 · 2³⁰, "500M" → 5 · 10⁸. ValueError if malformed."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?)(k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?", value)
    if not match:
        raise ValueError(f"invalid size {value!r:.40}: write bytes as '8Gi', '512Mi', '1G' or a plain number")
    size = int(float(match[1]) * _SUFFIX[match[2] or ""])
    if size < 1:
        raise ValueError(f"invalid size {value!r:.40}: at least one byte")
    return size


def _quantity(parse: Any) -> Any:
    def check(value: str) -> str:
        parse(value)
        return value

    return check


def _number_as_text(value: Any) -> Any:
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


SandboxId = Annotated[str, AfterValidator(valid_id)]
JobId = Annotated[str, AfterValidator(valid_id)]
Cpu = Annotated[str, BeforeValidator(_number_as_text), AfterValidator(_quantity(parse_cpu))]
Size = Annotated[str, BeforeValidator(_number_as_text), AfterValidator(_quantity(parse_bytes))]


def _no_nul(value: str) -> str:
    if "\0" in value:
        raise ValueError("must not contain a NUL byte")
    return value


Text = Annotated[str, AfterValidator(_no_nul)]
Seconds = Annotated[float, Field(gt=0, le=365 * 24 * 3600, allow_inf_nan=False)]


def _env(value: dict[str, str]) -> dict[str, str]:
    for name in value:
        if not name or "=" in name:
            raise ValueError(f"invalid environment name {name!r:.80}: it must be non-empty and hold no '='")
    return value


Env = Annotated[dict[Text, Text], AfterValidator(_env)]


def _labels(value: dict[str, str]) -> dict[str, str]:
    for name, text in value.items():
        if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9_./-]{0,126}[A-Za-z0-9])?", name) or len(text) > 256:
            raise ValueError(
                f"invalid label {name!r:.80}: names are 1 to 128 of letters, digits, '_', '.', '/', '-'; values up to 256"
            )
    return value


TargetName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]


def _one_each(value: list[OpenTunnel]) -> list[OpenTunnel]:
    ports = [tunnel.listen_port for tunnel in value if tunnel.listen_port]
    if twice := {port for port in ports if ports.count(port) > 1}:
        raise ValueError(f"listen_port {min(twice)} is named twice: each tunnel needs a port of its own")
    return value


Labels = Annotated[dict[str, Text], Field(max_length=64), AfterValidator(_labels)]
AllowEgress = Annotated[list[Text], AfterValidator(normalised)]


def decode_base64(value: str) -> bytes:
    """Bytes from strict base64; ValueError names the position-free reason."""
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"not valid base64: {error}") from None


def _base64(value: str) -> str:
    decode_base64(value)
    return value


Base64 = Annotated[str, AfterValidator(_base64)]


class _Request(BaseModel):
    # Strict: true is not 1 and "5" is not 5; what a client got wrong is told, not guessed.
    model_config = ConfigDict(extra="forbid", strict=True)


class _Answer(BaseModel):
    model_config = ConfigDict(extra="ignore")


# ---------------------------------------------------------------------------------------------- sandboxes


class SandboxStatus(StrEnum):
    PENDING = "pending"
    READY = "ready"
    PAUSED = "paused"
    FAILED = "failed"
    DELETED = "deleted"


class EndReason(StrEnum):
    """Why a sandbox failed to start or ended."""

    DELETED = "deleted"
    TTL = "ttl"
    HEARTBEAT = "heartbeat"
    OOM = "oom"
    EVICTED = "evicted"
    NODE_LOST = "node_lost"
    AGENT_LOST = "agent_lost"
    RUNTIME_ERROR = "runtime_error"
    IMAGE_NOT_FOUND = "image_not_found"
    PULL_DENIED = "pull_denied"
    UNSCHEDULABLE = "unschedulable"
    OOM_AT_START = "oom_at_start"
    AGENT_DID_NOT_START = "agent_did_not_start"
    READY_TIMEOUT = "ready_timeout"
    QUOTA = "quota"


class OpenTunnel(_Request):
    """POST /sandboxes/{id}/tunnels. target: a name of `serve --tunnel-target`. listen_port: on the sandbox's loopback;
    left out or 0, the agent picks one."""

    target: TargetName
    listen_port: Annotated[int, Field(ge=0, le=65535)] | None = None


class CreateSandbox(_Request):
    """POST /sandboxes. Only `image` is required.

    timeout: seconds to become ready. cpu, memory, disk: Kubernetes quantities. pids: most processes and
    threads at once. ttl_seconds: maximum lifetime. heartbeat_timeout: lease in seconds; when given, it runs
    from creation on, otherwise from the first heartbeat. idempotency_key: a repeated create with the same key
    and body returns the same sandbox. tunnels: there when it is ready. allow_egress: the network,
    but only to these: host names, IPv4 addresses and networks, each with `:PORT` or `:FIRST-LAST` if need be (see
    docs/how-to/network.md); an empty list is nothing.
    """

    image: Annotated[Text, Field(min_length=1, max_length=1024)]
    block_network: bool = True
    allow_egress: AllowEgress | None = None
    sandbox_id: SandboxId | None = None
    cpu: Cpu | None = None
    memory: Size | None = None
    timeout: Seconds | None = None
    labels: Labels | None = None
    env: Env | None = None
    working_dir: Annotated[Text, Field(pattern=r"^/", max_length=4096)] | None = None
    user: Annotated[Text, Field(min_length=1, max_length=128)] | None = None
    disk: Size | None = None
    pids: Annotated[int, Field(ge=4, le=4_194_304)] | None = None
    ttl_seconds: Seconds | None = None
    heartbeat_timeout: Seconds | None = None
    idempotency_key: Annotated[Text, Field(min_length=1, max_length=256)] | None = None
    tunnels: Annotated[list[OpenTunnel], Field(max_length=MAX_TUNNELS), AfterValidator(_one_each)] | None = (
        None
    )

    @model_validator(mode="after")
    def _one_kind_of_network(self) -> CreateSandbox:
        if self.allow_egress is not None and not self.block_network:
            raise ValueError(
                "allow_egress narrows what block_network=false would open: leave out one of the two"
            )
        return self


class BatchCreate(_Request):
    """POST /sandboxes/batch: each entry as in POST /sandboxes; answered in the same order."""

    sandboxes: Annotated[list[CreateSandbox], Field(min_length=1, max_length=10_000)]


class PatchSandbox(_Request):
    """PATCH /sandboxes/{id}: `ttl_seconds` counts anew from now; `labels` replaces all labels; `allow_egress` replaces
    what it may reach, whatever network it was created with."""

    ttl_seconds: Seconds | None = None
    labels: Labels | None = None
    allow_egress: AllowEgress | None = None


class PullImage(_Request):
    """POST /images. pull: the image's name in its registry, as `registry.example/project/tool:1.2` or `…@sha256:…`."""

    pull: Annotated[Text, Field(min_length=1, max_length=1024)]


class ImageInfo(_Answer):
    """One image of the service. Sizes in bytes, times in Unix seconds. notes: what an import left out or changed."""

    name: str
    digest: str
    size_bytes: int
    created_at: float
    kind: str
    architecture: str
    base: str | None = None
    env: dict[str, str] = {}
    working_dir: str | None = None
    user: str | None = None
    notes: list[str] = []
    recipe: str | None = None


class PullInfo(_Answer):
    """A pull, under way or ended not long ago. progress: its last lines. image: what came of it; error: why nothing did,
    as an error's body."""

    pull: str
    status: Literal["running", "succeeded", "failed"]
    progress: list[str]
    image: ImageInfo | None = None
    error: dict[str, Any] | None = None


class ImageList(_Answer):
    images: list[ImageInfo]
    pulls: list[PullInfo]


class ImageRemoved(_Answer):
    status: Literal["deleted"] = "deleted"
    image: str


class Death(_Answer):
    """What is known of a sandbox that ended. Times are Unix seconds."""

    reason: EndReason
    message: str = ""
    ended_at: float
    exit_code: int | None = None
    peak_memory_bytes: int | None = None
    agent_log: list[str] = []


class SandboxInfo(_Answer):
    """A sandbox as the service sees it. Times are Unix seconds.

    queue_position: 0 is next; None when it is not queued. queue_seconds: time spent in the create queue. allow_egress:
    all that it may reach; None when `block_network` tells.
    """

    sandbox_id: str
    namespace: str = "default"
    image: str
    block_network: bool = True
    allow_egress: list[str] | None = None
    cpu: str | None = None
    memory: str | None = None
    timeout: float = DEFAULT_READY_TIMEOUT_S
    status: SandboxStatus
    ready: bool = False
    status_message: str | None = None
    reason: EndReason | None = None
    labels: dict[str, str] = {}
    working_dir: str | None = None
    user: str | None = None
    disk: str | None = None
    pids: int | None = None
    ttl_seconds: float | None = None
    heartbeat_timeout: float | None = None
    runtime: str | None = None
    owner: str | None = None
    created_at: float
    ready_at: float | None = None
    ended_at: float | None = None
    expires_at: float | None = None
    lease_expires_at: float | None = None
    queue_position: int | None = None
    queue_seconds: float | None = None
    death: Death | None = None


class SandboxList(_Answer):
    sandboxes: list[SandboxInfo]
    next_cursor: str | None = None


class EventType(StrEnum):
    """What a `SandboxEvent` tells. open: the stream begins here. gap: events before this one are lost."""

    OPEN = "open"
    GAP = "gap"
    CREATED = "created"
    STARTING = "starting"
    READY = "ready"
    CHANGED = "changed"
    ENDED = "ended"
    EGRESS_DENIED = "egress_denied"


class SandboxEvent(_Answer):
    """One event of GET /events. time, created_at: Unix seconds. After `open` and `gap`, which are about no sandbox,
    GET /sandboxes tells how things stand. id: what to go on after, as `Last-Event-ID`. egress: of `egress_denied`."""

    id: str
    type: EventType
    time: float
    sandbox_id: str | None = None
    owner: str | None = None
    image: str | None = None
    status: SandboxStatus | None = None
    reason: EndReason | None = None
    message: str | None = None
    labels: dict[str, str] = {}
    created_at: float | None = None
    cpu: str | None = None
    memory: str | None = None
    block_network: bool = True
    egress: EgressDenial | None = None


class BatchEntry(_Answer):
    """Either `sandbox` or `error` (the JSON error body) is set."""

    sandbox: SandboxInfo | None = None
    error: dict[str, Any] | None = None


class BatchResult(_Answer):
    results: list[BatchEntry]


class Deleted(_Answer):
    status: Literal["deleted"] = "deleted"
    sandbox_id: str


class DeletedMany(_Answer):
    status: Literal["deleted"] = "deleted"
    sandbox_ids: list[str]


class Heartbeat(_Answer):
    status: Literal["ok"] = "ok"
    sandbox_id: str
    lease_expires_at: float | None = None


class SandboxStats(_Answer):
    """Use of one sandbox, now. None where the runtime cannot tell."""

    sandbox_id: str
    cpu_seconds: float | None = None
    memory_bytes: int | None = None
    peak_memory_bytes: int | None = None
    memory_limit_bytes: int | None = None
    pids: int | None = None
    pids_limit: int | None = None
    disk_bytes: int | None = None
    disk_limit_bytes: int | None = None
    oom_kills: int | None = None


class TunnelInfo(_Answer):
    """A tunnel: what user code reaches as `url` is the operator's `target`. Counted since the tunnel was opened, or the
    service was started: connections, and bytes from the sandbox (sent) and to it (received). last_error: why a
    connection was refused or broken last; last_error_at: when, in Unix seconds."""

    listen_port: int
    target: str
    url: str
    open_connections: int = 0
    total_connections: int = 0
    failed_connections: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    last_error: str | None = None
    last_error_at: float | None = None


class TunnelList(_Answer):
    tunnels: list[TunnelInfo]


class LogLine(_Answer):
    time: float
    source: Literal["agent", "lifecycle", "network"]
    message: str


class SandboxLogs(_Answer):
    sandbox_id: str
    lines: list[LogLine]


# ------------------------------------------------------------------------------------------------- commands


class OnDisconnect(StrEnum):
    KEEP = "keep"
    KILL = "kill"


SessionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


class ExecRequest(_Request):
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


class Job(_Answer):
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


class JobQueued(_Answer):
    job_id: str
    status: JobStatus = JobStatus.QUEUED


class JobList(_Answer):
    jobs: list[Job]


class SessionInfo(_Answer):
    """A session. Times are Unix seconds. busy: a command of it runs."""

    name: str
    created_at: float
    used_at: float
    busy: bool


class SessionList(_Answer):
    sessions: list[SessionInfo]


class SignalRequest(_Request):
    """POST /jobs/{id}/signal: a name with or without SIG ("TERM", "SIGINT"), sent to all of the job."""

    signal: Annotated[str, Field(min_length=1, max_length=16, pattern=r"^[A-Za-z0-9+-]+$")]


class StdinRequest(_Request):
    """POST /jobs/{id}/stdin: bytes for a command started with `stdin_open`; `eof` ends its input."""

    data: Base64 = ""
    eof: bool = False


class Ok(_Answer):
    status: Literal["ok"] = "ok"


# ---------------------------------------------------------------------------------------------------- files


class PatchRequest(_Request):
    """POST /sandboxes/{id}/apply_patch. strip: leading path components to cut (default 1, as `patch -p1`)."""

    patch: Annotated[str, Field(min_length=1)]
    timeout_seconds: Seconds | None = None
    cwd: Annotated[Text, Field(min_length=1, max_length=4096)] | None = None
    strip: Annotated[int, Field(ge=0, le=64)] | None = None


class PatchResult(_Answer):
    success: bool
    stdout: str = ""
    stderr: str = ""
    exit_code: int | None = None


FilePath = Annotated[Text, Field(min_length=1, max_length=4096)]
OctalMode = Annotated[str, Field(pattern=r"^0?[0-7]{3,4}$")]
FileMode = Annotated[int, Field(ge=0, le=0o7777)] | OctalMode


def mode_bits(mode: int | str | None) -> int | None:
    """Permission bits of a `FileMode`."""
    return int(mode, 8) if isinstance(mode, str) else mode


class WriteFile(_Request):
    """POST /sandboxes/{id}/files. mode: octal text such as "0755", or an integer."""

    path: FilePath
    content: Base64
    mode: FileMode | None = None


class FileWritten(_Answer):
    success: bool = True
    path: str
    size: int


class FileContent(_Answer):
    path: str
    content: str
    size: int


class FileEntry(_Answer):
    """type: file, directory, symlink or other. modified: Unix seconds. target: of a symlink."""

    name: str
    type: Literal["file", "directory", "symlink", "other"]
    size: int
    modified: float
    mode: int = 0
    target: str | None = None


class FileStat(_Answer):
    """GET /sandboxes/{id}/files/stat: the fields of `FileEntry`, and the path that was asked for."""

    path: str
    type: Literal["file", "directory", "symlink", "other"]
    size: int
    modified: float
    mode: int = 0
    target: str | None = None


class FileChange(_Answer):
    """One event of GET /sandboxes/{id}/files/watch. type: `open` (the watch stands: what happens from now on is told),
    `gap` (something may have been missed: look at `path` anew), `created`, `modified` (told once until it is read),
    `written` (closed by who wrote it), `attributes` (mode, owner or times), `removed`, `moved` (from `source`).
    message: why, where a `gap` is the last event."""

    type: Literal["open", "gap", "created", "modified", "written", "attributes", "removed", "moved"]
    path: str
    directory: bool = False
    source: str | None = None
    message: str | None = None


class MakeDirectory(_Request):
    """POST /sandboxes/{id}/files/mkdir. parents: make those above it too, and accept a directory that is there already.
    mode: octal text such as "0755" (the default), or an integer."""

    path: FilePath
    parents: bool = False
    mode: FileMode | None = None


class MoveFile(_Request):
    """POST /sandboxes/{id}/files/move. overwrite: replace a file, a link or an empty directory at `target`."""

    source: FilePath
    target: FilePath
    overwrite: bool = False


class FileRemoved(_Answer):
    status: Literal["deleted"] = "deleted"
    path: str


class ArchiveWritten(_Answer):
    """entries: how many were made, directories and links included. size: bytes of the files."""

    success: bool = True
    path: str
    entries: int
    size: int


class FileListing(_Answer):
    path: str
    files: list[FileEntry]


# -------------------------------------------------------------------------------------------------- service


class ServiceInfo(_Answer):
    service: str = "orchard"
    version: str
    status: str = "running"


class Health(_Answer):
    status: str = "healthy"


class Resources(_Answer):
    """Capacity and use of the machine or cluster, and of the create queue. Extra fields vary by runtime."""

    model_config = ConfigDict(extra="allow")

    runtime: str
    cpu_cores: float
    memory_bytes: int
    memory_available_bytes: int
    disk_bytes: int | None = None
    disk_available_bytes: int | None = None
    sandboxes: dict[str, int] = {}
    queue_length: int = 0
    starting: int = 0
    max_starting: int = 0
    max_sandboxes: int | None = None
