"""An orchestrator on the small runtime of these tests, and its restart."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from orchard.env.orchestrator.app import create_app
from orchard.env.orchestrator.auth import hash_key
from orchard.env.orchestrator.orchestrator import Orchestrator
from orchard.env.orchestrator.settings import ServiceSettings
from orchard.env.orchestrator.stores.base import JobRecord, SandboxRecord
from orchard.env.orchestrator.stores.sqlite import SqliteStore
from tests.env.orchestrator.asgi import Caller
from tests.env.orchestrator.process_runtime import Agent, Place, ProcessRuntime

KEYS = {"admin": "admin-key", "alice": "alice-key", "bob": "bob-key"}


@dataclass
class Running:
    """One run of the service."""

    orchestrator: Orchestrator
    runtime: ProcessRuntime
    call: Caller

    def caller(self, name: str | None) -> Caller:
        return Caller(self.call.app, KEYS[name] if name else None)

    def agent(self, sandbox_id: str) -> Agent:
        return self.runtime.place.agents[sandbox_id]


Start = Callable[..., Awaitable[Running]]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Starts the service on one place and one store; starting it again without `stop` is what follows a kill -9:
    nothing of the earlier run's memory counts."""
    place = Place(tmp_path / "sandboxes")
    place.folder.mkdir()
    keys = tmp_path / "keys.json"
    keys.write_text(
        f'[{{"owner": "alice", "hash": "{hash_key(KEYS["alice"])}"}},'
        f' {{"owner": "bob", "hash": "{hash_key(KEYS["bob"])}", "max_sandboxes": 2}}]'
    )
    runs: list[Running] = []

    async def begin(**options: Any) -> Running:
        if runs:
            await crash(runs[-1])
        settings = ServiceSettings(state_dir=tmp_path, api_keys=[KEYS["admin"]], keys_file=keys, **options)
        runtime = ProcessRuntime(place)
        app = create_app(settings, runtime, MortalStore(tmp_path / "test.db"))
        await app.state.orchestrator.start()
        runs.append(Running(app.state.orchestrator, runtime, Caller(app)))
        return runs[-1]

    yield begin
    for run in runs[-1:]:
        await run.orchestrator.stop()
    await place.end()


class MortalStore(SqliteStore):
    """A store that can die: what is put afterwards is lost."""

    dead = False

    async def die(self) -> None:
        await self.close()
        self.dead = True

    def put_sandbox(self, record: SandboxRecord) -> None:
        if not self.dead:
            super().put_sandbox(record)

    def put_job(self, record: JobRecord) -> None:
        if not self.dead:
            super().put_job(record)

    async def close(self) -> None:
        if not self.dead:
            await super().close()


async def crash(run: Running) -> None:
    """The run ends as by kill -9: it stores nothing more; what it had committed stays."""
    store = run.orchestrator.store
    assert isinstance(store, MortalStore)
    await store.die()
    await run.orchestrator.begin_stop()


@pytest.fixture
async def running(start: Start) -> Running:
    return await start()


@pytest.fixture
def call(running: Running) -> Caller:
    """Requests with the admin key."""
    return running.call
