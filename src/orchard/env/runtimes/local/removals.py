"""Removing sandboxes of this machine: their processes, networks, directories, control groups and places."""

from __future__ import annotations

import asyncio
from pathlib import Path

from orchard.env.contract import EndReason
from orchard.env.errors import RuntimeRefused
from orchard.env.runtimes.base import Postmortem
from orchard.env.runtimes.local.cgroups import Cgroups
from orchard.env.runtimes.local.disk import log_tail, nearly_empty, remove_tree
from orchard.env.runtimes.local.egress import Egress
from orchard.env.runtimes.local.handles import DEATH_PATIENCE_S, LocalHandle, Slots
from orchard.env.runtimes.local.launcher import Launcher
from orchard.env.runtimes.local.network import Network
from orchard.env.runtimes.local.processes import Processes
from orchard.env.runtimes.local.removal import remove_all


class Removals:
    """ordinary: the service is not root's, and trees may hold what only the launcher can remove."""

    def __init__(
        self,
        folder: Path,
        handles: dict[str, LocalHandle],
        slots: Slots,
        cgroups: Cgroups | Processes,
        network: Network,
        egress: Egress,
        launcher: Launcher,
        *,
        ordinary: bool,
    ) -> None:
        self._folder = folder
        self._handles = handles
        self._slots = slots
        self._cgroups = cgroups
        self._network = network
        self._egress = egress
        self._launcher = launcher
        self._ordinary = ordinary
        self._under_way: dict[str, asyncio.Task[Postmortem]] = {}

    async def remove(
        self, sandbox_id: str, reason: EndReason = EndReason.DELETED, message: str = ""
    ) -> Postmortem:
        """Remove everything of a sandbox; concurrent callers share one removal, which no cancellation stops."""
        removal = self._under_way.get(sandbox_id)
        if removal is None:
            removal = asyncio.get_running_loop().create_task(self._remove_now(sandbox_id, reason, message))
            self._under_way[sandbox_id] = removal
            removal.add_done_callback(lambda _task: self._under_way.pop(sandbox_id, None))
        return await asyncio.shield(removal)

    async def _remove_now(self, sandbox_id: str, reason: EndReason, message: str) -> Postmortem:
        handle = self._handles.get(sandbox_id)
        if handle is not None:
            handle.deleting = True
            if handle.channel is not None:
                await handle.channel.close()
        peak = self._cgroups.peak_memory_bytes(sandbox_id)
        log = tuple(log_tail(self._folder / sandbox_id / "agent.log"))
        self._cgroups.kill(sandbox_id)
        await self._gone(sandbox_id)
        if handle is not None and (handle.state.get("network") or handle.state.get("egress") is not None):
            async with handle.network_lock:
                await asyncio.to_thread(self._network.detach, handle.slot)
                await self._egress.forget(handle.slot)
        await self._remove_files(sandbox_id)
        if self._handles.pop(sandbox_id, None) is not None and handle is not None:
            if handle.launch is not None and (handle.launch.answered or not handle.launch.asked):
                self._launcher.forget(handle.launch)
            self._slots.give_back(handle.slot)
        return Postmortem(reason, message, handle.exit_code if handle else None, peak, log)

    async def _gone(self, sandbox_id: str) -> None:
        """Wait until no process is left (the kernel is killing them)."""
        deadline = asyncio.get_running_loop().time() + DEATH_PATIENCE_S
        delay_s = 0.001  # uvloop rounds less down to nothing
        while not self._cgroups.empty(sandbox_id):
            if asyncio.get_running_loop().time() > deadline:
                raise RuntimeRefused(f"processes of sandbox {sandbox_id} do not die; the kernel holds them")
            await asyncio.sleep(delay_s)
            delay_s = min(delay_s * 1.5, 0.02)

    async def _remove_files(self, sandbox_id: str) -> None:
        path = self._folder / sandbox_id
        if self._ordinary:
            try:
                await asyncio.to_thread(remove_all, str(path))
            except PermissionError:
                await self._launcher.remove(sandbox_id)
            await asyncio.to_thread(self._cgroups.remove, sandbox_id)
            return
        if not path.exists() or nearly_empty(path):
            # The common case is a handful of system calls: a thread would cost more than it saves.
            remove_tree(path)
            self._cgroups.remove(sandbox_id)
        else:
            await asyncio.to_thread(remove_tree, path)
            await asyncio.to_thread(self._cgroups.remove, sandbox_id)
