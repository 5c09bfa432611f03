"""The orchestrator: its parts put together, its start (with what an earlier run left) and its stop."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections import defaultdict
from typing import Any

from orchard.env.contract import EndReason, LogLine, SandboxStatus
from orchard.env.errors import AgentUnreachable, OrchardError
from orchard.env.orchestrator.agents import Agents
from orchard.env.orchestrator.archives import Archives
from orchard.env.orchestrator.audit import AuditLog
from orchard.env.orchestrator.auth import KeyRing
from orchard.env.orchestrator.catalog import Catalog
from orchard.env.orchestrator.clock import boot_id
from orchard.env.orchestrator.events import EventLog
from orchard.env.orchestrator.execution import Execution
from orchard.env.orchestrator.files import Files
from orchard.env.orchestrator.jobs import Jobs
from orchard.env.orchestrator.jobtable import JobTable
from orchard.env.orchestrator.lifecycle import Lifecycle
from orchard.env.orchestrator.metrics import Metrics, Watched
from orchard.env.orchestrator.patches import Patches
from orchard.env.orchestrator.sandbox import Sandbox
from orchard.env.orchestrator.settings import ServiceSettings
from orchard.env.orchestrator.stores.base import JobRecord, Store
from orchard.env.orchestrator.streaming import Streams
from orchard.env.orchestrator.terminals import Terminals
from orchard.env.orchestrator.tracing import Tracing
from orchard.env.orchestrator.tunnels.manager import Tunnels
from orchard.env.runtimes.base import FiltersEgress, Postmortem, Runtime

_log = logging.getLogger(__name__)
_HOUSEKEEPING_S = 15.0
#: Agents that are asked for their jobs at the same time.
_ADOPTED_AT_ONCE = 32


class Orchestrator:
    """Everything but HTTP. Use it between `start` and `stop`.

    metrics: to count in, when several orchestrators of one process have them in common.
    """

    def __init__(
        self, settings: ServiceSettings, runtime: Runtime, store: Store, metrics: Metrics | None = None
    ) -> None:
        self.settings = settings
        self.runtime = runtime
        self.store = store
        self.keys = KeyRing.from_settings(settings)
        self.metrics = metrics or Metrics()
        self.audit = AuditLog(settings.audit_log, self.metrics) if settings.audit_log is not None else None
        self.tracing = Tracing(settings.otel_endpoint) if settings.otel_endpoint else None
        self._boot = boot_id()
        self.catalog = Catalog(store, self._boot)
        self.agents = Agents(runtime)
        self.events = EventLog(self.metrics)
        self.tunnels = Tunnels(settings, runtime, store, self.agents, self.metrics, self._boot)
        self.lifecycle = Lifecycle(
            settings,
            runtime,
            store,
            self.catalog,
            self.metrics,
            self.events,
            self.tunnels,
            self.tracing,
            self._boot,
        )
        table = JobTable(store, self.metrics, settings.job_cache_bytes, self.tracing)
        self._table = table
        self.execution = Execution(settings, runtime, store, table, self.agents, self.lifecycle)
        self.jobs = Jobs(settings, store, table, self.agents, self.execution)
        self.streams = Streams(runtime)
        self.terminals = Terminals(self.jobs, self.execution, self.agents, settings.terminal_detached_s)
        self.files = Files(self.agents)
        self.archives = Archives(self.agents, self.files)
        self.patches = Patches(self.agents, settings)
        self._housekeeper: asyncio.Task[None] | None = None
        self.running = False
        self._stopping = False
        queue = self.lifecycle.queue
        self._watched = Watched(
            self.catalog.counts, lambda: len(queue), lambda: queue.starting, lambda: len(table)
        )
        self.metrics.watch(self._watched)

    # -------------------------------------------------------------------------------------------- start

    async def start(self) -> None:
        """Make ready, and adopt what an earlier run left. Raises `OrchardError` when that is impossible."""
        self.store.on_lost = self.put_again
        await self.store.open()
        self.runtime.on_death = self.lifecycle.died
        if isinstance(self.runtime, FiltersEgress):
            self.runtime.on_denied = self.lifecycle.egress.denied
        await self.runtime.start()
        for line in self.runtime.describe():
            _log.info(line, extra={"runtime": self.runtime.name})
        await self._adopt()
        self._housekeeper = asyncio.get_running_loop().create_task(self._keep_house())
        self.running = True

    @property
    def idle(self) -> bool:
        """Nothing lives here, and no command is on its way to its end."""
        return not self.catalog.live and not len(self._table)

    def put_again(self) -> None:
        """The store has lost what it had confirmed: put what is still known here."""
        for sandbox in self.catalog.known():
            self.store.put_sandbox(sandbox.record(self._boot))
        for record in self._table.known():
            self.store.put_job(record)

    async def _adopt(self) -> None:
        waiting: list[Sandbox] = []
        for record in await self.store.sandboxes():
            sandbox = Sandbox.from_record(record, self._boot)
            self.catalog.add(sandbox)
            if sandbox.live:
                waiting.append(sandbox)
        jobs: dict[str, list[JobRecord]] = defaultdict(list)
        for job in await self.store.unfinished_jobs():
            jobs[job.sandbox_id].append(job)
        found = await self.runtime.adopt({s.sandbox_id: s.runtime_state or {} for s in waiting})
        kept: list[Sandbox] = []
        for sandbox in waiting:
            self.lifecycle.reaper.watch(sandbox.sandbox_id)
            remains = found.get(sandbox.sandbox_id)
            if remains is not None and not isinstance(remains, Postmortem):
                kept.append(sandbox)
                if sandbox.status is SandboxStatus.PENDING:
                    await self.lifecycle.became_ready(sandbox, remains)
                sandbox.note("the service was restarted; the sandbox lives on")
            elif sandbox.status is SandboxStatus.PENDING:
                self.lifecycle.requeue(sandbox)
            else:
                postmortem = remains or Postmortem(
                    EndReason.RUNTIME_ERROR, "it was gone when the service came back"
                )
                self.lifecycle.end(sandbox, postmortem.reason, postmortem.message, postmortem)
        limit = asyncio.Semaphore(_ADOPTED_AT_ONCE)
        async with asyncio.TaskGroup() as group:
            for sandbox in kept:
                group.create_task(self._adopt_jobs(sandbox, jobs.pop(sandbox.sandbox_id, []), limit))
        await self._close_orphans(jobs)
        await self.store.flush()
        if waiting:
            _log.info("adopted %d of %d sandboxes that were alive", len(kept), len(waiting))

    async def _adopt_jobs(self, sandbox: Sandbox, known: list[JobRecord], limit: asyncio.Semaphore) -> None:
        """Side by side: one agent that is slow to answer must not hold up the start."""
        try:
            async with limit:
                await self.execution.adopt(sandbox, known)
            self.terminals.adopt(sandbox)
            if sandbox.tunnels:
                self.tunnels.adopt(sandbox)
        except OrchardError as error:
            # It died since it was adopted, or is about to: its end closes its jobs.
            for record in known:
                self.execution.orphaned(
                    sandbox, record, f"lost at a restart: {error.detail}", error.code, infra=True
                )

    async def _close_orphans(self, jobs: dict[str, list[JobRecord]]) -> None:
        """Jobs of sandboxes that are gone: they end with their sandbox's reason."""
        for sandbox_id, records in jobs.items():
            sandbox = await self.catalog.find(sandbox_id)
            for record in records:
                if sandbox is None:
                    _log.warning("a job without a sandbox is dropped", extra={"job_id": record.job_id})
                    self.store.drop_job(record.owner, record.job_id)
                    continue
                error = sandbox.gone()
                detail = (
                    f"the sandbox ended while the command ran: {error.detail if error else 'at a restart'}"
                )
                code = error.code if error else "sandbox_dead"
                self.execution.orphaned(sandbox, record, detail, code, infra=error is None or error.infra)

    # --------------------------------------------------------------------------------------------- stop

    async def stop(self) -> None:
        """Let go of everything; sandboxes and their jobs live on, for the next run to adopt."""
        await self.begin_stop()
        await self.store.close()
        self.metrics.forget(self._watched)
        if self.audit is not None:
            self.audit.close()
        if self.tracing is not None:
            await self.tracing.close()

    @property
    def reloads(self) -> bool:
        """Whether there is anything that `reload` would read or open again."""
        return self.audit is not None or self.settings.keys_file is not None

    def reload(self) -> None:
        """Read the keys file again, and go on in a new audit log. A bad keys file changes nothing; the log says so."""
        if self.audit is not None:
            self.audit.reopen()
        if self.settings.keys_file is None:
            return
        try:
            self.keys.take_over(KeyRing.from_settings(self.settings))
        except OrchardError as error:
            _log.error("the keys file cannot be used, the old keys stay: %s", error.detail)
            return
        # A key that is gone must not read on.
        self.events.end_streams()
        _log.info("the keys file was read again: %d keys are known", len(self.keys))

    async def begin_stop(self) -> None:
        """Requests that wait for commands are answered now (503, try again); new ones are refused."""
        self.running = False
        if self._stopping:
            return
        self._stopping = True
        self.lifecycle.closing = True
        self.events.close()
        if self._housekeeper is not None:
            self._housekeeper.cancel()
        await self.execution.close()
        await self.lifecycle.close()
        await self.tunnels.stop()
        await self.runtime.close()

    async def _keep_house(self) -> None:
        """Drop what has been kept long enough."""
        while True:
            await asyncio.sleep(_HOUSEKEEPING_S)
            settings = self.settings
            try:
                self._table.expire(settings.job_retention_s)
                while True:
                    dropped = await self.store.expire(settings.job_retention_s, settings.ended_retention_s)
                    self.catalog.forget(dropped.sandbox_ids)
                    if not dropped.jobs and not dropped.sandbox_ids:
                        break
                    await asyncio.sleep(0.01)
            except Exception:
                _log.exception("housekeeping failed; it is tried again")

    # ------------------------------------------------------------------------------------------ looking

    def describe(self, sandbox: Sandbox) -> dict[str, Any]:
        """The fields of `SandboxInfo`."""
        position = (
            self.lifecycle.queue.position(sandbox.sandbox_id)
            if sandbox.status is SandboxStatus.PENDING
            else None
        )
        return self._shape(sandbox, position)

    def describe_all(self, sandboxes: list[Sandbox]) -> list[dict[str, Any]]:
        positions = self.lifecycle.queue.positions()
        return [self._shape(sandbox, positions.get(sandbox.sandbox_id)) for sandbox in sandboxes]

    def _shape(self, sandbox: Sandbox, position: int | None) -> dict[str, Any]:
        info = sandbox.info(self.runtime.name, position)
        if position is not None:
            info["queue_seconds"] = time.time() - sandbox.created_at
            info["status_message"] = f"waiting in the create queue, {position} before it"
        return info

    async def resources(self) -> dict[str, Any]:
        """The fields of `Resources`."""
        return {
            "runtime": self.runtime.name,
            **await self.runtime.resources(),
            "sandboxes": self.catalog.counts(),
            "queue_length": len(self.lifecycle.queue),
            "starting": self.lifecycle.queue.starting,
            "max_starting": self.settings.max_starting,
            "max_sandboxes": self.settings.max_sandboxes,
        }

    async def stats(self, sandbox: Sandbox) -> dict[str, Any]:
        """The fields of `SandboxStats`."""
        try:
            usage = await self.runtime.usage(sandbox.sandbox_id)
        except AgentUnreachable:
            await self.agents.raise_end(sandbox, 1.0)
            raise
        return {"sandbox_id": sandbox.sandbox_id, **dataclasses.asdict(usage)}

    async def logs(self, sandbox: Sandbox) -> list[LogLine]:
        """Lifecycle and agent lines, in order of time."""
        lines = [LogLine(time=at, source="lifecycle", message=message) for at, message in sandbox.log]
        lines += [LogLine(time=at, source="network", message=message) for at, message in sandbox.denials]
        if sandbox.status is SandboxStatus.READY:
            try:
                lines += [_agent_line(text) for text in await self.runtime.agent_log(sandbox.sandbox_id)]
            except OrchardError:
                await self.agents.raise_end(sandbox, 1.0)
        elif sandbox.death is not None:
            lines += [_agent_line(text) for text in sandbox.death.agent_log]
        return sorted(lines, key=lambda line: line.time)


def _agent_line(text: str) -> LogLine:
    """Agents write the Unix time before their lines."""
    stamp, _, message = text.partition(" ")
    try:
        return LogLine(time=float(stamp), source="agent", message=message)
    except ValueError:
        return LogLine(time=time.time(), source="agent", message=text)
