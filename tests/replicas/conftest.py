"""Two services and a Redis, in place of the one service that the conformance suite has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conformance.conftest import box, busybox, fresh, new_box, place, shell_less
from tests.conformance.runtimes import RUNTIMES, Images, RuntimeCase
from tests.support.replicas import Replicas
from tests.support.rest import Rest

__all__ = ["box", "busybox", "fresh", "new_box", "place", "shell_less"]

NewReplicas = Callable[..., Replicas]


@pytest.fixture(scope="session")
def runtime() -> RuntimeCase:
    return RUNTIMES["local"]


@pytest.fixture(scope="module")
def shared(runtime: RuntimeCase, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    """Two services for the tests that harm neither them nor their Redis."""
    replicas = Replicas(tmp_path_factory.mktemp("replicas") / "state", runtime)
    try:
        yield replicas.start()
    finally:
        replicas.end_and_check()


@pytest.fixture(scope="module")
def rest(shared: Replicas) -> Rest:
    """The requests of a test go to one service after the other."""
    return shared.rest


@pytest.fixture(scope="module")
def images(runtime: RuntimeCase, shared: Replicas, tmp_path_factory: pytest.TempPathFactory) -> Images:
    return runtime.images(tmp_path_factory.mktemp("images"), shared.state_dir)


@pytest.fixture
def new_replicas(runtime: RuntimeCase, tmp_path: Path) -> Iterator[NewReplicas]:
    """Starts services of one's own; nothing of them may be left at the end."""
    made: list[Replicas] = []

    def start(*arguments: str, count: int = 2) -> Replicas:
        replicas = Replicas(tmp_path / f"state{len(made)}", runtime, count=count, arguments=arguments)
        made.append(replicas)
        return replicas.start()

    yield start
    for replicas in made:
        replicas.end_and_check()


@pytest.fixture(scope="module")
def mortals(runtime: RuntimeCase, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    replicas = Replicas(tmp_path_factory.mktemp("mortals") / "state", runtime)
    yield replicas
    replicas.end_and_check()


@pytest.fixture
def pair(mortals: Replicas) -> Replicas:
    """Two services that may be ended, as may their Redis: all of them run when a test begins."""
    return mortals.start()
