"""What sandboxes may reach: lists checked and changed, and refused attempts told to whom they concern."""

from __future__ import annotations

import time

from orchard.env.contract import EventType, SandboxStatus
from orchard.env.egress import EgressDenial
from orchard.env.errors import RuntimeRefused, SandboxNotReady
from orchard.env.orchestrator.catalog import Catalog
from orchard.env.orchestrator.events import EventLog
from orchard.env.orchestrator.sandbox import Sandbox
from orchard.env.runtimes.base import FiltersEgress, Runtime


class EgressControl:
    def __init__(self, runtime: Runtime, catalog: Catalog, events: EventLog) -> None:
        self._runtime = runtime
        self._catalog = catalog
        self._events = events

    async def check(self) -> FiltersEgress:
        """The runtime, if it can hold sandboxes to a list here. Raises `RuntimeRefused`."""
        runtime = self._runtime
        if not isinstance(runtime, FiltersEgress):
            raise RuntimeRefused(
                f"the runtime {runtime.name} cannot hold a sandbox to allow_egress in this version; leave it out"
            )
        await runtime.check_egress()
        return runtime

    async def change(self, sandbox: Sandbox, entries: list[str]) -> None:
        """From when this returns, the sandbox reaches exactly these. Raises `RuntimeRefused`, or its end."""
        runtime = await self.check()
        if sandbox.starting is not None:
            await sandbox.settled.wait()
        if (error := sandbox.gone()) is not None:
            raise error
        if sandbox.status is SandboxStatus.READY:
            try:
                sandbox.runtime_state = await runtime.allow_egress(sandbox.sandbox_id, tuple(entries))
            except Exception:
                if (error := sandbox.gone()) is not None:
                    raise error from None
                raise
        elif sandbox.status is not SandboxStatus.PENDING:
            raise SandboxNotReady(
                f"sandbox {sandbox.sandbox_id} is {sandbox.status.value}; try again when it is ready"
            )
        # A pending one waits in the queue: its start will ask for what is set here.
        sandbox.allow_egress = entries
        sandbox.note(f"may reach {', '.join(entries) or 'nothing'}")

    def denied(self, sandbox_id: str, denial: EgressDenial) -> None:
        """The runtime's `on_denied`."""
        sandbox = self._catalog.live.get(sandbox_id)
        if sandbox is None or not sandbox.live:
            return
        sandbox.denials.append((time.time(), str(denial)))
        self._events.publish(EventType.EGRESS_DENIED, sandbox, egress=denial)
