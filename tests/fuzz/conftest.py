"""A service of these tests' own, with little room: what is generated must not fill the machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conformance.conftest import end_and_check
from tests.conformance.runtimes import RUNTIMES
from tests.support.rest import Box, Rest
from tests.support.service import Service

#: Live sandboxes at once; those that are there for the tests included.
MAX_SANDBOXES = 8


@pytest.fixture(scope="package")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A real `orchard serve` on the local runtime. At its end nothing of it may be left on the machine."""
    runtime = RUNTIMES["local"]
    limits = ("--max-sandboxes", str(MAX_SANDBOXES), "--pull", "never")
    server = Service(tmp_path_factory.mktemp("fuzz") / "state", arguments=(*runtime.serve_arguments, *limits))
    server.start()
    try:
        yield server
    finally:
        end_and_check(server, runtime)


@pytest.fixture(scope="package")
def rest(service: Service) -> Rest:
    return service.rest


@pytest.fixture
def bystander(rest: Rest) -> Iterator[Box]:
    """A sandbox that has nothing to do with what is tried; it must be as before afterwards."""
    with rest.sandbox("host") as box:
        yield box
        assert box.alive()
