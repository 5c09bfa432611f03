"""The runtime protocol: what a place that can hold sandboxes (this machine, Docker, Kubernetes) must do.

A runtime creates and removes sandboxes and opens the channel to the agent inside each; everything that
happens inside (commands, files) goes over that channel and is the same on every runtime. Runtimes know
nothing of REST, keys, queues or clocks: the orchestrator decides, the runtime does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from orchard.env.contract import EndReason
from orchard.env.egress import EgressDenial
from orchard.env.images import ImageStore
from orchard.env.images.pulls import Pulls


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """What to create. Sizes in bytes, cpu in cores; None means the runtime's default (usually no limit)."""

    sandbox_id: str
    image: str
    block_network: bool = True
    cpu_cores: float | None = None
    memory_bytes: int | None = None
    disk_bytes: int | None = None
    pids: int | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    working_dir: str | None = None
    user: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    #: Entries of `orchard.env.egress`; None where `block_network` tells.
    allow_egress: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Postmortem:
    """What a runtime found out about a sandbox that is gone or going."""

    reason: EndReason
    message: str = ""
    exit_code: int | None = None
    peak_memory_bytes: int | None = None
    agent_log: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Use of one sandbox now; None where it cannot be told."""

    cpu_seconds: float | None = None
    memory_bytes: int | None = None
    peak_memory_bytes: int | None = None
    memory_limit_bytes: int | None = None
    pids: int | None = None
    pids_limit: int | None = None
    disk_bytes: int | None = None
    disk_limit_bytes: int | None = None
    oom_kills: int | None = None


class StartFailed(Exception):
    """A sandbox could not be started; `retryable` when the same spec may start a moment later."""

    def __init__(self, reason: EndReason, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.retryable = retryable


class AgentChannel(Protocol):
    """A multiplexed, authenticated connection to one agent (see `orchard.env.agent.wire`)."""

    async def call(self, op: str, payload: bytes = b"", /, **args: Any) -> tuple[dict[str, Any], bytes]:
        """One request and its answer: JSON header and raw payload.

        Raises the `OrchardError` that the agent answered with, or `AgentUnreachable` when the channel broke
        before the answer came.
        """
        ...

    @property
    def closed(self) -> bool: ...

    async def close(self) -> None: ...


class Handle(Protocol):
    """A sandbox that a runtime holds. `state` is JSON, enough to find it again after a restart."""

    sandbox_id: str
    state: dict[str, Any]


class Runtime(Protocol):
    """See the module's docstring. All methods may be called concurrently; `create` and `delete` of one id
    are serialised by the caller."""

    name: str
    #: A sandbox ended by itself: called from the event loop with its id, once, after it is known to be gone.
    on_death: Callable[[str, Postmortem], None]

    async def start(self) -> None:
        """Make ready: start helpers, check the machine. Raises `RuntimeRefused` when it cannot work here."""
        ...

    async def close(self) -> None:
        """Stop helpers; leave the sandboxes alive for adoption by the next `start`."""
        ...

    async def create(self, spec: SandboxSpec, progress: Callable[[str], None] = ...) -> Handle:
        """Start a sandbox; returns when its agent answers. `progress` receives lifecycle log lines.

        Raises `StartFailed`. Nothing is left when it raises or is cancelled.
        """
        ...

    async def delete(self, sandbox_id: str) -> Postmortem:
        """Free every process, mount, network object, cgroup and directory of it. Repeating is fine, also for
        ids never created. Returns what was measured (peak memory) before it went."""
        ...

    async def channel(self, sandbox_id: str) -> AgentChannel:
        """The live channel to its agent. Raises `AgentUnreachable`."""
        ...

    async def tunnel_connection(self, sandbox_id: str, protocol: asyncio.Protocol) -> None:
        """Open another connection to its agent, for the frames of `orchard.env.agent.links`, and give it to
        `protocol`. Raises `AgentUnreachable`."""
        ...

    async def adopt(self, states: Mapping[str, dict[str, Any]]) -> dict[str, Handle | Postmortem]:
        """After a restart: reconnect to the sandboxes whose `Handle.state` was kept. Those that still run come
        back as handles; what is left of the others is removed and told in a postmortem. Then removes whatever
        exists under this runtime's names that is not in `states` (leftovers of a crash): no orphan."""
        ...

    async def usage(self, sandbox_id: str) -> Usage: ...

    async def agent_log(self, sandbox_id: str) -> list[str]: ...

    async def resources(self) -> dict[str, Any]:
        """cpu_cores, memory_bytes, memory_available_bytes, disk_bytes, disk_available_bytes and own extras."""
        ...

    def describe(self) -> list[str]:
        """Lines for the log at start: what this runtime enforces here and what is weaker."""
        ...


@runtime_checkable
class HoldsImages(Protocol):
    """A runtime that keeps its images itself, so that the service can list, pull and remove them."""

    images: ImageStore
    pulls: Pulls


@runtime_checkable
class FiltersEgress(Protocol):
    """A runtime that can hold sandboxes to a list of what they may reach."""

    #: Refused attempts of a sandbox, already gathered: called from the event loop.
    on_denied: Callable[[str, EgressDenial], None]

    async def check_egress(self) -> None:
        """Raises `RuntimeRefused` when it cannot do so here."""
        ...

    async def allow_egress(self, sandbox_id: str, entries: tuple[str, ...]) -> dict[str, Any]:
        """From when it returns, a live sandbox reaches exactly these; its new `Handle.state`.

        Raises `RuntimeRefused` or `AgentUnreachable`, and then leaves it with what it had or with less.
        """
        ...


__all__ = [
    "AgentChannel", "FiltersEgress", "Handle", "HoldsImages", "Postmortem", "Runtime", "SandboxSpec", "StartFailed", "Usage",
]  # fmt: skip
