"""The local runtime: the asyncio side that asks the zygote for sandboxes, reaches their agents and removes them."""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from orchard.env.contract import EndReason
from orchard.env.egress import EgressDenial
from orchard.env.errors import (
    AgentUnreachable,
    OrchardError,
    RuntimeRefused,
)
from orchard.env.images import ImageStore
from orchard.env.images.model import ResolvedImage
from orchard.env.images.pulls import Pulls
from orchard.env.runtimes.base import Handle, Postmortem, SandboxSpec, StartFailed, Usage
from orchard.env.runtimes.channel import AgentProtocolChannel
from orchard.env.runtimes.local import looking
from orchard.env.runtimes.local.cgroups import DEFAULT_PIDS, Cgroups
from orchard.env.runtimes.local.connections import dial
from orchard.env.runtimes.local.disk import disk_use
from orchard.env.runtimes.local.egress import Egress
from orchard.env.runtimes.local.handles import LocalHandle, Slots, kill_newborn, launch_spec
from orchard.env.runtimes.local.launcher import Launch, Launcher
from orchard.env.runtimes.local.name_servers import set_name_servers
from orchard.env.runtimes.local.network import Network
from orchard.env.runtimes.local.ordinary import Ordinary
from orchard.env.runtimes.local.removals import Removals
from orchard.env.runtimes.local.spec import LaunchSpec, NetworkSpec
from orchard.env.runtimes.local.start_images import resolved

_AGENT_START_S = 30.0
_ADOPT_TIMEOUT_S = 10.0
#: How long a sandbox that is not wanted any more waits for the zygote to have dealt with its request.
_SETTLE_PATIENCE_S = 2.0


class LocalRuntime:
    """Sandboxes on this machine, under `state_dir`; see `orchard.env.runtimes.base.Runtime`."""

    name = "local"

    def __init__(
        self,
        state_dir: Path,
        *,
        images: ImageStore,
        pulls: Pulls | None = None,
        pull_missing: bool = False,
        egress_resolver: str | None = None,
    ) -> None:
        self._state_dir = state_dir.absolute()
        self.images = images
        self.pulls = pulls or Pulls(images)
        self._pull_missing = pull_missing
        self._instance = hashlib.sha256(str(self._state_dir).encode()).hexdigest()[:8]
        #: None for root.
        self._ordinary = Ordinary.detect() if os.geteuid() != 0 else None
        self._cgroups = (
            Cgroups.detect(self._instance)
            if self._ordinary is None
            else self._ordinary.cgroups(self._instance, str(self._state_dir))
        )
        self._network = Network(self._instance)
        self._egress = Egress(
            self._network, self._state_dir, egress_resolver, lambda *denied: self.on_denied(*denied)
        )
        self._handles: dict[str, LocalHandle] = {}
        self._starting: set[str] = set()
        self._slots = Slots()
        self._launcher = Launcher(self._state_dir, self._instance, self._ordinary)
        self._sandboxes_fd = -1
        self._removals = Removals(
            self._state_dir / "sandboxes", self._handles, self._slots, self._cgroups, self._network, self._egress,
            self._launcher, ordinary=self._ordinary is not None,
        )  # fmt: skip
        self._closing = False
        self._tasks: set[asyncio.Task[None]] = set()
        self.on_death: Callable[[str, Postmortem], None] = lambda _id, _postmortem: None
        self.on_denied: Callable[[str, EgressDenial], None] = lambda _id, _denial: None

    # ------------------------------------------------------------------------------------------ life cycle

    async def start(self) -> None:
        self._state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        sandboxes = self._state_dir / "sandboxes"
        sandboxes.mkdir(mode=0o700, exist_ok=True)
        self._sandboxes_fd = os.open(sandboxes, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        await self._launcher.start()
        await asyncio.to_thread(self.images.prepare)

    async def close(self) -> None:
        self._closing = True
        await self.pulls.close()
        for handle in self._handles.values():
            if handle.channel is not None:
                await handle.channel.close()
        for task in list(self._tasks):
            task.cancel()
        await self._launcher.close()
        await self._egress.close()
        await asyncio.to_thread(self._network.close, remove=not self._handles)
        if not self._handles:
            self._cgroups.remove_instance()
        if self._sandboxes_fd >= 0:
            os.close(self._sandboxes_fd)
            self._sandboxes_fd = -1

    # ------------------------------------------------------------------------------------------- creation

    async def create(self, spec: SandboxSpec, progress: Callable[[str], None] = lambda _line: None) -> Handle:
        if self._ordinary is not None:
            try:
                self._ordinary.check(spec, self._cgroups.enforced())
            except RuntimeRefused as error:
                raise StartFailed(EndReason.RUNTIME_ERROR, error.detail) from error
        image = await resolved(self.images, self.pulls, spec.image, progress, pull_missing=self._pull_missing)
        slot = self._slots.take()
        handle = LocalHandle(
            spec.sandbox_id,
            {
                "slot": slot,
                "network": not spec.block_network or spec.allow_egress is not None,
                "egress": spec.allow_egress,
                "disk": spec.disk_bytes,
            },
        )
        if self._ordinary is not None:
            handle.state["pids"] = spec.pids or DEFAULT_PIDS  # which no group tells
        handle.launch = launch = self._launcher.next_launch(slot)
        self._handles[spec.sandbox_id] = handle
        self._starting.add(spec.sandbox_id)
        try:
            await self._launch(handle, launch, spec, image)
        except BaseException as error:
            await self._abandon_start(spec.sandbox_id, launch)
            if isinstance(error, OrchardError):
                raise StartFailed(EndReason.RUNTIME_ERROR, error.detail) from error
            raise
        finally:
            self._starting.discard(spec.sandbox_id)
        progress(f"agent is process {launch.pid}, slot {slot}")
        return handle

    async def _abandon_start(self, sandbox_id: str, launch: Launch) -> None:
        """Remove a sandbox whose start failed or was cancelled: the zygote first has to have dealt with the request,
        and the newborn to be gone, else they would make anew what was just removed."""

        async def abandon() -> None:
            if launch.asked:
                await self._launcher.settled(launch, _SETTLE_PATIENCE_S)
            await kill_newborn(launch)
            await self._removals.remove(sandbox_id)
            if launch.asked and not launch.answered:
                self._in_background(self._undo_late(sandbox_id, launch))

        await asyncio.shield(self._in_background(abandon()))

    async def _undo_late(self, sandbox_id: str, launch: Launch) -> None:
        """The zygote hung and was not waited for: should it get to the request after all, that is undone."""
        await asyncio.wait((launch.delivered, launch.failed), return_when=asyncio.FIRST_COMPLETED)
        await kill_newborn(launch)
        self._launcher.forget(launch)
        if sandbox_id not in self._handles:
            await self._removals.remove(sandbox_id)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _launch(
        self, handle: LocalHandle, launch: Launch, spec: SandboxSpec, image: ResolvedImage
    ) -> None:
        try:
            async with asyncio.timeout(_AGENT_START_S):
                network = await self._network_for(handle, spec)
                launch.asked = True
                ids = self._ordinary.ids if self._ordinary is not None else 0
                channel = await self._ask(handle, launch, launch_spec(spec, image, launch, network, ids))
                try:
                    if network is not None:
                        pid = await launch.until_delivered()
                        await asyncio.to_thread(self._network.attach, handle.slot, pid)
                        await self._launcher.go(launch)
                    # What its commands start from. The agent finds it waiting.
                    await channel.call("hello", configure={
                        "env": {**image.env, **spec.env},
                        "working_dir": spec.working_dir or image.working_dir,
                        "user": spec.user or image.user,
                    })  # fmt: skip
                except BaseException as error:
                    await channel.close()
                    if isinstance(error, AgentUnreachable):
                        await launch.last_word()
                    raise
                handle.state["pid"] = await launch.until_delivered()
                handle.channel = channel
        except TimeoutError:
            what = f"no answer from the agent within {_AGENT_START_S:g} s"
            raise StartFailed(EndReason.AGENT_DID_NOT_START, what, retryable=True) from None

    async def _network_for(self, handle: LocalHandle, spec: SandboxSpec) -> NetworkSpec | None:
        """Its network; where it has a list, that holds already."""
        if spec.allow_egress is not None:
            await self._egress.allow(spec.sandbox_id, handle.slot, spec.allow_egress)
            return await self._egress.spec(handle.slot)
        return None if spec.block_network else await asyncio.to_thread(self._network.spec, handle.slot)

    async def check_egress(self) -> None:
        await self._egress.start()

    async def allow_egress(self, sandbox_id: str, entries: tuple[str, ...]) -> dict[str, Any]:
        channel = await self.channel(sandbox_id)
        handle = self._handles[sandbox_id]
        async with handle.network_lock:
            if handle.deleting:
                raise AgentUnreachable(f"sandbox {sandbox_id} is being removed")
            first = handle.state.get("egress") is None
            # Known first: whatever is made from here on goes with the sandbox.
            handle.state["egress"] = entries
            await self._egress.allow(sandbox_id, handle.slot, entries)
            network = await self._egress.spec(handle.slot)
            if not handle.state.get("network"):
                await asyncio.to_thread(self._network.join, handle.slot, int(handle.state["pid"]), network)
                handle.state["network"] = True
            if first:
                await set_name_servers(channel, network.nameservers)
            return dict(handle.state)

    async def _ask(self, handle: LocalHandle, launch: Launch, spec: LaunchSpec) -> AgentProtocolChannel:
        """Ask for the sandbox; the channel to its agent, which will be born with the other end."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            _, channel = await asyncio.get_running_loop().create_unix_connection(
                lambda: AgentProtocolChannel(spec.sandbox_id, lambda: self._channel_lost(handle)), sock=ours
            )
            try:
                await self._launcher.create(launch, spec, theirs)
            except BaseException:
                await channel.close()
                raise
        return channel

    async def _connect(self, handle: LocalHandle) -> AgentProtocolChannel:
        """Open and authenticate another channel to the agent of a sandbox."""
        handle.channel = await dial(self._sandboxes_fd, handle.sandbox_id, lambda: self._channel_lost(handle))
        return handle.channel

    async def tunnel_connection(self, sandbox_id: str, protocol: asyncio.Protocol) -> None:
        channel = await dial(self._sandboxes_fd, sandbox_id, None, use="tunnels")
        channel.hand_over(protocol)

    # ------------------------------------------------------------------------------------------------ death

    def _channel_lost(self, handle: LocalHandle) -> None:
        if self._closing or handle.deleting or handle.sandbox_id in self._starting:
            return
        self._in_background(self._after_loss(handle))

    async def _after_loss(self, handle: LocalHandle) -> None:
        """A broken channel: the agent died (the sandbox with it), or only the connection did."""
        if not self._agent_gone(handle):
            try:
                async with asyncio.timeout(_ADOPT_TIMEOUT_S):
                    await self._connect(handle)
                return
            except (AgentUnreachable, TimeoutError, OSError):
                pass
        if handle.deleting:
            return
        await self._exit_known(handle)
        postmortem = await self._removals.remove(
            handle.sandbox_id, EndReason.AGENT_LOST, "the agent ended, and the sandbox with it"
        )
        self.on_death(handle.sandbox_id, postmortem)

    async def _exit_known(self, handle: LocalHandle, patience_s: float = 1.0) -> None:
        """Let the zygote's word on the exit code come first; after its own death there is none."""
        if handle.launch is not None and self._launcher.alive and self._agent_gone(handle):
            await asyncio.wait((handle.launch.exited,), timeout=patience_s)

    def _agent_gone(self, handle: LocalHandle) -> bool:
        return handle.exit_code is not None or self._cgroups.empty(handle.sandbox_id)

    # -------------------------------------------------------------------------------------------- deletion

    async def delete(self, sandbox_id: str) -> Postmortem:
        return await self._removals.remove(sandbox_id)

    # ------------------------------------------------------------------------------------------- adoption

    async def adopt(self, states: Mapping[str, dict[str, Any]]) -> dict[str, Handle | Postmortem]:
        await self._egress.restore(
            {
                sandbox_id: (int(state["slot"]), tuple(state["egress"]))
                for sandbox_id, state in states.items()
                if state.get("egress") is not None
            }
        )
        for sandbox_id, state in states.items():
            if "slot" in state:
                self._slots.used.add(int(state["slot"]))
                self._handles[sandbox_id] = LocalHandle(sandbox_id, dict(state))
        found: dict[str, Handle | Postmortem] = {}
        limit = asyncio.Semaphore(32)

        async def one(sandbox_id: str) -> None:
            async with limit:
                found[sandbox_id] = await self._adopt_one(sandbox_id)

        async with asyncio.TaskGroup() as group:
            for sandbox_id in states:
                group.create_task(one(sandbox_id))
        await self._remove_orphans(states)
        return found

    async def _adopt_one(self, sandbox_id: str) -> Handle | Postmortem:
        handle = self._handles.get(sandbox_id)
        problem = "it was not started when the service ended"
        if handle is not None:
            try:
                async with asyncio.timeout(_ADOPT_TIMEOUT_S):
                    await self._connect(handle)
                return handle
            except (OrchardError, OSError, TimeoutError) as error:
                problem = f"its agent was gone when the service came back ({error})"
        return await self._removals.remove(sandbox_id, EndReason.AGENT_LOST, problem)

    async def _remove_orphans(self, states: Mapping[str, dict[str, Any]]) -> None:
        """Whatever a crash left under our names: groups, directories, interfaces."""
        on_disk = {entry.name for entry in os.scandir(self._state_dir / "sandboxes")}
        for sandbox_id in (on_disk | self._cgroups.sandboxes()) - set(states):
            await self._removals.remove(sandbox_id)
        in_use = {handle.slot for handle in self._handles.values() if handle.state.get("network")}
        await asyncio.to_thread(self._network.leftovers, in_use)

    # --------------------------------------------------------------------------------------------- looking

    async def channel(self, sandbox_id: str) -> AgentProtocolChannel:
        handle = self._handles.get(sandbox_id)
        if handle is None or handle.channel is None or handle.channel.closed:
            if (
                handle is not None
                and not handle.deleting
                and sandbox_id not in self._starting
                and not self._agent_gone(handle)
            ):
                return await self._connect(handle)
            raise AgentUnreachable(f"sandbox {sandbox_id} has no live agent")
        return handle.channel

    async def usage(self, sandbox_id: str) -> Usage:
        usage = self._cgroups.usage(sandbox_id)
        handle = self._handles.get(sandbox_id)
        limit = handle.state.get("disk") if handle is not None else None
        if limit is not None:
            header, _ = await (await self.channel(sandbox_id)).call("statvfs")
            used = header["total_bytes"] - header["free_bytes"]
        else:
            used = await asyncio.to_thread(disk_use, self._state_dir / "sandboxes" / sandbox_id)
        if limit is not None and usage["memory_limit_bytes"] is not None:
            usage["memory_limit_bytes"] -= (
                limit  # the group's limit has room for the disk, which lives in memory
            )
        if usage["pids"] is None and handle is not None:
            header, _ = await (await self.channel(sandbox_id)).call("processes")
            usage["pids"], usage["pids_limit"] = header["processes"], handle.state.get("pids")
        return Usage(**usage, disk_bytes=used, disk_limit_bytes=limit)

    async def agent_log(self, sandbox_id: str) -> list[str]:
        header, _ = await (await self.channel(sandbox_id)).call("log")
        return list(header["lines"])

    async def resources(self) -> dict[str, Any]:
        return looking.resources(self._state_dir)

    def describe(self) -> list[str]:
        return looking.described(self._cgroups.enforced(), self._ordinary)
