"""The Redis store and the mirrored one when Redis is away, slow, wiped or set back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from orchard.env.errors import InfrastructureError, SettingsError
from orchard.env.orchestrator.app import create_app
from orchard.env.orchestrator.settings import ServiceSettings
from orchard.env.orchestrator.stores.base import JobRecord, SandboxRecord
from orchard.env.orchestrator.stores.mirrored import MirroredStore
from orchard.env.orchestrator.stores.redis import RedisStore
from orchard.env.orchestrator.stores.sqlite import SqliteStore
from tests.env.orchestrator.asgi import Caller
from tests.env.orchestrator.process_runtime import Place, ProcessRuntime
from tests.support.redis import RedisServer

NewStore = Callable[..., Awaitable[RedisStore]]
PATIENCE_S = 0.3


def sandbox(name: str, data: bytes = b"{}") -> SandboxRecord:
    return SandboxRecord(name, None, data)


def job(job_id: str, output: bytes = b",}") -> JobRecord:
    return JobRecord("me", job_id, "box", "digest", 1.0, b'{"a":1}', output)


@pytest.fixture(params=[False], ids=["volatile"])
def server(request: pytest.FixtureRequest) -> object:
    server = RedisServer(persistent=request.param).start()
    yield server
    server.end()


@pytest.fixture
async def new_store(server: RedisServer) -> AsyncIterator[NewStore]:
    opened: list[RedisStore] = []

    async def new(prefix: str = "test", patience_s: float = PATIENCE_S) -> RedisStore:
        store = RedisStore(server.url, prefix, patience_s=patience_s, answer_s=0.5)
        await store.open()
        opened.append(store)
        return store

    yield new
    for store in opened:
        await store.close()


async def until(settled: Callable[[], Awaitable[bool]]) -> None:
    """TimeoutError after twenty seconds."""
    async with asyncio.timeout(20):
        while not await settled():  # noqa: ASYNC110 - what is looked at is in another process
            await asyncio.sleep(0.02)


class Losses:
    """Counts how often a store finds that Redis has lost something."""

    def __init__(self, store: RedisStore) -> None:
        self.count = 0
        store.on_lost = self._lost

    def _lost(self) -> None:
        self.count += 1

    async def at_least(self, count: int) -> bool:
        return self.count >= count


async def test_what_was_flushed_is_there_for_others(new_store: NewStore) -> None:
    one, other = await new_store(), await new_store()
    one.put_sandbox(sandbox("box"))
    one.put_job(job("j"))
    await one.flush()
    assert await other.sandbox("box") == sandbox("box")
    assert await other.job("me", "j") == job("j")


async def test_stores_of_other_prefixes_are_apart(new_store: NewStore) -> None:
    one, other = await new_store("a"), await new_store("b")
    one.put_sandbox(sandbox("box"))
    await one.flush()
    assert await other.sandboxes() == []


async def test_concurrent_writers_lose_nothing(new_store: NewStore) -> None:
    stores = [await new_store() for _ in range(4)]

    async def write(number: int, store: RedisStore) -> None:
        for turn in range(50):
            store.put_sandbox(sandbox(f"box-{number}", b"%d" % turn))
            store.put_job(job(f"j-{number}-{turn}"))
            await store.flush()

    await asyncio.gather(*(write(number, store) for number, store in enumerate(stores)))
    assert {record.data for record in await stores[0].sandboxes()} == {b"49"}
    assert all([await stores[0].job("me", f"j-{n}-{turn}") for n in range(4) for turn in range(50)])


async def test_a_flush_that_nobody_waits_for_any_more_is_finished(new_store: NewStore) -> None:
    store = await new_store()
    store.put_job(job("j"))
    impatient = asyncio.ensure_future(store.flush())
    await asyncio.sleep(0)
    impatient.cancel()
    await store.flush()
    assert await (await new_store()).job("me", "j") == job("j")


async def test_without_redis_a_flush_is_a_typed_error_and_nothing_is_forgotten(
    server: RedisServer, new_store: NewStore
) -> None:
    store = await new_store()
    server.kill()
    store.put_job(job("j"))
    with pytest.raises(InfrastructureError, match="Redis") as refused:
        await store.flush()
    assert refused.value.retryable and refused.value.http_status == 503
    assert await store.job("me", "j") == job("j")
    server.start()
    await until(lambda: acknowledged(store))
    assert await (await new_store()).job("me", "j") == job("j")


async def test_a_frozen_redis_holds_nobody_for_long(server: RedisServer, new_store: NewStore) -> None:
    store = await new_store()
    server.freeze()
    store.put_job(job("j"))
    async with asyncio.timeout(20):
        with pytest.raises(InfrastructureError):
            await asyncio.gather(*(store.flush() for _ in range(100)))
    server.thaw()
    await until(lambda: acknowledged(store))


async def acknowledged(store: RedisStore) -> bool:
    try:
        await store.flush()
    except InfrastructureError:
        return False
    return True


async def test_a_redis_that_is_away_for_a_moment_is_waited_for(
    server: RedisServer, new_store: NewStore
) -> None:
    store = await new_store(patience_s=20.0)
    server.kill()
    store.put_job(job("j"))
    flushing = asyncio.ensure_future(store.flush())
    await until(lambda: is_down(store))
    assert not flushing.done()
    await asyncio.to_thread(server.start)
    await flushing
    assert await (await new_store()).job("me", "j") == job("j")


async def is_down(store: RedisStore) -> bool:
    return not store.up


async def test_opening_without_redis_is_a_typed_error(server: RedisServer) -> None:
    server.kill()
    store = RedisStore(server.url, patience_s=PATIENCE_S)
    with pytest.raises(InfrastructureError, match="Redis"):
        await store.open()
    await store.close()


async def test_a_url_that_is_none_is_refused() -> None:
    with pytest.raises(SettingsError, match="redis_url"):
        RedisStore("mysql://somewhere")


async def test_a_wiped_redis_is_noticed_though_nothing_is_written(
    server: RedisServer, new_store: NewStore
) -> None:
    store = await new_store()
    losses = Losses(store)
    store.put_sandbox(sandbox("box"))
    await store.flush()
    server.wipe()
    await until(lambda: losses.at_least(1))


async def test_a_redis_set_back_to_an_older_state_is_noticed(
    server: RedisServer, new_store: NewStore
) -> None:
    store = await new_store()
    losses = Losses(store)
    store.put_sandbox(sandbox("box"))
    await store.flush()
    server.client.save()
    store.put_sandbox(sandbox("later"))
    await store.flush()
    server.kill()
    server.start()
    await until(lambda: losses.at_least(1))
    assert await store.sandbox("box") == sandbox("box")


@pytest.mark.parametrize("server", [True], ids=["persistent"], indirect=True)
async def test_a_restarted_redis_that_kept_everything_is_no_loss(
    server: RedisServer, new_store: NewStore
) -> None:
    store = await new_store()
    losses = Losses(store)
    store.put_sandbox(sandbox("box"))
    await store.flush()
    server.kill()
    server.start()
    await until(lambda: acknowledged(store))
    store.put_sandbox(sandbox("later"))
    await until(lambda: acknowledged(store))
    assert losses.count == 0
    assert await store.sandboxes() == [sandbox("box"), sandbox("later")]


# -- an orchestrator that has Redis alone


async def test_what_redis_lost_is_put_again_by_the_orchestrator(
    server: RedisServer, new_store: NewStore, tmp_path: Path
) -> None:
    place = Place(tmp_path / "sandboxes")
    place.folder.mkdir()
    settings = ServiceSettings(state_dir=tmp_path, api_keys=["admin-key"])
    app = create_app(settings, ProcessRuntime(place), RedisStore(server.url, "test"))
    await app.state.orchestrator.start()
    try:
        call = Caller(app)
        await call.ready("box")
        finished = await call.run("box", "echo kept")
        started = (await call.post("/sandboxes/box/exec", {"command": "sleep 60"})).expect()
        server.wipe()
        reader = await new_store()

        async def there() -> bool:
            return None not in (
                await reader.sandbox("box"),
                await reader.job("default", finished["job_id"]),
                await reader.job("default", started["job_id"]),
            )

        await until(there)
        assert await call.get(f"/jobs/{finished['job_id']}") and (await call.get("/sandboxes/box")).expect()
    finally:
        await app.state.orchestrator.stop()
        await place.end()


# -- the mirror


@pytest.fixture
async def mirrored(server: RedisServer, tmp_path: Path) -> AsyncIterator[MirroredStore]:
    mirror = RedisStore(server.url, "test", patience_s=PATIENCE_S)
    store = MirroredStore(SqliteStore(tmp_path / "state.db"), mirror)
    yield store
    await store.close()


async def test_a_mirrored_store_needs_no_redis_and_tells_it_everything_later(
    server: RedisServer, mirrored: MirroredStore, new_store: NewStore
) -> None:
    server.kill()
    await mirrored.open()
    mirrored.put_sandbox(sandbox("box"))
    mirrored.put_job(job("j", b"," * 1000))
    await mirrored.flush()
    assert not mirrored.up
    assert await mirrored.job("me", "j") == job("j", b"," * 1000)
    server.start()
    reader = await new_store()
    await until(lambda: has(reader, "box", "j"))
    assert (await reader.job("me", "j")) == job("j", b"")


async def test_a_wiped_mirror_is_filled_again(
    server: RedisServer, mirrored: MirroredStore, new_store: NewStore
) -> None:
    await mirrored.open()
    for number in range(1200):
        mirrored.put_job(job(f"j{number}"))
    mirrored.put_sandbox(sandbox("box"))
    await mirrored.flush()
    reader = await new_store()
    await until(lambda: has(reader, "box", "j1199"))
    server.wipe()
    await until(lambda: has(reader, "box", "j0", "j1199"))


async def test_what_redis_should_not_have_any_more_is_removed_at_the_start(
    mirrored: MirroredStore, new_store: NewStore
) -> None:
    earlier = await new_store()
    earlier.put_sandbox(sandbox("forgotten"))
    await earlier.flush()
    await mirrored.open()

    async def removed() -> bool:
        return await earlier.sandbox("forgotten") is None

    await until(removed)


async def has(reader: RedisStore, sandbox_id: str, *job_ids: str) -> bool:
    try:
        return None not in [
            await reader.sandbox(sandbox_id),
            *[await reader.job("me", job_id) for job_id in job_ids],
        ]
    except InfrastructureError:
        return False
