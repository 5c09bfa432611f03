"""A store in a file of this machine, mirrored in Redis for the other services to see.

The file is the truth: `flush` waits for it alone, and a service goes on when Redis is away. Redis is told behind that,
and told everything anew when it was away for long or has lost what it had. Of jobs it gets all but their output.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

from orchard.env.errors import InfrastructureError
from orchard.env.orchestrator.stores.base import Expired, JobRecord, SandboxRecord
from orchard.env.orchestrator.stores.redis import RedisStore
from orchard.env.orchestrator.stores.sqlite import SqliteStore

_log = logging.getLogger(__name__)
#: Changes are sent together that come within this time.
_GATHER_S = 0.02
_RETRY_S = 0.5
#: More changes than this are not kept for a Redis that is away: it is told everything anew.
_MOST_WAITING = 20_000
_PAGE = 500


class MirroredStore:
    """See the module's docstring; the protocol is `orchard.env.orchestrator.stores.base.Store`."""

    def __init__(self, truth: SqliteStore, mirror: RedisStore) -> None:
        self._truth = truth
        self._mirror = mirror
        self._mirror.on_lost = self._forgotten
        #: Never: the file keeps what it has confirmed.
        self.on_lost: Callable[[], None] = lambda: None
        self._changed = asyncio.Event()
        #: Redis may lack anything.
        self._stale = True
        self._mirroring: asyncio.Task[None] | None = None
        #: How often Redis was told everything.
        self.published = 0

    @property
    def up(self) -> bool:
        """Redis answers."""
        return self._mirror.up

    @property
    def truth(self) -> SqliteStore:
        return self._truth

    async def open(self) -> None:
        await self._truth.open()
        self._mirror.begin()
        self._mirroring = asyncio.get_running_loop().create_task(self._keep_mirroring())
        self._changed.set()

    async def close(self) -> None:
        if self._mirroring is not None:
            self._mirroring.cancel()
            await asyncio.wait({self._mirroring})
            self._mirroring = None
        await self._truth.close()
        await self._mirror.close()

    # ------------------------------------------------------------------------------------------ writing

    def put_sandbox(self, record: SandboxRecord) -> None:
        self._truth.put_sandbox(record)
        self._mirror.put_sandbox(record)
        self._tell()

    def put_job(self, record: JobRecord) -> None:
        self._truth.put_job(record)
        self._mirror.put_job(_without_output(record))
        self._tell()

    def drop_job(self, owner: str, job_id: str) -> None:
        self._truth.drop_job(owner, job_id)
        self._mirror.drop_job(owner, job_id)
        self._tell()

    async def flush(self) -> None:
        await self._truth.flush()

    # ---------------------------------------------------------------------------------------- mirroring

    def _tell(self) -> None:
        if self._mirror.waiting > _MOST_WAITING:
            self._mirror.discard()
            self._stale = True
        self._changed.set()

    def _forgotten(self) -> None:
        self._stale = True
        self._changed.set()

    async def _keep_mirroring(self) -> None:
        while True:
            await self._changed.wait()
            await asyncio.sleep(_GATHER_S)
            self._changed.clear()
            try:
                if self._stale:
                    await self._publish()
                await self._mirror.flush()
            except InfrastructureError:
                self._changed.set()
                await asyncio.sleep(_RETRY_S)
            except Exception:
                _log.exception("mirroring failed; it is tried again")
                self._forgotten()
                await asyncio.sleep(_RETRY_S)

    async def _publish(self) -> None:
        """Tell Redis everything."""
        await self._mirror.clear()
        self._stale = False
        try:
            # Between reading and putting nothing else runs, so nothing older replaces anything newer.
            for sandbox in await self._truth.sandboxes():
                self._mirror.put_sandbox(sandbox)
            after = 0
            while rows := self._truth.job_heads(after, _PAGE):
                for number, job in rows:
                    after = number
                    self._mirror.put_job(job)
                await self._mirror.flush()
            await self._mirror.flush()
        except BaseException:
            self._stale = True
            raise
        self.published += 1

    # ------------------------------------------------------------------------------------------ reading

    async def sandbox(self, sandbox_id: str) -> SandboxRecord | None:
        return await self._truth.sandbox(sandbox_id)

    async def sandboxes(self) -> list[SandboxRecord]:
        return await self._truth.sandboxes()

    async def job(self, owner: str | None, job_id: str) -> JobRecord | None:
        return await self._truth.job(owner, job_id)

    async def unfinished_jobs(self) -> list[JobRecord]:
        return await self._truth.unfinished_jobs()

    async def expire(self, job_age_s: float, sandbox_age_s: float) -> Expired:
        dropped = await self._truth.expire(job_age_s, sandbox_age_s)
        try:
            if self._mirror.up:
                await self._mirror.expire(job_age_s, sandbox_age_s)
        except InfrastructureError:
            self._stale = True
        return dropped


def _without_output(record: JobRecord) -> JobRecord:
    return replace(record, output=b"") if record.output else record
