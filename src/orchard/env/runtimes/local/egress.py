"""Lists of what sandboxes may reach (`allow_egress`): packet rules and gateway in step, from before a sandbox's first
instruction to after its last."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from orchard.env.egress import EgressDenial, parse_entries, parse_resolver
from orchard.env.errors import RuntimeRefused
from orchard.env.runtimes.local.gateway.process import Gateway
from orchard.env.runtimes.local.network import Network
from orchard.env.runtimes.local.spec import NetworkSpec


class Egress:
    """resolver: as `--egress-resolver`. denied: called with a sandbox's id and what was refused it."""

    def __init__(
        self,
        network: Network,
        state_dir: Path,
        resolver: str | None,
        denied: Callable[[str, EgressDenial], None],
    ) -> None:
        self._network = network
        self._denied = denied
        self._gateway = Gateway(state_dir, parse_resolver(resolver) if resolver else None, self._told)
        #: Address of each sandbox with a list, by slot, and its id, by address.
        self._addresses: dict[int, str] = {}
        self._ids: dict[str, str] = {}
        self._starting = asyncio.Lock()
        self._started = False

    async def start(self) -> None:
        """Make ready; later calls do nothing. Raises `RuntimeRefused` when lists cannot be enforced here."""
        if self._started:
            return
        async with self._starting:
            if not self._started:
                if os.geteuid() != 0:
                    raise RuntimeRefused("allow_egress needs the service to run as root; leave it out")
                self._gateway.start(await asyncio.to_thread(self._network.listen), {})
                self._started = True

    async def allow(self, sandbox_id: str, slot: int, entries: tuple[str, ...]) -> None:
        """From when this returns, the sandbox of this slot, which may be still to come, reaches exactly these."""
        await self.start()
        address = await asyncio.to_thread(self._network.allow, slot, tuple(parse_entries(entries)))
        self._addresses[slot] = address
        self._ids[address] = sandbox_id
        await self._gateway.ready()
        await self._gateway.allow(address, entries)

    async def forget(self, slot: int) -> None:
        """The sandbox of this slot is gone, and its interface; one without a list is fine."""
        address = self._addresses.get(slot)
        if address is None:
            return
        await self._gateway.forget(address)
        await asyncio.to_thread(self._network.unlist, slot)
        self._addresses.pop(slot, None)
        self._ids.pop(address, None)

    async def restore(self, lists: Mapping[str, tuple[int, tuple[str, ...]]]) -> None:
        """After a restart: slot and list of every sandbox that has one, by id, before anything else is done with the
        network. Raises `RuntimeRefused`; what an earlier run had set is then left as it is."""
        if not lists:
            return
        parsed = {slot: tuple(parse_entries(entries)) for slot, entries in lists.values()}
        listening = await asyncio.to_thread(self._network.restore, parsed)
        for sandbox_id, (slot, _) in lists.items():
            address = self._network.spec(slot, listed=True).address
            self._addresses[slot] = address
            self._ids[address] = sandbox_id
        told = {self._addresses[slot]: entries for slot, entries in lists.values()}
        self._gateway.start(listening, told)
        self._started = True

    async def spec(self, slot: int) -> NetworkSpec:
        """The network of a sandbox with a list."""
        return await asyncio.to_thread(lambda: self._network.spec(slot, listed=True))

    async def close(self) -> None:
        """Names are reached no more; the packet rules stay."""
        await self._gateway.close()
        self._started = False

    def _told(self, address: str, fields: dict[str, Any]) -> None:
        sandbox_id = self._ids.get(address)
        if sandbox_id is not None:
            self._denied(sandbox_id, EgressDenial(**fields))
