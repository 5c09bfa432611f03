"""A store in one SQLite file, for one orchestrator on one machine.

Commits happen on the event loop, once per turn of it, some 20 µs each: with `synchronous=OFF` a commit only
writes to the page cache, which outlives the process. The machine's own crash may lose the last seconds, but then
the sandboxes are gone as well. For the same reason moving the write-ahead log into the database file costs no
disk access; it is done in small steps of about a millisecond.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from orchard.env.errors import InfrastructureError
from orchard.env.orchestrator.clock import SteadyClock, boot_id
from orchard.env.orchestrator.stores.base import Expired, JobRecord, SandboxRecord

_log = logging.getLogger(__name__)

_SCHEMA = """
create table if not exists sandboxes(
    n integer primary key, sandbox_id text not null unique, ended_at real, data blob not null, since real);
create table if not exists jobs(
    n integer primary key, owner text not null, job_id text not null, sandbox_id text not null,
    digest text not null, finished_at real, head blob not null, output blob not null, since real, unique(job_id, owner));
create table if not exists clock(one integer primary key check (one = 1), boot text not null, base real not null);
create index if not exists jobs_unfinished on jobs(n) where finished_at is null;
"""
#: What brings a file of an earlier version up to date.
_MIGRATIONS = {1: "alter table sandboxes add column since real; alter table jobs add column since real;"}
_VERSION = 2
#: Pages of the write-ahead log (4 KiB each) after which a commit also moves them into the database.
_CHECKPOINT_PAGES = 400
#: Rows dropped per call: a few milliseconds of the event loop.
_EXPIRE_ROWS = 200

_PUT_SANDBOX = (
    "insert into sandboxes(sandbox_id, ended_at, data, since) values(?, ?, ?, ?)"
    " on conflict(sandbox_id) do update set ended_at = excluded.ended_at, data = excluded.data, since = excluded.since"
)
# Replacing gives a finished job a new row number: rows are in order of their end, and expiry looks at the oldest.
_PUT_JOB = (
    "insert or replace into jobs(owner, job_id, sandbox_id, digest, finished_at, head, output, since)"
    " values(?, ?, ?, ?, ?, ?, ?, ?)"
)
_JOB_COLUMNS = "owner, job_id, sandbox_id, digest, finished_at, head, output"
_ANYTHING = "select exists(select 1 from sandboxes) or exists(select 1 from jobs)"


class SqliteStore:
    """See the module's docstring; the protocol is `orchard.env.orchestrator.stores.base.Store`.

    file: None keeps everything in memory, for a service that need not survive.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self.on_lost: Callable[[], None] = lambda: None
        self._db: sqlite3.Connection | None = None
        #: The clock that records are stamped by, in seconds; it goes on over restarts.
        self.now: Callable[[], float] = SteadyClock().now
        self._sandboxes: dict[str, SandboxRecord] = {}
        #: None: to be dropped.
        self._jobs: dict[tuple[str, str], JobRecord | None] = {}
        self._flushed: asyncio.Future[None] | None = None

    async def open(self) -> None:
        file = self._file
        if file is None:
            self._db = self._connect(":memory:")
            return
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            self._db = self._connect_file(file)
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):
                raise InfrastructureError(f"cannot open the state in {file}: {error}") from None
            _set_aside(file, error)
            self._db = self._connect_file(file)

    def _connect_file(self, file: Path) -> sqlite3.Connection:
        # First, as the log beside it takes over its mode.
        file.touch(mode=0o600)
        file.chmod(0o600)
        return self._connect(str(file))

    def _connect(self, name: str) -> sqlite3.Connection:
        db = sqlite3.connect(name, isolation_level=None)
        try:
            # The state directory belongs to one process: no lock to take, no shared memory to map, per commit.
            db.execute("pragma locking_mode = exclusive")
            db.execute("pragma journal_mode = wal")
            db.execute("pragma synchronous = off")
            db.execute(f"pragma wal_autocheckpoint = {_CHECKPOINT_PAGES}")
            db.execute("pragma cache_size = -16384")
            version = db.execute("pragma user_version").fetchone()[0]
            if version > _VERSION:
                raise InfrastructureError(
                    f"{name} was written by a newer version of Orchard (format {version}); use that one, or"
                    " another --state-dir"
                )
            if version in _MIGRATIONS:
                db.executescript(_MIGRATIONS[version])
            db.executescript(_SCHEMA)
            db.execute(f"pragma user_version = {_VERSION}")
            self.now = _resume_clock(db).now
        except BaseException:
            db.close()
            raise
        return db

    async def close(self) -> None:
        if self._db is not None:
            self._commit()
            if self._file is not None:
                self._db.execute("pragma wal_checkpoint(truncate)")
            self._db.close()
            self._db = None

    # ------------------------------------------------------------------------------------------ writing

    def put_sandbox(self, record: SandboxRecord) -> None:
        self._sandboxes[record.sandbox_id] = record
        if self._flushed is None:
            self._schedule()

    def put_job(self, record: JobRecord) -> None:
        self._jobs[record.owner, record.job_id] = record
        if self._flushed is None:
            self._schedule()

    def drop_job(self, owner: str, job_id: str) -> None:
        self._jobs[owner, job_id] = None
        if self._flushed is None:
            self._schedule()

    def _schedule(self) -> None:
        loop = asyncio.get_running_loop()
        self._flushed = loop.create_future()
        loop.call_soon(self._commit)

    async def flush(self) -> None:
        if self._flushed is None and (self._sandboxes or self._jobs):
            self._schedule()  # an earlier write failed
        if self._flushed is not None:
            # Several requests of one turn of the loop share the commit: none may cancel it for the others.
            await asyncio.shield(self._flushed)

    def _commit(self) -> None:
        flushed, self._flushed = self._flushed, None
        sandboxes, self._sandboxes = self._sandboxes, {}
        jobs, self._jobs = self._jobs, {}
        if not sandboxes and not jobs:
            if flushed is not None and not flushed.done():
                flushed.set_result(None)
            return
        try:
            self._write(list(sandboxes.values()), jobs)
        except (sqlite3.Error, InfrastructureError) as error:
            _log.error("the state could not be written: %s", error)
            # Nothing is lost yet: it is tried again with the next write.
            self._sandboxes = sandboxes | self._sandboxes
            self._jobs = jobs | self._jobs
            if flushed is not None and not flushed.done():
                flushed.set_exception(
                    InfrastructureError(f"the state could not be written: {error}; is the disk full?")
                )
                flushed.exception()
            return
        if flushed is not None and not flushed.done():
            flushed.set_result(None)

    def _write(
        self, sandboxes: list[SandboxRecord], changes: dict[tuple[str, str], JobRecord | None]
    ) -> None:
        db = self._connection()
        now = self.now()
        jobs = [
            (j.owner, j.job_id, j.sandbox_id, j.digest, j.finished_at, j.head, j.output, now)
            for j in changes.values()
            if j is not None
        ]
        if len(jobs) == len(changes) == 1 and not sandboxes:
            # The usual case at low load: one statement is a transaction by itself, at half the cost.
            db.execute(_PUT_JOB, jobs[0])
            return
        db.execute("begin")
        try:
            if sandboxes:
                db.executemany(_PUT_SANDBOX, [(s.sandbox_id, s.ended_at, s.data, now) for s in sandboxes])
            if jobs:
                db.executemany(_PUT_JOB, jobs)
            if len(jobs) < len(changes):
                dropped = [key for key, job in changes.items() if job is None]
                db.executemany("delete from jobs where owner = ? and job_id = ?", dropped)
            db.execute("commit")
        except BaseException:
            if db.in_transaction:
                db.execute("rollback")
            raise

    # ------------------------------------------------------------------------------------------ reading

    def _connection(self) -> sqlite3.Connection:
        if self._db is None:
            raise InfrastructureError("the store is closed")
        return self._db

    def _read(self, query: str, *values: object) -> list[tuple[object, ...]]:
        return self._connection().execute(query, values).fetchall()

    async def sandbox(self, sandbox_id: str) -> SandboxRecord | None:
        if sandbox_id in self._sandboxes:
            return self._sandboxes[sandbox_id]
        rows = self._read("select sandbox_id, ended_at, data from sandboxes where sandbox_id = ?", sandbox_id)
        return SandboxRecord(*rows[0]) if rows else None  # type: ignore[arg-type]

    async def sandboxes(self) -> list[SandboxRecord]:
        self._commit()
        rows = self._read("select sandbox_id, ended_at, data from sandboxes order by n")
        return [SandboxRecord(*row) for row in rows]  # type: ignore[arg-type]

    async def job(self, owner: str | None, job_id: str) -> JobRecord | None:
        query = f"select {_JOB_COLUMNS} from jobs where job_id = ?"
        if owner is None:
            self._commit()
            rows = self._read(query + " order by n desc limit 1", job_id)
        elif (owner, job_id) in self._jobs:
            # What waits for the commit of this turn is looked at as it is: a read must not force a commit.
            return self._jobs[owner, job_id]
        else:
            rows = self._read(query + " and owner = ?", job_id, owner)
        return JobRecord(*rows[0]) if rows else None  # type: ignore[arg-type]

    async def unfinished_jobs(self) -> list[JobRecord]:
        self._commit()
        rows = self._read(f"select {_JOB_COLUMNS} from jobs where finished_at is null order by n")
        return [JobRecord(*row) for row in rows]  # type: ignore[arg-type]

    def job_heads(self, after: int, limit: int) -> list[tuple[int, JobRecord]]:
        """Jobs without their output, in the order of their last change: at most `limit` after the number `after`,
        each with its number."""
        self._commit()
        rows = self._read(
            "select n, owner, job_id, sandbox_id, digest, finished_at, head from jobs where n > ? order by n limit ?",
            after,
            limit,
        )
        return [(int(str(n)), JobRecord(*values)) for n, *values in rows]  # type: ignore[arg-type]

    def empty(self) -> bool:
        """Nothing is kept."""
        self._commit()
        return self._read(_ANYTHING) == [(0,)]

    async def expire(self, job_age_s: float, sandbox_age_s: float) -> Expired:
        self._commit()
        now = self.now()
        oldest = self._read(
            "select n, since from jobs where finished_at is not null order by n limit ?", _EXPIRE_ROWS
        )
        jobs = [(n,) for n, since in oldest if isinstance(since, float) and since < now - job_age_s]
        ended = self._read(
            "select n, sandbox_id from sandboxes where ended_at is not null and since < ? order by n limit ?",
            now - sandbox_age_s,
            _EXPIRE_ROWS,
        )
        if jobs or ended:
            db = self._connection()
            db.execute("begin")
            db.executemany("delete from jobs where n = ?", jobs)
            db.executemany("delete from sandboxes where n = ?", [(n,) for n, _ in ended])
            db.execute("commit")
        return Expired(len(jobs), tuple(str(sandbox_id) for _, sandbox_id in ended))


@dataclass(frozen=True, slots=True)
class Kept:
    """What a state file holds. live: sandboxes that have not ended; anything: any record at all."""

    live: int
    anything: bool


def look_into(file: Path) -> Kept:
    """What is kept in the file of a store that nobody has open. A damaged one counts as holding something."""
    if not file.exists():
        return Kept(0, False)
    try:
        db = sqlite3.connect(file, isolation_level=None)
        try:
            db.execute("pragma locking_mode = exclusive")
            live = db.execute("select count(*) from sandboxes where ended_at is null").fetchone()[0]
            return Kept(live, bool(db.execute(_ANYTHING).fetchone()[0]))
        finally:
            db.close()
    except sqlite3.Error:
        return Kept(0, True)


def _resume_clock(db: sqlite3.Connection) -> SteadyClock:
    """The clock that the records of this file were stamped by. Those of before there were stamps get one now."""
    latest = db.execute(
        "select max(coalesce((select max(since) from jobs), 0), coalesce((select max(since) from sandboxes), 0))"
    ).fetchone()[0]
    kept = db.execute("select boot, base from clock").fetchone()
    clock = SteadyClock.resumed(kept[0], kept[1], latest) if kept else SteadyClock()
    db.execute("insert or replace into clock values(1, ?, ?)", (boot_id(), clock.base))
    for table in ("jobs", "sandboxes"):
        db.execute(f"update {table} set since = ? where since is null", (clock.now(),))
    return clock


def _set_aside(file: Path, error: Exception) -> None:
    aside = file.with_name(f"{file.name}.damaged-{time.time():.0f}")
    _log.error("the state file is damaged (%s); it is kept as %s and a new one begun", error, aside)
    file.rename(aside)
    for suffix in ("-wal", "-shm"):
        file.with_name(file.name + suffix).unlink(missing_ok=True)
