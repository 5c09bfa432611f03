from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orchard.env.client import SandboxClient
from tests.support.service import Service

Done = subprocess.CompletedProcess[str]
Cli = Callable[..., Done]


def environment(**more: str) -> dict[str, str]:
    """Ours, without what points to a service."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("ORCHARD_", "SANDBOX_"))
    }
    return {**kept, **more}


def run_cli(*arguments: str, env: dict[str, str], text: str = "", timeout_s: float = 120) -> Done:
    command = [sys.executable, "-m", "orchard", *arguments]
    return subprocess.run(command, input=text, capture_output=True, text=True, env=env, timeout=timeout_s)


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service that the commands talk to."""
    server = Service(tmp_path_factory.mktemp("cli") / "state").start()
    yield server
    server.delete_all()
    assert server.stop() == 0


@pytest.fixture(scope="session")
def service_environment(served: Service) -> dict[str, str]:
    assert served.api_key is not None
    return environment(ORCHARD_BASE_URL=served.base_url, ORCHARD_API_KEY=served.api_key)


@pytest.fixture(scope="session")
def cli(service_environment: dict[str, str]) -> Cli:
    """Run `orchard` with arguments (and `text` as its input), told by the environment where the service is."""

    def run(*arguments: str, text: str = "") -> Done:
        return run_cli(*arguments, env=service_environment, text=text)

    return run


@pytest.fixture(scope="session")
def sandbox_id(served: Service) -> Iterator[str]:
    """A sandbox that the tests share."""
    with SandboxClient(served.base_url, served.api_key) as client, client.create("host") as sandbox:
        yield sandbox.sandbox_id


@pytest.fixture
def alone(tmp_path: Path) -> dict[str, str]:
    """An environment that names no service, with a home of its own."""
    return environment(XDG_STATE_HOME=str(tmp_path / "state-home"))
