from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from orchard.env.client import AsyncSandboxClient, ClientSettings, RetryPolicy, SandboxClient
from tests.env.client.scripted import ScriptedService

#: Patient enough for any scripted fault, quick between attempts.
QUICK = RetryPolicy(total_s=20, base_s=0.001, cap_s=0.01, first_contact_s=1)


@pytest.fixture
def service() -> Iterator[ScriptedService]:
    running = ScriptedService().start()
    yield running
    running.stop()


@pytest.fixture
def settings(service: ScriptedService) -> ClientSettings:
    return ClientSettings(base_url=service.base_url, api_key="a key", retry=QUICK)


@pytest.fixture
async def client(settings: ClientSettings) -> AsyncIterator[AsyncSandboxClient]:
    async with AsyncSandboxClient(settings=settings) as open_client:
        yield open_client


@pytest.fixture
def sync_client(settings: ClientSettings) -> Iterator[SandboxClient]:
    with SandboxClient(settings=settings) as open_client:
        yield open_client
