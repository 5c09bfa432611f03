"""A store in Redis, for services on any number of machines that share what they know.

Everything lies under one prefix, in hashes and sorted sets, so that emptying it is one command. Each flush is one
transaction, and every key has one value that is replaced whole: sending a flush again changes nothing, so a broken
connection in the middle of one is no riddle.

A Redis may come back with less than it had confirmed: wiped, or started again from an old snapshot. Each writer
therefore counts its flushes in Redis, in the same transaction; finding another number than its own it calls `on_lost`,
which puts again what it still knows. Nothing is ever taken for deleted because Redis does not have it.

Redis must not evict keys (`maxmemory-policy noeviction`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import random
import time
from collections.abc import Callable
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from orchard.env.errors import InfrastructureError, SettingsError
from orchard.env.orchestrator.clock import SteadyClock
from orchard.env.orchestrator.stores.base import Expired, JobRecord, SandboxRecord

_log = logging.getLogger(__name__)
_CONNECT_S, _ANSWER_S = 2.0, 5.0
_CHECK_EVERY_S = 1.0
_EXPIRE_ROWS = 200
#: How long Redis keeps the count of a writer that does not come back.
_WRITER_KEPT_S = 7 * 86400
_PAUSE_MIN_S, _PAUSE_MAX_S = 0.02, 1.0


def connect(url: str, answer_s: float = _ANSWER_S) -> Redis:
    """A client that fails at once instead of repeating by itself; it connects when it is used, and again after every
    failure. Raises `SettingsError` for a URL that is none."""
    try:
        return Redis.from_url(
            url, retry=Retry(NoBackoff(), 0), socket_connect_timeout=_CONNECT_S, socket_timeout=answer_s
        )
    except ValueError as error:
        raise SettingsError(
            f"redis_url cannot be used ({error}); write redis://[:PASSWORD@]HOST:PORT/0, rediss://… or unix:///PATH"
        ) from None


class RedisStore:
    """See the module's docstring; the protocol is `orchard.env.orchestrator.stores.base.Store`.

    prefix: of all keys. patience_s: how long a flush or a read goes on trying when Redis does not answer, before it
    raises `InfrastructureError`; what was put stays, and goes with the next flush. answer_s: how long one answer may take.
    """

    def __init__(
        self, url: str, prefix: str = "orchard", *, patience_s: float = 10.0, answer_s: float = _ANSWER_S
    ) -> None:
        self._redis = connect(url, answer_s)
        self._patience_s = patience_s
        self._prefix = prefix
        self._writer = f"{prefix}:writer:{os.urandom(8).hex()}"
        #: What Redis must hold of our count; None: nothing can be said.
        self._counts: set[bytes | None] | None = {None}
        self._count = 0
        self._sandboxes: dict[str, SandboxRecord] = {}
        #: None: to be dropped.
        self._jobs: dict[tuple[str, str], JobRecord | None] = {}
        #: What a flush under way carries.
        self._flying: tuple[dict[str, SandboxRecord], dict[tuple[str, str], JobRecord | None]] = ({}, {})
        self._puts = self._stored = 0
        self._order = 0
        #: Redis' own time less our monotonic one, in seconds: ages are by the clock that all writers share.
        self._clock = SteadyClock()
        self.now: Callable[[], float] = self._clock.now
        self._flushing: asyncio.Task[None] | None = None
        self._checker: asyncio.Task[None] | None = None
        self._closed = False
        #: The last request was answered.
        self.up = False
        #: Redis has lost what it had confirmed.
        self.on_lost: Callable[[], None] = lambda: None

    async def open(self) -> None:
        """Raises `InfrastructureError` when Redis does not answer."""
        await self._ask(self._read_clock)
        self.begin()

    def begin(self) -> None:
        """Go on without waiting for Redis to answer: what is put meanwhile is flushed when it does."""
        self._checker = asyncio.get_running_loop().create_task(self._keep_checking())

    async def close(self) -> None:
        if self._closed:
            return
        try:
            await self.flush()
            await self._redis.delete(self._writer)
        except (InfrastructureError, RedisError, OSError) as error:
            _log.error("the last changes could not be sent to Redis: %s", error)
        self._closed = True
        for task in (self._checker, self._flushing):
            if task is not None:
                task.cancel()
        await self._redis.aclose()

    # ------------------------------------------------------------------------------------------ writing

    @property
    def waiting(self) -> int:
        """Records that have been put and not been flushed."""
        return len(self._sandboxes) + len(self._jobs)

    def put_sandbox(self, record: SandboxRecord) -> None:
        self._puts += 1
        self._sandboxes[record.sandbox_id] = record

    def put_job(self, record: JobRecord) -> None:
        self._puts += 1
        self._jobs[record.owner, record.job_id] = record

    def drop_job(self, owner: str, job_id: str) -> None:
        self._puts += 1
        self._jobs[owner, job_id] = None

    def discard(self) -> None:
        """Forget what waits."""
        self._sandboxes, self._jobs = {}, {}

    async def clear(self) -> None:
        """Remove every record, at once."""
        names = ("sandboxes", "order", "ended", "jobs", "output", "ids", "open", "done")
        await self._ask(lambda: self._redis.delete(*map(self._key, names)))

    async def flush(self) -> None:
        goal = self._puts
        if goal > self._stored and self._closed:
            raise InfrastructureError("the store is closed")
        while self._stored < goal:
            await self._flush_once()

    async def _flush_once(self) -> None:
        """Join the flush under way, or begin one: several callers share it, and none may cancel it for the others."""
        if self._flushing is None:
            self._flushing = asyncio.get_running_loop().create_task(self._flush())
            self._flushing.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(self._flushing)

    async def _flush(self) -> None:
        goal = self._puts
        self._flying = (self._sandboxes, self._jobs)
        self._sandboxes, self._jobs = {}, {}
        try:
            await self._ask(lambda: self._write(*self._flying))
            self._stored = max(self._stored, goal)
        except BaseException:
            self._sandboxes = self._flying[0] | self._sandboxes
            self._jobs = self._flying[1] | self._jobs
            raise
        finally:
            self._flying = ({}, {})
            self._flushing = None

    async def _write(
        self, sandboxes: dict[str, SandboxRecord], jobs: dict[tuple[str, str], JobRecord | None]
    ) -> None:
        count = self._count + 1
        if self._counts is not None:
            # Should the connection break now, nobody knows whether it was done.
            self._counts.add(b"%d" % count)
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.set(self._writer, count, ex=_WRITER_KEPT_S, get=True)
            for sandbox in sandboxes.values():
                self._send_sandbox(pipe, sandbox)
            for (owner, job_id), job in jobs.items():
                self._send_job(pipe, f"{owner}\0{job_id}", f"{job_id}\0{owner}", job)
            found = (await pipe.execute())[0]
        expected, self._counts, self._count = self._counts, {b"%d" % count}, count
        if expected is not None and found not in expected:
            _log.warning("Redis has lost what it had confirmed; it is told again")
            self.on_lost()

    def _send_sandbox(self, pipe: Any, record: SandboxRecord) -> None:
        line = json.dumps({"ended_at": record.ended_at}).encode()
        pipe.hset(self._key("sandboxes"), record.sandbox_id, line + b"\n" + record.data)
        pipe.zadd(self._key("order"), {record.sandbox_id: self._next()}, nx=True)
        if record.ended_at is None:
            pipe.zrem(self._key("ended"), record.sandbox_id)
        else:
            pipe.zadd(self._key("ended"), {record.sandbox_id: self.now()})

    def _send_job(self, pipe: Any, name: str, by_id: str, job: JobRecord | None) -> None:
        if job is None:
            self._drop(pipe, name, by_id)
            return
        number = self._next()
        line = json.dumps(
            {"sandbox_id": job.sandbox_id, "digest": job.digest, "finished_at": job.finished_at, "n": number}
        ).encode()
        pipe.hset(self._key("jobs"), name, line + b"\n" + job.head)
        pipe.zadd(self._key("ids"), {by_id: 0})
        if job.output:
            pipe.hset(self._key("output"), name, job.output)
        else:
            pipe.hdel(self._key("output"), name)
        if job.finished_at is None:
            pipe.zadd(self._key("open"), {name: number})
            pipe.zrem(self._key("done"), name)
        else:
            pipe.zrem(self._key("open"), name)
            pipe.zadd(self._key("done"), {name: self.now()})

    def _drop(self, pipe: Any, name: str, by_id: str) -> None:
        for kind in ("jobs", "output"):
            pipe.hdel(self._key(kind), name)
        for kind in ("open", "done"):
            pipe.zrem(self._key(kind), name)
        pipe.zrem(self._key("ids"), by_id)

    async def _read_clock(self) -> None:
        seconds, microseconds = await self._redis.time()
        self._clock.base = seconds + microseconds / 1e6 - time.monotonic()

    def _next(self) -> int:
        """Rising, also over writers whose clocks agree: microseconds, which a sorted set holds exactly."""
        self._order = max(self._order + 1, time.time_ns() // 1000)
        return self._order

    def _key(self, kind: str) -> str:
        return f"{self._prefix}:{kind}"

    # ------------------------------------------------------------------------------------------ reading

    async def sandbox(self, sandbox_id: str) -> SandboxRecord | None:
        for buffer in (self._sandboxes, self._flying[0]):
            if sandbox_id in buffer:
                return buffer[sandbox_id]
        value = await self._ask(lambda: self._redis.hget(self._key("sandboxes"), sandbox_id))
        return None if value is None else _sandbox_of(sandbox_id, value)

    async def sandboxes(self) -> list[SandboxRecord]:
        await self.flush()
        order = await self._ask(lambda: self._redis.zrange(self._key("order"), 0, -1))
        values = await self._ask(lambda: self._redis.hgetall(self._key("sandboxes")))
        found = [
            _sandbox_of(name.decode("utf-8", "replace"), values[name]) for name in order if name in values
        ]
        return [record for record in found if record is not None]

    async def job(self, owner: str | None, job_id: str) -> JobRecord | None:
        if owner is not None:
            for buffer in (self._jobs, self._flying[1]):
                if (owner, job_id) in buffer:
                    return buffer[owner, job_id]
            found = await self._read_jobs([f"{owner}\0{job_id}"])
        else:
            await self.flush()
            low, high = f"[{job_id}\0", f"({job_id}\1"
            members = await self._ask(lambda: self._redis.zrangebylex(self._key("ids"), low, high))
            owners = [member.decode().partition("\0")[2] for member in members]
            found = await self._read_jobs([f"{each}\0{job_id}" for each in owners])
        return max(found, key=lambda pair: pair[0])[1] if found else None

    async def unfinished_jobs(self) -> list[JobRecord]:
        await self.flush()
        names = await self._ask(lambda: self._redis.zrange(self._key("open"), 0, -1))
        return [job for _, job in await self._read_jobs([name.decode() for name in names])]

    async def _read_jobs(self, names: list[str]) -> list[tuple[int, JobRecord]]:
        """Those that are there, each with its place in the order of changes."""
        if not names:
            return []
        heads = await self._ask(lambda: self._redis.hmget(self._key("jobs"), names))
        outputs = await self._ask(lambda: self._redis.hmget(self._key("output"), names))
        found = [
            _job_of(name, head, output or b"")
            for name, head, output in zip(names, heads, outputs, strict=True)
            if head is not None
        ]
        return [each for each in found if each is not None]

    async def expire(self, job_age_s: float, sandbox_age_s: float) -> Expired:
        await self.flush()
        now = self.now()

        async def old(kind: str, before: float) -> list[str]:
            names = await self._ask(
                lambda: self._redis.zrangebyscore(
                    self._key(kind), "-inf", f"({before!r}", start=0, num=_EXPIRE_ROWS
                )
            )
            return [name.decode() for name in names]

        jobs = await old("done", now - job_age_s)
        ended = await old("ended", now - sandbox_age_s)
        if jobs or ended:
            await self._ask(lambda: self._remove(jobs, ended))
        return Expired(len(jobs), tuple(ended))

    async def _remove(self, jobs: list[str], sandboxes: list[str]) -> None:
        async with self._redis.pipeline(transaction=True) as pipe:
            for name in jobs:
                owner, _, job_id = name.partition("\0")
                self._drop(pipe, name, f"{job_id}\0{owner}")
            for sandbox_id in sandboxes:
                pipe.hdel(self._key("sandboxes"), sandbox_id)
                pipe.zrem(self._key("order"), sandbox_id)
                pipe.zrem(self._key("ended"), sandbox_id)
            await pipe.execute()

    # -------------------------------------------------------------------------------------- connection

    async def _ask(self, ask: Callable[[], Any]) -> Any:
        """What `ask` gives; repeated with growing pauses while Redis does not answer, for `patience_s` at most."""
        if self._closed:
            raise InfrastructureError("the store is closed")
        deadline = time.monotonic() + self._patience_s
        pause_s = _PAUSE_MIN_S
        while True:
            try:
                answer = await ask()
            except (RedisError, OSError, TimeoutError) as error:
                if self.up:
                    _log.warning("Redis does not answer: %s", error)
                self.up = False
                if time.monotonic() + pause_s > deadline:
                    raise InfrastructureError(
                        f"the shared store (Redis) does not answer: {error}; try again in a moment",
                        retry_after_s=2.0,
                    ) from None
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
                pause_s = min(2 * pause_s, _PAUSE_MAX_S)
                continue
            if not self.up:
                _log.info("Redis answers")
            self.up = True
            return answer

    async def _keep_checking(self) -> None:
        """Notice a loss also when nothing is written."""
        while True:
            try:
                await self._ask(self._read_clock)
                await self._flush_once()
            except InfrastructureError:
                pass
            except Exception:
                _log.exception("looking after Redis failed; it is tried again")
            await asyncio.sleep(_CHECK_EVERY_S)


def _sandbox_of(sandbox_id: str, value: bytes) -> SandboxRecord | None:
    """None for what this program has not written."""
    line, _, data = value.partition(b"\n")
    fields = _fields(line)
    if fields is None or not _is_time(ended_at := fields.get("ended_at")):
        _log.error("the record of sandbox %.80s in Redis is damaged; it is passed over", sandbox_id)
        return None
    return SandboxRecord(sandbox_id, ended_at, data)


def _job_of(name: str, value: bytes, output: bytes) -> tuple[int, JobRecord] | None:
    """Its place in the order of changes, and the job; None for what this program has not written."""
    line, _, head = value.partition(b"\n")
    owner, _, job_id = name.partition("\0")
    fields = _fields(line) or {}
    kinds = {"sandbox_id": str, "digest": str, "n": int}
    if any(type(fields.get(key)) is not kind for key, kind in kinds.items()) or not _is_time(
        finished_at := fields.get("finished_at")
    ):
        _log.error("the record of job %.80s in Redis is damaged; it is passed over", job_id)
        return None
    record = JobRecord(owner, job_id, fields["sandbox_id"], fields["digest"], finished_at, head, output)
    return fields["n"], record


def _fields(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _is_time(value: Any) -> bool:
    return value is None or (type(value) in (int, float) and math.isfinite(value))
