"""One real service for each test process and runtime; sandboxes per test, or per module where tests cannot
disturb each other."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from tests.conformance.runtimes import RUNTIMES, Images, RuntimeCase
from tests.support.machine import Leftovers
from tests.support.outside import Outside, outside
from tests.support.rest import Box, Rest, new_id
from tests.support.sdk import Sdk, open_sdk
from tests.support.service import Service, live_sandboxes

NewBox = Callable[..., Box]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every test runs against every runtime; against an ordinary user's service only those that are marked for it, by
    themselves or with their module (of which `unprivileged(False)` excepts one)."""
    if "runtime" in metafunc.fixturenames:
        mark = metafunc.definition.get_closest_marker("unprivileged")
        marked = mark is not None and mark.args != (False,)
        names = [name for name, case in RUNTIMES.items() if marked or not case.ordinary]
        metafunc.parametrize("runtime", names, indirect=True, scope="session")


@pytest.fixture(scope="session")
def runtime(request: pytest.FixtureRequest) -> RuntimeCase:
    """The runtime under test."""
    return RUNTIMES[request.param]


@pytest.fixture(scope="session")
def service(runtime: RuntimeCase, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """The service that most tests share. At its end nothing of it may be left on the machine."""
    with runtime.folder(tmp_path_factory) as folder:
        server = Service(
            folder / "state", arguments=runtime.serve_arguments, prefix=runtime.prefix(folder)
        ).start()
        try:
            yield server
        finally:
            end_and_check(server, runtime)


def end_and_check(server: Service, runtime: RuntimeCase) -> None:
    """Deletes all, stops, and fails when anything is left."""
    ids = {s["sandbox_id"] for s in live_sandboxes(server.rest)}
    server.delete_all()
    assert server.stop() == 0, server.log()
    Leftovers(server.mark, server.state_dir, ids, runtime.tags(server.state_dir)).check()


@pytest.fixture(scope="session")
def images(runtime: RuntimeCase, service: Service, tmp_path_factory: pytest.TempPathFactory) -> Images:
    return runtime.images(tmp_path_factory.mktemp("images"), service.state_dir)


@pytest.fixture(scope="session")
def rest(service: Service) -> Rest:
    """Raw REST with the admin key."""
    return service.rest


@pytest.fixture
def new_box(rest: Rest, images: Images) -> Iterator[NewBox]:
    """Makes ready sandboxes of the full image (or `image=`), deleted at the end of the test."""
    made: list[Box] = []

    def make(image: str | None = None, **fields: object) -> Box:
        box = rest.submit(image or images.full, **fields)
        made.append(box)
        box.wait_ready()
        return box

    yield make
    for box in made:
        box.delete()


@pytest.fixture
def fresh(new_box: NewBox) -> Box:
    """A sandbox of one's own."""
    return new_box()


@pytest.fixture(scope="module")
def box(rest: Rest, images: Images) -> Iterator[Box]:
    """A sandbox shared by the tests of a module that cannot disturb each other."""
    with rest.sandbox(images.full) as shared:
        yield shared


@pytest.fixture(scope="module")
def busybox(rest: Rest, images: Images) -> Iterator[Box]:
    """The same with busybox alone."""
    with rest.sandbox(images.busybox) as shared:
        yield shared


@pytest.fixture(scope="module")
def shell_less(rest: Rest, images: Images) -> Iterator[Box]:
    """The same without any shell."""
    with rest.sandbox(images.shell_less) as shared:
        yield shared


@pytest.fixture
def place(box: Box) -> str:
    """A directory of the shared sandbox that no other test uses."""
    path = f"/tmp/{new_id('place')}"
    box.out(["/bin/mkdir", path])
    return path


@pytest.fixture(scope="session")
def out(runtime: RuntimeCase, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outside]:
    """Hosts elsewhere, with DNS of their own."""
    assert runtime.on_this_machine
    with outside(tmp_path_factory.mktemp("outside")) as made:
        yield made


@pytest.fixture(scope="session")
def filtering(
    runtime: RuntimeCase, out: Outside, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    """A service that resolves the names of lists there."""
    arguments = (*runtime.serve_arguments, "--egress-resolver", out.address)
    service = Service(tmp_path_factory.mktemp("egress") / "state", arguments=arguments).start()
    yield service
    if not service.running:
        service.start()
    end_and_check(service, runtime)


@pytest.fixture
def listed(filtering: Service) -> Iterator[NewBox]:
    """Makes ready sandboxes whose list are its arguments, deleted at the end of the test."""
    made: list[Box] = []

    def make(*entries: str, **fields: object) -> Box:
        # Its service may be another process by the end.
        made.append(filtering.rest.create("host", allow_egress=list(entries), **fields))
        return made[-1]

    yield make
    for box in made:
        Box(filtering.rest, box.id).delete()


@pytest.fixture(params=["async", "sync"])
async def sdk(request: pytest.FixtureRequest, service: Service) -> AsyncIterator[Sdk]:
    """The SDK in both flavours, under one asynchronous face."""
    async with open_sdk(request.param, service.base_url, service.api_key) as client:
        yield client


@pytest.fixture
def own_service(
    runtime: RuntimeCase, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Service]]:
    """Starts services of one's own (with other arguments); nothing of them may be left at the end."""
    servers: list[Service] = []
    with runtime.folder(tmp_path_factory) as folder:

        def start(*arguments: str, **options: object) -> Service:
            server = Service(
                folder / f"state{len(servers)}",
                arguments=(*runtime.serve_arguments, *arguments),
                prefix=runtime.prefix(folder),
                **options,  # type: ignore[arg-type]
            )
            servers.append(server)
            return server.start()

        yield start
        for server in servers:
            if not server.running:
                server.start()
            end_and_check(server, runtime)
