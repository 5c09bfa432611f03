"""Sandboxes: creating, changing, looking, their ends and their events."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from orchard.env.contract.base import (
    DEFAULT_READY_TIMEOUT_S,
    Answer,
    Cpu,
    Env,
    Labels,
    Request,
    SandboxId,
    Seconds,
    Size,
    Text,
)
from orchard.env.contract.networks import MAX_TUNNELS, AllowEgress, OpenTunnel, _one_each
from orchard.env.egress import EgressDenial


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


class CreateSandbox(Request):
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


class BatchCreate(Request):
    """POST /sandboxes/batch: each entry as in POST /sandboxes; answered in the same order."""

    sandboxes: Annotated[list[CreateSandbox], Field(min_length=1, max_length=10_000)]


class PatchSandbox(Request):
    """PATCH /sandboxes/{id}: `ttl_seconds` counts anew from now; `labels` replaces all labels; `allow_egress` replaces
    what it may reach, whatever network it was created with."""

    ttl_seconds: Seconds | None = None
    labels: Labels | None = None
    allow_egress: AllowEgress | None = None


class Death(Answer):
    """What is known of a sandbox that ended. Times are Unix seconds."""

    reason: EndReason
    message: str = ""
    ended_at: float
    exit_code: int | None = None
    peak_memory_bytes: int | None = None
    agent_log: list[str] = []


class SandboxInfo(Answer):
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


class SandboxList(Answer):
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


class SandboxEvent(Answer):
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


class BatchEntry(Answer):
    """Either `sandbox` or `error` (the JSON error body) is set."""

    sandbox: SandboxInfo | None = None
    error: dict[str, Any] | None = None


class BatchResult(Answer):
    results: list[BatchEntry]


class Deleted(Answer):
    status: Literal["deleted"] = "deleted"
    sandbox_id: str


class DeletedMany(Answer):
    status: Literal["deleted"] = "deleted"
    sandbox_ids: list[str]


class Heartbeat(Answer):
    status: Literal["ok"] = "ok"
    sandbox_id: str
    lease_expires_at: float | None = None


class SandboxStats(Answer):
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


class LogLine(Answer):
    time: float
    source: Literal["agent", "lifecycle", "network"]
    message: str


class SandboxLogs(Answer):
    sandbox_id: str
    lines: list[LogLine]
