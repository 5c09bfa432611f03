"""The life of sandboxes: created, queued, started, kept alive, ended, freed.

    pending ──> ready ──> failed(reason)      it ended by itself: ttl, heartbeat, oom, agent lost, …
       │          └─────> deleted             on request
       ├────────> failed(reason)              it did not start
       └────────> deleted                     creation cancelled

Every change of state is durable before anybody is told of it, and a record exists before the runtime makes
anything. An ended sandbox is told as ended at once and freed behind it; what could not be freed is tried again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, Protocol

from orchard.env.contract import CreateSandbox, EndReason, EventType, PatchSandbox, SandboxStatus
from orchard.env.errors import InfrastructureError, OrchardError, SandboxTimeout
from orchard.env.orchestrator.admission import Admission, Neighbourhood, check_image
from orchard.env.orchestrator.auth import Principal
from orchard.env.orchestrator.catalog import Catalog
from orchard.env.orchestrator.deaths import complete, death_record
from orchard.env.orchestrator.egress import EgressControl
from orchard.env.orchestrator.events import EventLog
from orchard.env.orchestrator.identity import body_digest, new_id, same_or_conflict
from orchard.env.orchestrator.metrics import Metrics
from orchard.env.orchestrator.queue import CreateQueue
from orchard.env.orchestrator.quotas import Others
from orchard.env.orchestrator.reaper import Reaper
from orchard.env.orchestrator.sandbox import Sandbox
from orchard.env.orchestrator.settings import ServiceSettings
from orchard.env.orchestrator.stores.base import Store
from orchard.env.orchestrator.tracing import Tracing
from orchard.env.orchestrator.tunnels.manager import Tunnels
from orchard.env.runtimes.base import Handle, Postmortem, Runtime, StartFailed

_log = logging.getLogger(__name__)
_START_ATTEMPTS = 5
_FREE_ATTEMPTS = 4


class Dependents(Protocol):
    """What must know of a sandbox's end: its jobs and tunnels."""

    def sandbox_ended(self, sandbox: Sandbox, error: OrchardError) -> None: ...


class Lifecycle:
    def __init__(self, settings: ServiceSettings, runtime: Runtime, store: Store, catalog: Catalog,
                 metrics: Metrics, events: EventLog, tunnels: Tunnels, tracing: Tracing | None,
                 boot: str) -> None:  # fmt: skip
        self._settings = settings
        self._runtime = runtime
        self._store = store
        self._catalog = catalog
        self._metrics = metrics
        self._events = events
        self._tunnels = tunnels
        self._tracing = tracing
        self._boot = boot
        self.egress = EgressControl(runtime, catalog, events)
        self.admission = Admission(catalog, metrics, settings.max_sandboxes)
        self.neighbours: Neighbourhood | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.queue = CreateQueue(settings.max_starting, settings.max_queue, self._begin_start)
        self.reaper = Reaper(self._deadline, self._expire)
        self.dependents: list[Dependents] = [tunnels]
        self.closing = False

    # ----------------------------------------------------------------------------------------- creation

    async def create(self, principal: Principal, body: CreateSandbox) -> Sandbox:
        """Accept a new sandbox, or find the same one accepted before. Durable when it returns.

        Raises `Conflict` (the id is taken), `Forbidden`, `TargetNotAllowed`, `QuotaExceeded`, `Overloaded`; with
        neighbours also `Elsewhere`.
        """
        check_image(principal, body.image)
        if body.tunnels:
            self._tunnels.check(principal, body.tunnels)
        if body.allow_egress is not None:
            await self.egress.check()
        sandbox_id = body.sandbox_id or new_id(principal.owner, body.idempotency_key)
        if self.neighbours is None:
            return await self._create(principal, body, sandbox_id, None)
        async with self.neighbours.creation(principal, body, sandbox_id) as others:
            return await self._create(principal, body, sandbox_id, others)

    async def _create(
        self, principal: Principal, body: CreateSandbox, sandbox_id: str, others: Others | None
    ) -> Sandbox:
        digest = body_digest(body)
        if body.sandbox_id or body.idempotency_key:
            known = await self._known(sandbox_id)
            if known is not None:
                await self._store.flush()
                return same_or_conflict(known, principal.owner, digest, by_key=body.sandbox_id is None)
        if self.closing:
            raise stopping("nothing was created")
        self.admission.check(principal, body, others)
        sandbox = self._new(principal.owner, sandbox_id, body, digest)
        if self._tracing is not None:
            sandbox.trace = self._tracing.current()
        self.queue.push(sandbox.owner, sandbox_id)
        self.admission.admitted(principal)
        self._catalog.add(sandbox)
        self._save(sandbox)
        self.reaper.watch(sandbox_id)
        self._metrics.created.inc()
        try:
            await self._store.flush()
        except OrchardError:
            sandbox.refused = True
            self.end(sandbox, EndReason.DELETED, "it could not be stored")
            raise
        if others is not None and self.neighbours is not None:
            await self.neighbours.created(principal)
        self._events.publish(EventType.CREATED, sandbox)
        return sandbox

    async def _known(self, sandbox_id: str) -> Sandbox | None:
        """What has the id. One whose creation was refused does not have it any more, once it is freed."""
        while (known := await self._catalog.find(sandbox_id)) is not None and known.refused:
            if sandbox_id not in self._catalog.live:
                self._catalog.forget([sandbox_id])
                return None
            if known.ending is None:
                raise InfrastructureError(
                    f"an earlier sandbox {sandbox_id} could not be freed yet; try again in a moment",
                    retry_after_s=2.0,
                )
            await asyncio.shield(known.ending)
        return known

    def _new(self, owner: str, sandbox_id: str, body: CreateSandbox, digest: str) -> Sandbox:
        now = time.monotonic()
        ready_timeout_s = body.timeout or self._settings.ready_timeout_s
        ttl_s = body.ttl_seconds or self._settings.ttl_s
        lease_s = body.heartbeat_timeout
        sandbox = Sandbox(
            sandbox_id=sandbox_id,
            owner=owner,
            body=body,
            digest=digest,
            created_at=time.time(),
            ready_timeout_s=ready_timeout_s,
            ready_deadline=now + ready_timeout_s,
            ttl_s=ttl_s,
            ttl_deadline=now + ttl_s,
            lease_s=lease_s,
            lease_deadline=now + (lease_s or 0.0),
            labels=dict(body.labels or {}),
            allow_egress=body.allow_egress,
            status_message="accepted",
        )
        sandbox.note("accepted")
        return sandbox

    def requeue(self, sandbox: Sandbox) -> None:
        """Start (again) a pending sandbox that an earlier run of the service had accepted."""
        sandbox.note("the service was restarted; starting it again")
        self.queue.push(sandbox.owner, sandbox.sandbox_id, forced=True)

    def _begin_start(self, sandbox_id: str) -> None:
        # The queue may call this before `create` has put the sandbox into the catalog: the task runs after.
        self._spawn(self._start(sandbox_id))

    async def _start(self, sandbox_id: str) -> None:
        sandbox = self._catalog.live.get(sandbox_id)
        try:
            if sandbox is None or sandbox.status is not SandboxStatus.PENDING or self.closing:
                return
            sandbox.starting = asyncio.current_task()
            sandbox.queue_s = time.time() - sandbox.created_at
            sandbox.status_message = "starting"
            self._metrics.queue_seconds.observe(sandbox.queue_s)
            began = time.monotonic()
            await self._store.flush()
            self._events.publish(EventType.STARTING, sandbox)
            handle = await self._create_in_runtime(sandbox)
            if sandbox.body.tunnels and sandbox.live:
                await self._tunnels.open_first(sandbox)
            self._metrics.start_seconds.observe(time.monotonic() - began)
            await self.became_ready(sandbox, handle)
        except StartFailed as error:
            if sandbox is not None:
                self.end(sandbox, error.reason, error.message)
        except OrchardError as error:
            if sandbox is not None:
                self.end(sandbox, EndReason.RUNTIME_ERROR, error.detail)
        except Exception as error:
            _log.exception("starting a sandbox failed in an unforeseen way", extra={"sandbox_id": sandbox_id})
            if sandbox is not None:
                self.end(sandbox, EndReason.RUNTIME_ERROR, f"unforeseen {type(error).__name__}: {error}")
        finally:
            if sandbox is not None:
                sandbox.starting = None
                self._trace_start(sandbox)
            self.queue.finished(sandbox_id)

    def _trace_start(self, sandbox: Sandbox) -> None:
        if self._tracing is None or sandbox.queue_s is None or self.closing:
            return
        began_at, ids = sandbox.created_at + sandbox.queue_s, {"sandbox_id": sandbox.sandbox_id}
        error = None if sandbox.ready_at else sandbox.reason.value if sandbox.reason else "cancelled"
        self._tracing.record("sandbox.queue", sandbox.trace, sandbox.created_at, began_at, **ids)
        self._tracing.record(
            "sandbox.start", sandbox.trace, began_at, sandbox.ready_at or time.time(), error, **ids
        )

    async def _create_in_runtime(self, sandbox: Sandbox) -> Handle:
        """With a few further attempts where the runtime says that they may help."""
        for attempt in range(1, _START_ATTEMPTS + 1):
            try:
                return await self._runtime.create(sandbox.spec(), sandbox.note)
            except StartFailed as error:
                if not error.retryable or attempt == _START_ATTEMPTS:
                    raise
                sandbox.note(f"attempt {attempt} failed, another follows: {error.message}")
                await asyncio.sleep(0.05 * 3**attempt)
        raise AssertionError("unreachable")

    async def became_ready(self, sandbox: Sandbox, handle: Handle) -> None:
        """The runtime holds it and its agent answers."""
        if sandbox.status is not SandboxStatus.PENDING:
            return  # it was ended meanwhile, which frees it
        sandbox.runtime_state = handle.state
        sandbox.status = SandboxStatus.READY
        sandbox.status_message = None
        sandbox.ready_at = time.time()
        sandbox.note("ready")
        self._save(sandbox)
        await self._store.flush()
        if sandbox.live:
            self._events.publish(EventType.READY, sandbox)
        sandbox.settled.set()
        _log.debug("sandbox is ready", extra={"sandbox_id": sandbox.sandbox_id, "owner": sandbox.owner})

    async def wait_ready(self, sandbox: Sandbox, timeout_s: float | None) -> Sandbox:
        """Return when it is ready or has failed to start. Raises `SandboxTimeout`, or its end if it had been ready."""
        if not sandbox.settled.is_set():
            # Whoever waits is alive: the lease rests meanwhile.
            self.hold(sandbox)
            try:
                async with asyncio.timeout(timeout_s):
                    await sandbox.settled.wait()
            except TimeoutError:
                raise SandboxTimeout(
                    f"sandbox {sandbox.sandbox_id} is still {sandbox.status.value} after {timeout_s:g} s;"
                    " wait again, or delete it"
                ) from None
            finally:
                self.release(sandbox)
        if (error := sandbox.gone()) is not None and not sandbox.never_ready:
            raise error
        if sandbox.status is SandboxStatus.PENDING:
            raise stopping(f"sandbox {sandbox.sandbox_id} goes on")
        return sandbox

    # ------------------------------------------------------------------------------------------- clocks

    def hold(self, sandbox: Sandbox) -> None:
        """Keep the lease from expiring until `release`: a command runs, or somebody waits."""
        sandbox.holds += 1

    def release(self, sandbox: Sandbox) -> None:
        sandbox.holds -= 1
        if not sandbox.holds and sandbox.lease_s is not None and sandbox.live:
            sandbox.lease_deadline = max(sandbox.lease_deadline, time.monotonic() + sandbox.lease_s)
            self.reaper.watch(sandbox.sandbox_id)

    async def heartbeat(self, sandbox: Sandbox) -> float:
        """Renew the lease, or begin one; when it ends, in Unix seconds."""
        if sandbox.lease_s is None:
            sandbox.lease_s = self._settings.heartbeat_timeout_s
            self._save(sandbox)
        sandbox.lease_deadline = time.monotonic() + sandbox.lease_s
        self.reaper.watch(sandbox.sandbox_id)
        await self._store.flush()
        return time.time() + sandbox.lease_s

    async def change(self, sandbox: Sandbox, body: PatchSandbox) -> None:
        """A new lifetime from now on, new labels, other things to reach. Raises `RuntimeRefused` before anything is
        changed where the last is impossible."""
        if body.allow_egress is not None:
            await self.egress.change(sandbox, body.allow_egress)
        if body.ttl_seconds is not None:
            sandbox.ttl_s = body.ttl_seconds
            sandbox.ttl_deadline = time.monotonic() + body.ttl_seconds
            sandbox.note(f"lifetime set to {body.ttl_seconds:g} s from now")
            self.reaper.watch(sandbox.sandbox_id)
        earlier_labels = sandbox.labels
        if body.labels is not None:
            sandbox.labels = dict(body.labels)
        self._save(sandbox)
        await self._store.flush()
        if sandbox.live:
            self._events.publish(EventType.CHANGED, sandbox, earlier_labels)

    def _deadline(self, sandbox_id: str) -> float | None:
        sandbox = self._catalog.live.get(sandbox_id)
        return sandbox.deadline() if sandbox is not None and sandbox.live else None

    def _expire(self, sandbox_id: str) -> None:
        sandbox = self._catalog.live.get(sandbox_id)
        overdue = sandbox.overdue(time.monotonic()) if sandbox is not None and sandbox.live else None
        if sandbox is not None and overdue is not None:
            self.end(sandbox, *overdue)

    # ---------------------------------------------------------------------------------------------- end

    def died(self, sandbox_id: str, postmortem: Postmortem) -> None:
        """The runtime's `on_death`: a sandbox is gone without having been asked to."""
        sandbox = self._catalog.live.get(sandbox_id)
        if sandbox is not None and sandbox.live and not self.closing:
            self.end(sandbox, postmortem.reason, postmortem.message, postmortem)

    async def delete(self, sandbox: Sandbox) -> None:
        """End and free it; returns when nothing of it is left. Repeating is fine.

        Raises `InfrastructureError` when the runtime could not free it yet; a repeat tries again.
        """
        if sandbox.live:
            self.end(sandbox, EndReason.DELETED, "deleted on request")
        elif sandbox.never_ready:
            sandbox.status = SandboxStatus.DELETED
            sandbox.reason = EndReason.DELETED
            self._save(sandbox)
        if sandbox.ending is None and sandbox.sandbox_id in self._catalog.live:
            sandbox.ending = self._spawn(self._free(sandbox, None))
        if sandbox.ending is not None:
            await asyncio.shield(sandbox.ending)
        await self._store.flush()
        if sandbox.sandbox_id in self._catalog.live:
            raise InfrastructureError(
                f"sandbox {sandbox.sandbox_id} has ended, but could not be freed completely yet; delete it again",
                retry_after_s=2.0,
            )

    def end(
        self, sandbox: Sandbox, reason: EndReason, message: str, postmortem: Postmortem | None = None
    ) -> None:
        """It is over, from this moment on, whoever asks; freeing it follows."""
        if not sandbox.live:
            return
        sandbox.ended_at = time.time()
        sandbox.reason = reason
        sandbox.status_message = message
        sandbox.status = SandboxStatus.DELETED if reason is EndReason.DELETED else SandboxStatus.FAILED
        sandbox.death = death_record(reason, message, sandbox.ended_at, postmortem)
        sandbox.note(f"ended ({reason.value}): {message}")
        self._metrics.ended.labels(reason.value).inc()
        level = logging.DEBUG if reason is EndReason.DELETED else logging.INFO
        _log.log(level, "sandbox ended: %s", message,
                 extra={"sandbox_id": sandbox.sandbox_id, "owner": sandbox.owner, "reason": reason.value})  # fmt: skip
        error = sandbox.gone()
        if error is not None:
            for dependent in self.dependents:
                dependent.sandbox_ended(sandbox, error)
        self.queue.remove(sandbox.sandbox_id)
        self.reaper.forget(sandbox.sandbox_id)
        self._save(sandbox)
        sandbox.ending = self._spawn(self._free(sandbox, sandbox.starting))

    async def _free(self, sandbox: Sandbox, starting: asyncio.Task[None] | None) -> None:
        """Cancel what starts, remove what there is, complete the death record."""
        try:
            await self._store.flush()
        except OrchardError as error:
            _log.error(
                "the end of a sandbox could not be stored yet: %s",
                error,
                extra={"sandbox_id": sandbox.sandbox_id},
            )
        if not sandbox.ended.is_set():
            self._events.publish(EventType.ENDED, sandbox)
        sandbox.settled.set()
        sandbox.ended.set()
        if starting is not None and starting is not asyncio.current_task():
            starting.cancel()
            await asyncio.wait({starting})
        try:
            postmortem = await self._delete_in_runtime(sandbox)
        except Exception as error:
            _log.error("a sandbox could not be freed: %s", error, extra={"sandbox_id": sandbox.sandbox_id})
            sandbox.note(f"could not be freed yet: {error}")
            sandbox.ending = None
            return
        if sandbox.death is not None and postmortem is not None:
            complete(sandbox.death, postmortem)
        self._catalog.retire(sandbox)
        self._save(sandbox)

    async def _delete_in_runtime(self, sandbox: Sandbox) -> Postmortem | None:
        for attempt in range(1, _FREE_ATTEMPTS + 1):
            try:
                return await self._runtime.delete(sandbox.sandbox_id)
            except Exception as error:
                if attempt == _FREE_ATTEMPTS:
                    raise
                _log.warning(
                    "freeing failed, another attempt follows: %s",
                    error,
                    extra={"sandbox_id": sandbox.sandbox_id},
                )
                await asyncio.sleep(0.1 * 4 ** (attempt - 1))
        return None

    async def close(self) -> None:
        """Stop deciding: what lives stays alive, what starts is abandoned (and started again by the next run)."""
        self.closing = True
        self.reaper.stop()
        for sandbox in self._catalog.live.values():
            sandbox.settled.set()  # whoever waits is told to come back
        endings = {s.ending for s in self._catalog.live.values() if s.ending is not None}
        for task in self._tasks - endings:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._settings.shutdown_s)

    def _save(self, sandbox: Sandbox) -> None:
        self._store.put_sandbox(sandbox.record(self._boot))

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def stopping(what: str) -> InfrastructureError:
    """The answer to what cannot be waited for any more."""
    return InfrastructureError(f"the service is stopping; {what}: try again in a moment", retry_after_s=2.0)
