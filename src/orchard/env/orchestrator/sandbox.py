"""One sandbox as the orchestrator knows it: what was asked for, where it stands, its clocks, its record."""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from orchard.env.contract import (
    CreateSandbox,
    Death,
    EndReason,
    SandboxStatus,
    parse_bytes,
    parse_cpu,
)
from orchard.env.errors import OrchardError, SandboxDeleted, SandboxFailed
from orchard.env.orchestrator.responses import json_bytes
from orchard.env.orchestrator.stores.base import SandboxRecord
from orchard.env.runtimes.base import SandboxSpec

if TYPE_CHECKING:
    from orchard.env.orchestrator.jobtable import LiveJob

LIVE = (SandboxStatus.PENDING, SandboxStatus.READY, SandboxStatus.PAUSED)
_LOG_LINES = 200


@dataclass(slots=True, eq=False)
class Sandbox:
    """Deadlines are `time.monotonic()` seconds, `*_at` Unix seconds.

    lease_s: seconds between heartbeats at most; None while no lease applies. holds: running commands that
    keep the lease from expiring. kept: finished jobs that its agent still holds. ending: the task that frees it,
    once it has ended. tunnels: target by port. trace: where the spans of its start belong.
    """

    sandbox_id: str
    owner: str
    body: CreateSandbox
    digest: str
    created_at: float
    ready_timeout_s: float
    ready_deadline: float
    ttl_s: float
    ttl_deadline: float
    lease_s: float | None = None
    lease_deadline: float = 0.0
    labels: dict[str, str] = field(default_factory=dict)
    tunnels: dict[int, str] = field(default_factory=dict)
    allow_egress: list[str] | None = None
    status: SandboxStatus = SandboxStatus.PENDING
    status_message: str | None = None
    ready_at: float | None = None
    ended_at: float | None = None
    reason: EndReason | None = None
    death: Death | None = None
    runtime_state: dict[str, Any] | None = None
    queue_s: float | None = None
    log: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=_LOG_LINES))
    #: Refused attempts to reach something, apart: many of them must not push out the lines of its life.
    denials: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=_LOG_LINES))
    #: Its creation was answered with an error: for its client it has never been.
    refused: bool = False
    holds: int = 0
    jobs: dict[str, LiveJob] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    starting: asyncio.Task[None] | None = None
    ending: asyncio.Task[None] | None = None
    trace: Any = None

    # ---------------------------------------------------------------------------------------- questions

    @property
    def live(self) -> bool:
        return self.ended_at is None

    @property
    def never_ready(self) -> bool:
        """It failed to start: still readable, as `failed`."""
        return self.status is SandboxStatus.FAILED and self.ready_at is None

    def deadline(self) -> float:
        """When the reaper has to look at it next."""
        times = [self.ttl_deadline]
        if self.status is SandboxStatus.PENDING:
            times.append(self.ready_deadline)
        if self.lease_s is not None and not self.holds:
            times.append(self.lease_deadline)
        return min(times)

    def overdue(self, now: float) -> tuple[EndReason, str] | None:
        """The clock that has run out, if any, and what to say of it."""
        if self.ttl_deadline <= now:
            return (
                EndReason.TTL,
                f"its lifetime of {self.ttl_s:g} s is over; PATCH ttl_seconds prolongs it in time",
            )
        if self.lease_s is not None and not self.holds and self.lease_deadline <= now:
            return EndReason.HEARTBEAT, f"no heartbeat came for {self.lease_s:g} s"
        if self.status is SandboxStatus.PENDING and self.ready_deadline <= now:
            where = "starting" if self.starting else "waiting in the create queue"
            return (
                EndReason.READY_TIMEOUT,
                f"not ready within {self.ready_timeout_s:g} s: it was still {where}",
            )
        return None

    def gone(self) -> OrchardError | None:
        """The error that every call on it answers with, once it has ended."""
        if self.ended_at is None:
            return None
        extra: dict[str, Any] = {"death": self.death.model_dump(mode="json")} if self.death else {}
        if self.status is SandboxStatus.DELETED:
            return SandboxDeleted(
                f"sandbox {self.sandbox_id} was deleted; create another one",
                reason=EndReason.DELETED.value,
                **extra,
            )
        reason = self.reason or EndReason.RUNTIME_ERROR
        what = "did not start" if self.ready_at is None else "has ended"
        return SandboxFailed(
            f"sandbox {self.sandbox_id} {what} ({reason.value}): {self.status_message or 'no further detail'}",
            reason=reason.value,
            **extra,
        )

    def note(self, message: str) -> None:
        """A line for its lifecycle log."""
        self.log.append((time.time(), message))

    # ------------------------------------------------------------------------------------------- shapes

    def spec(self) -> SandboxSpec:
        """What the runtime is asked for."""
        body = self.body
        return SandboxSpec(
            sandbox_id=self.sandbox_id,
            image=body.image,
            block_network=body.block_network,
            cpu_cores=parse_cpu(body.cpu) if body.cpu else None,
            memory_bytes=parse_bytes(body.memory) if body.memory else None,
            disk_bytes=parse_bytes(body.disk) if body.disk else None,
            pids=body.pids,
            env=body.env or {},
            working_dir=body.working_dir,
            user=body.user,
            labels=self.labels,
            allow_egress=None if self.allow_egress is None else tuple(self.allow_egress),
        )

    def info(self, runtime: str, queue_position: int | None = None) -> dict[str, Any]:
        """The fields of `SandboxInfo`, ready for JSON."""
        body = self.body
        now = time.monotonic()
        wall = time.time()
        live = self.ended_at is None
        return {
            "sandbox_id": self.sandbox_id,
            "namespace": "default",
            "image": body.image,
            "block_network": body.block_network,
            "allow_egress": self.allow_egress,
            "cpu": body.cpu,
            "memory": body.memory,
            "timeout": self.ready_timeout_s,
            "status": self.status.value,
            "ready": self.status is SandboxStatus.READY,
            "status_message": self.status_message,
            "reason": self.reason.value if self.reason else None,
            "labels": self.labels,
            "working_dir": body.working_dir,
            "user": body.user,
            "disk": body.disk,
            "pids": body.pids,
            "ttl_seconds": self.ttl_s,
            "heartbeat_timeout": self.lease_s,
            "runtime": runtime,
            "owner": self.owner,
            "created_at": self.created_at,
            "ready_at": self.ready_at,
            "ended_at": self.ended_at,
            "expires_at": wall + self.ttl_deadline - now if live else None,
            "lease_expires_at": wall + self.lease_deadline - now
            if live and self.lease_s is not None
            else None,
            "queue_position": queue_position,
            "queue_seconds": self.queue_s,
            "death": self.death,
        }

    def record(self, boot: str) -> SandboxRecord:
        """What the store keeps. Deadlines are kept both ways; monotonic ones count on the same boot."""
        now, wall = time.monotonic(), time.time()
        data = {
            "owner": self.owner,
            "body": self.body,
            "digest": self.digest,
            "created_at": self.created_at,
            "boot": boot,
            "ready_timeout_s": self.ready_timeout_s,
            "ready_deadline": self.ready_deadline,
            "ttl_s": self.ttl_s,
            "ttl_deadline": self.ttl_deadline,
            "expires_at": wall + self.ttl_deadline - now,
            "lease_s": self.lease_s,
            "labels": self.labels,
            "tunnels": list(self.tunnels.items()),
            "allow_egress": self.allow_egress,
            "status": self.status.value,
            "status_message": self.status_message,
            "ready_at": self.ready_at,
            "reason": self.reason.value if self.reason else None,
            "death": self.death,
            "runtime_state": self.runtime_state,
            "queue_s": self.queue_s,
            "refused": self.refused,
            "log": list(self.log) if self.ended_at is None else [],
        }
        return SandboxRecord(self.sandbox_id, self.ended_at, json_bytes(data))

    @classmethod
    def from_record(cls, record: SandboxRecord, boot: str) -> Sandbox:
        """The sandbox of a stored record. A lease begins anew: nobody could renew it while the service was away."""
        data = json.loads(record.data)
        now = time.monotonic()
        same_boot = bool(boot) and data["boot"] == boot
        ttl_deadline = data["ttl_deadline"] if same_boot else now + data["expires_at"] - time.time()
        sandbox = cls(
            sandbox_id=record.sandbox_id,
            owner=data["owner"],
            body=CreateSandbox.model_validate(data["body"], strict=False),
            digest=data["digest"],
            created_at=data["created_at"],
            ready_timeout_s=data["ready_timeout_s"],
            ready_deadline=data["ready_deadline"] if same_boot else now + data["ready_timeout_s"],
            ttl_s=data["ttl_s"],
            ttl_deadline=ttl_deadline,
            lease_s=data["lease_s"],
            lease_deadline=now + (data["lease_s"] or 0.0),
            labels=data["labels"],
            tunnels=dict(data.get("tunnels", ())),
            allow_egress=data.get("allow_egress"),
            status=SandboxStatus(data["status"]),
            status_message=data["status_message"],
            ready_at=data["ready_at"],
            ended_at=record.ended_at,
            reason=EndReason(data["reason"]) if data["reason"] else None,
            death=Death.model_validate(data["death"], strict=False) if data["death"] else None,
            runtime_state=data["runtime_state"],
            queue_s=data["queue_s"],
            refused=data.get("refused", False),
        )
        sandbox.log.extend((at, message) for at, message in data["log"])
        if sandbox.status is not SandboxStatus.PENDING:
            sandbox.settled.set()
        if not sandbox.live:
            sandbox.ended.set()
        return sandbox
