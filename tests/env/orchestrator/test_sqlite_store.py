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
from orchard.env.orchestrator.stores.base import JobRecord
from orchard.env.orchestrator.stores.sqlite import SqliteStore


def job(job_id: str, owner: str = "me", finished_at: float | None = 1.0, output: bytes = b",}") -> JobRecord:
    return JobRecord(owner, job_id, "box", "digest", finished_at, b'{"a":1}', output)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    store = SqliteStore(tmp_path / "state.db")
    await store.open()
    yield store
    await store.close()


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


async def test_the_state_is_for_its_owner_alone(store: SqliteStore, tmp_path: Path) -> None:
    store.put_job(job("j"))
    await store.flush()
    assert open_to_others(tmp_path) == {"state.db": 0, "state.db-wal": 0}


def damaged(folder: Path) -> list[Path]:
    return list(folder.glob("state.db.damaged-*"))


def open_to_others(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mode & 0o077 for path in folder.glob("state.db*")}
