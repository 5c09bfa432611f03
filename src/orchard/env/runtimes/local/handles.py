"""What the local runtime knows of each sandbox that it holds, and of the places that they take."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import dataclass, field
from typing import Any

from orchard.env.contract import EndReason
from orchard.env.images.model import ResolvedImage
from orchard.env.runtimes.base import SandboxSpec, StartFailed
from orchard.env.runtimes.channel import AgentProtocolChannel
from orchard.env.runtimes.local.launcher import Launch
from orchard.env.runtimes.local.spec import MAX_SLOTS, LaunchSpec, NetworkSpec

#: Dying takes no longer, but for a kernel that hangs.
DEATH_PATIENCE_S = 10.0


@dataclass
class LocalHandle:
    """A sandbox of this machine. `state` holds its slot, whether it has a network and which list, and its image."""

    sandbox_id: str
    state: dict[str, Any]
    channel: AgentProtocolChannel | None = None
    deleting: bool = False
    launch: Launch | None = None
    #: Whoever changes its network holds it.
    network_lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def slot(self) -> int:
        return int(self.state["slot"])

    @property
    def exit_code(self) -> int | None:
        """Of its agent, where that is known: the zygote of an earlier service tells nothing."""
        launch = self.launch
        return launch.exited.result() if launch is not None and launch.exited.done() else None


@dataclass
class Slots:
    """The lowest free slot first, so that user namespaces are used again."""

    used: set[int] = field(default_factory=set)
    _next: int = 0

    def take(self) -> int:
        while self._next in self.used:
            self._next += 1
        if self._next >= MAX_SLOTS:
            raise StartFailed(EndReason.UNSCHEDULABLE, f"all {MAX_SLOTS} sandbox slots are in use")
        self.used.add(self._next)
        return self._next

    def give_back(self, slot: int) -> None:
        self.used.discard(slot)
        self._next = min(self._next, slot)


def launch_spec(
    spec: SandboxSpec, image: ResolvedImage, launch: Launch, network: NetworkSpec | None, ids: int
) -> LaunchSpec:
    """What the zygote is asked for."""
    return LaunchSpec(
        sandbox_id=spec.sandbox_id, slot=launch.slot,
        layers=[str(layer) for layer in image.layers],
        mounts=[(mount.target, [str(layer) for layer in mount.layers], mount.read_only) for mount in image.mounts],
        image_ref=spec.image, image_digest=image.digest, cpu_cores=spec.cpu_cores,
        memory_bytes=spec.memory_bytes, disk_bytes=spec.disk_bytes, pids=spec.pids, network=network, ids=ids,
    )  # fmt: skip


async def kill_newborn(launch: Launch) -> None:
    """End a launch by its pid: it may not be in its control group yet."""
    pid = launch.pid
    if pid is None or launch.exited.done():
        return
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    await asyncio.wait((launch.exited,), timeout=DEATH_PATIENCE_S)
