"""What every store does: the same tests for all of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from orchard.env.errors import InfrastructureError
from orchard.env.orchestrator.stores.base import Expired, JobRecord, SandboxRecord, Store
from orchard.env.orchestrator.stores.mirrored import MirroredStore
from orchard.env.orchestrator.stores.redis import RedisStore
from orchard.env.orchestrator.stores.sqlite import SqliteStore
from tests.support.redis import RedisServer


def job(job_id: str, owner: str = "me", finished_at: float | None = 1.0, output: bytes = b",}") -> JobRecord:
    return JobRecord(owner, job_id, "box", "digest", finished_at, b'{"a":1}', output)


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    server = RedisServer().start()
    yield server
    server.end()


@pytest.fixture(params=["memory", "file", "redis", "mirrored"])
async def store(
    request: pytest.FixtureRequest, tmp_path: Path, redis_server: RedisServer
) -> AsyncIterator[Store]:
    redis_server.wipe()
    stores: dict[str, Store] = {
        "memory": SqliteStore(None),
        "file": SqliteStore(tmp_path / "state.db"),
        "redis": RedisStore(redis_server.url),
        "mirrored": MirroredStore(SqliteStore(tmp_path / "truth.db"), RedisStore(redis_server.url, "mirror")),
    }
    store = stores[request.param]
    await store.open()
    yield store
    await store.close()


async def test_reads_see_writes_flushed_or_not(store: Store) -> None:
    store.put_job(job("j"))
    store.put_sandbox(SandboxRecord("box", None, b"{}"))
    for _ in range(2):
        assert await store.job("me", "j") == job("j")
        assert await store.job(None, "j") == job("j")
        assert await store.job("other", "j") is None
        assert await store.sandbox("box") == SandboxRecord("box", None, b"{}")
        assert await store.sandbox("other") is None
        await store.flush()


async def test_a_job_is_replaced_and_dropped(store: Store) -> None:
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
    assert await store.job(None, "j") is None


async def test_dropping_what_is_not_there_is_fine(store: Store) -> None:
    store.drop_job("me", "never")
    await store.flush()
    assert await store.job("me", "never") is None


async def test_one_id_of_two_owners_is_two_jobs(store: Store) -> None:
    store.put_job(job("j", "a"))
    store.put_job(job("j", "b"))
    await store.flush()
    assert (await store.job("a", "j")) == job("j", "a")
    assert (await store.job("b", "j")) == job("j", "b")


async def test_any_owners_job_is_the_latest_of_that_id_alone(store: Store) -> None:
    for job_id, owner in (("j", "z"), ("j-longer", "m"), ("j", "a"), ("i", "q")):
        store.put_job(job(job_id, owner))
        await store.flush()
    assert await store.job(None, "j") == job("j", "a")


async def test_lists_are_in_order_of_insertion_whatever_changes(store: Store) -> None:
    for name in ("zebra", "ant", "mole"):
        store.put_sandbox(SandboxRecord(name, None, b"{}"))
        store.put_job(job(f"of-{name}", finished_at=None, output=b""))
        await store.flush()
    store.put_sandbox(SandboxRecord("zebra", 5.0, b'{"new":1}'))
    await store.flush()
    assert await store.sandboxes() == [
        SandboxRecord("zebra", 5.0, b'{"new":1}'),
        SandboxRecord("ant", None, b"{}"),
        SandboxRecord("mole", None, b"{}"),
    ]
    assert [record.job_id for record in await store.unfinished_jobs()] == ["of-zebra", "of-ant", "of-mole"]


async def test_any_bytes_come_back_as_they_were(store: Store) -> None:
    data = bytes(range(256)) + b"\n\r\n"
    record = JobRecord("me", "j", "box", "", 1.5, b'{"line":"a\\nb"}', data)
    store.put_job(record)
    store.put_sandbox(SandboxRecord("box", 1.25, data))
    await store.flush()
    assert await store.job("me", "j") == record
    assert await store.sandbox("box") == SandboxRecord("box", 1.25, data)


def set_clock(store: Any, now: float) -> None:
    for each in (store, getattr(store, "_truth", None), getattr(store, "_mirror", None)):
        if each is not None:
            each.now = lambda: now


async def settled(store: Any) -> None:
    """Flushed, the mirror too."""
    await store.flush()
    if isinstance(store, MirroredStore):
        await store._mirror.flush()


async def test_the_times_in_records_decide_nothing(store: Store) -> None:
    """They are of a wall clock, which may have stood anywhere."""
    store.put_job(job("of 1970", finished_at=1.0))
    store.put_sandbox(SandboxRecord("box", 1.0, b"{}"))
    await settled(store)
    assert await store.expire(60.0, 60.0) == Expired(0, ())


async def test_expiry_drops_the_old_and_nothing_else(store: Store) -> None:
    set_clock(store, 10.0)
    store.put_job(job("running", finished_at=None, output=b""))
    for number in range(500):
        store.put_job(job(f"old{number}"))
    store.put_sandbox(SandboxRecord("dead", 1.0, b"{}"))
    store.put_sandbox(SandboxRecord("alive", None, b"{}"))
    await settled(store)
    set_clock(store, 20.0)
    store.put_job(job("new"))
    store.put_sandbox(SandboxRecord("fresh", 1.0, b"{}"))
    await settled(store)
    set_clock(store, 25.0)
    jobs, sandboxes = 0, []
    while (dropped := await store.expire(10.0, 10.0)).jobs or dropped.sandbox_ids:
        jobs += dropped.jobs
        sandboxes += dropped.sandbox_ids
    assert (jobs, sandboxes) == (500, ["dead"])
    assert await store.job("me", "new") and await store.job("me", "running")
    assert await store.job("me", "old7") is None and await store.job(None, "old7") is None
    assert [record.sandbox_id for record in await store.sandboxes()] == ["alive", "fresh"]


async def test_a_closed_store_says_so(store: Store) -> None:
    await store.close()
    store.put_job(job("j"))
    with pytest.raises(InfrastructureError):
        await store.flush()
    with pytest.raises(InfrastructureError):
        await store.sandboxes()
