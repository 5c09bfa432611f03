"""The SQLite store: what is flushed survives the death of the process."""

from __future__ import annotations

import asyncio
import signal
import sqlite3
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from orchard.env.errors import InfrastructureError
from orchard.env.orchestrator.stores.base import JobRecord, SandboxRecord
from orchard.env.orchestrator.stores.sqlite import SqliteStore


def job(job_id: str, owner: str = "me", finished_at: float | None = 1.0, output: bytes = b",}") -> JobRecord:
    return JobRecord(owner, job_id, "box", "digest", finished_at, b'{"a":1}', output)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    store = SqliteStore(tmp_path / "state.db")
    await store.open()
    yield store
    await store.close()


async def test_reads_see_writes_flushed_or_not(store: SqliteStore) -> None:
    store.put_job(job("j"))
    store.put_sandbox(SandboxRecord("box", None, b"{}"))
    for _ in range(2):
        assert await store.job("me", "j") == job("j")
        assert await store.job(None, "j") == job("j")
        assert await store.job("other", "j") is None
        assert await store.sandbox("box") == SandboxRecord("box", None, b"{}")
        await store.flush()


async def test_a_job_is_replaced_and_dropped(store: SqliteStore) -> None:
    store.put_job(job("j", finished_at=None, output=b""))
    await store.flush()
    assert [record.job_id for record in await store.unfinished_jobs()] == ["j"]
    store.put_job(job("j", finished_at=2.0))
    await store.flush()
    assert await store.unfinished_jobs() == []
    store.drop_job("me", "j")
    assert await store.job("me", "j") is None
    await store.flush()
    assert await store.job("me", "j") is None


async def test_one_id_of_two_owners_is_two_jobs(store: SqliteStore) -> None:
    store.put_job(job("j", "a"))
    store.put_job(job("j", "b"))
    await store.flush()
    assert (await store.job("a", "j")) == job("j", "a")
    assert (await store.job("b", "j")) == job("j", "b")


async def test_expiry_drops_the_old_and_nothing_else(store: SqliteStore) -> None:
    store.put_job(job("running", finished_at=None))
    for number in range(500):
        store.put_job(job(f"old{number}", finished_at=10.0))
    store.put_job(job("new", finished_at=20.0))
    for name, ended_at in (("dead", 10.0), ("fresh", 20.0), ("alive", None)):
        store.put_sandbox(SandboxRecord(name, ended_at, b"{}"))
    await store.flush()
    jobs, sandboxes = 0, []
    while (dropped := await store.expire(15.0, 15.0)).jobs or dropped.sandbox_ids:
        jobs += dropped.jobs
        sandboxes += dropped.sandbox_ids
    assert (jobs, sandboxes) == (500, ["dead"])
    assert await store.job("me", "new") and await store.job("me", "running")
    assert [record.sandbox_id for record in await store.sandboxes()] == ["fresh", "alive"]


_WRITER = """
import asyncio, os, signal, sys
from pathlib import Path
from orchard.env.orchestrator.stores.base import JobRecord
from orchard.env.orchestrator.stores.sqlite import SqliteStore

async def main():
    store = SqliteStore(Path(sys.argv[1]))
    await store.open()
    for number in range(3000):
        store.put_job(JobRecord("me", f"j{number}", "box", "", 1.0, b"{}", b"x" * 500))
        await store.flush()
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


async def test_what_was_flushed_survives_kill_9(tmp_path: Path) -> None:
    file = tmp_path / "state.db"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", _WRITER, str(file))
    assert await process.wait() == -signal.SIGKILL
    store = SqliteStore(file)
    await store.open()
    try:
        assert all([await store.job("me", f"j{number}") for number in range(3000)])
    finally:
        await store.close()


async def test_a_damaged_file_is_set_aside_and_begun_anew(tmp_path: Path) -> None:
    file = tmp_path / "state.db"
    file.write_bytes(b"this is no database, " * 1000)
    store = SqliteStore(file)
    await store.open()
    store.put_job(job("j"))
    await store.flush()
    await store.close()
    assert [path.read_bytes()[:7] for path in damaged(tmp_path)] == [b"this is"]


async def test_a_file_of_a_newer_version_is_refused_unchanged(tmp_path: Path) -> None:
    file = tmp_path / "state.db"
    with sqlite3.connect(file) as db:
        db.execute("pragma user_version = 99")
    db.close()
    with pytest.raises(InfrastructureError, match="newer version"):
        await SqliteStore(file).open()
    assert damaged(tmp_path) == []


async def test_a_closed_store_says_so(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "state.db")
    await store.open()
    await store.close()
    store.put_job(job("j"))
    with pytest.raises(InfrastructureError):
        await store.flush()
    with pytest.raises(InfrastructureError):
        await store.sandboxes()


async def test_the_state_is_for_its_owner_alone(store: SqliteStore, tmp_path: Path) -> None:
    store.put_job(job("j"))
    await store.flush()
    assert open_to_others(tmp_path) == {"state.db": 0, "state.db-wal": 0}


def damaged(folder: Path) -> list[Path]:
    return list(folder.glob("state.db.damaged-*"))


def open_to_others(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mode & 0o077 for path in folder.glob("state.db*")}
