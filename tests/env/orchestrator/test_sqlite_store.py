"""The SQLite store: what is flushed survives the death of the process. What all stores do: `test_stores`."""

from __future__ import annotations

import asyncio
import signal
import sqlite3
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from orchard.env.errors import InfrastructureError
from orchard.env.orchestrator.stores.base import Expired, JobRecord
from orchard.env.orchestrator.stores.sqlite import SqliteStore


def job(job_id: str, owner: str = "me", finished_at: float | None = 1.0, output: bytes = b",}") -> JobRecord:
    return JobRecord(owner, job_id, "box", "digest", finished_at, b'{"a":1}', output)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    store = SqliteStore(tmp_path / "state.db")
    await store.open()
    yield store
    await store.close()


async def test_age_counts_over_a_restart_whatever_the_wall_clock_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SqliteStore(tmp_path / "state.db")
    await store.open()
    store.put_job(job("j"))
    await store.close()
    monkeypatch.setattr("time.time", lambda: 9e9)
    again = SqliteStore(tmp_path / "state.db")
    await again.open()
    assert (await again.expire(3600.0, 3600.0)).jobs == 0
    assert (await again.expire(0.0, 0.0)).jobs == 1
    await again.close()


async def test_after_the_machine_was_started_anew_age_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SqliteStore(tmp_path / "state.db")
    await store.open()
    store.now = lambda: 5e6
    store.put_job(job("j"))
    await store.close()
    monkeypatch.setattr("orchard.env.orchestrator.clock.boot_id", lambda: "another")
    again = SqliteStore(tmp_path / "state.db")
    await again.open()
    assert 5e6 <= again.now() < 5e6 + 60
    await again.close()


async def test_a_file_of_the_first_version_is_taken_over(tmp_path: Path) -> None:
    db = sqlite3.connect(tmp_path / "state.db")
    db.executescript("""
        create table sandboxes(
            n integer primary key, sandbox_id text not null unique, ended_at real, data blob not null);
        create table jobs(
            n integer primary key, owner text not null, job_id text not null, sandbox_id text not null,
            digest text not null, finished_at real, head blob not null, output blob not null, unique(job_id, owner));
        insert into jobs values(1, 'me', 'j', 'box', 'digest', 1.0, '{"a":1}', ',}');
        insert into sandboxes values(1, 'box', 1.0, '{}');
        pragma user_version = 1;
    """)
    db.close()
    store = SqliteStore(tmp_path / "state.db")
    await store.open()
    assert await store.job("me", "j") is not None
    assert await store.expire(60.0, 60.0) == Expired(0, ())
    await store.close()


_WRITER = """
import asyncio, os, signal, sys
from pathlib import Path
from orchard.env.orchestrator.stores.base import Expired, JobRecord
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


async def test_the_state_is_for_its_owner_alone(store: SqliteStore, tmp_path: Path) -> None:
    store.put_job(job("j"))
    await store.flush()
    assert open_to_others(tmp_path) == {"state.db": 0, "state.db-wal": 0}


def damaged(folder: Path) -> list[Path]:
    return list(folder.glob("state.db.damaged-*"))


def open_to_others(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mode & 0o077 for path in folder.glob("state.db*")}
