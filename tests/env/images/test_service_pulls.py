"""Pulls by a service: asked for over REST, and by the creation of a sandbox."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchard import AsyncSandboxClient
from orchard.env.errors import Conflict, Forbidden, ImageNotFound, SandboxTimeout
from tests.env.images.archives import Layout, directory, file, symlink, tar
from tests.support.images import BUSYBOX
from tests.support.keys import Tenant, write_keys_file
from tests.support.machine import pids_with_argument
from tests.support.registry import Fault, FaultyRegistry, Registry, faulty_registry, running_registry
from tests.support.rest import Rest
from tests.support.sdk import open_sdk
from tests.support.service import Service
from tests.support.waiting import eventually

pytestmark = pytest.mark.xdist_group("registry")

ROOT, ALICE = Tenant("root", role="admin"), Tenant("alice")


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with running_registry(tmp_path_factory.mktemp("registry")) as running:
        yield running


@pytest.fixture
def faulty(registry: Registry) -> Iterator[FaultyRegistry]:
    with faulty_registry(registry) as between:
        yield between


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("service")
    keys = write_keys_file(folder / "keys.json", [ROOT, ALICE])
    server = Service(
        folder / "state", arguments=("--pull", "missing", "--keys-file", str(keys)), api_key=None
    ).start()
    server.api_key = ROOT.key
    yield server
    server.delete_all()
    assert server.stop() == 0


@pytest.fixture
def rest(service: Service) -> Rest:
    return service.rest


def pushed(registry: Registry, name: str, said: str) -> str:
    """A busybox image whose file /said holds `said`."""
    files = [directory("bin"), file("bin/busybox", BUSYBOX.read_bytes(), 0o755), symlink("bin/sh", "busybox")]
    layout = Layout()
    return registry.push(
        layout.add(layout.manifest(tar(*files, file("said", said)), Env=["MADE=1"]), "1"), name
    )


def test_an_image_is_pulled_with_a_wait(registry: Registry, rest: Rest) -> None:
    ref = pushed(registry, "waited:1", "x")
    answer = rest.post("/images", {"pull": ref}, wait=60).expect(200)
    assert (answer["status"], answer["image"]["name"], answer["error"]) == ("succeeded", ref, None)
    assert ref in [image["name"] for image in rest.get("/images").expect(200)["images"]]


def test_without_a_wait_the_list_tells_how_it_ends(registry: Registry, rest: Rest) -> None:
    assert rest.post("/images", {"pull": f"{registry.host}/nothing:1"}).expect(200)["status"] == "running"

    def ended() -> object:
        pulls = rest.get("/images").expect(200)["pulls"]
        return next(
            (p["error"] for p in pulls if p["pull"].endswith("/nothing:1") and p["status"] == "failed"), None
        )

    error = eventually(ended, "the pull has failed")
    assert isinstance(error, dict) and error["code"] == "image_not_found"


def test_a_pull_that_fails_answers_with_the_error(registry: Registry, rest: Rest) -> None:
    answer = rest.post("/images", {"pull": f"{registry.host}/nothing:2"}, wait=60).expect(404)
    assert answer["code"] == "image_not_found"


def test_a_sandbox_pulls_the_image_that_is_missing(registry: Registry, rest: Rest) -> None:
    ref = pushed(registry, "missing:1", "pulled for me")
    sandbox = rest.post("/sandboxes", {"image": ref}, wait=60).expect(200)
    assert sandbox["status"] == "ready", sandbox
    body = {"command": ["busybox", "cat", "/said"], "wait": True}
    job = rest.post(f"/sandboxes/{sandbox['sandbox_id']}/exec", body).expect(200)
    assert job["stdout"] == "pulled for me"


def test_many_sandboxes_of_one_missing_image_pull_it_once(
    registry: Registry, faulty: FaultyRegistry, rest: Rest
) -> None:
    pushed(registry, "shared:1", "x")
    entry = {"image": f"{faulty.host}/shared:1"}
    results = rest.post("/sandboxes/batch", {"sandboxes": [entry] * 5}).expect(200)["results"]
    for each in results:
        rest.get(f"/sandboxes/{each['sandbox']['sandbox_id']}/wait", timeout=60).expect(200)
    assert faulty.seen.count(("GET", "/v2/shared/manifests/1")) == 1


def test_a_sandbox_of_an_image_that_nobody_has_fails_with_the_reason(registry: Registry, rest: Rest) -> None:
    sandbox = rest.post("/sandboxes", {"image": f"{registry.host}/nobody/has:1"}, wait=60).expect(200)
    assert (sandbox["status"], sandbox["reason"]) == ("failed", "image_not_found")


def test_deleting_the_only_sandbox_that_waits_stops_the_pull(
    registry: Registry, faulty: FaultyRegistry, rest: Rest
) -> None:
    pushed(registry, "unwanted:1", "x")
    faulty.decide = lambda method, path, n: Fault(hold=True, cut_after=1) if "/blobs/" in path else None
    ref = f"{faulty.host}/unwanted:1"
    sandbox = rest.post("/sandboxes", {"image": ref}).expect(200)
    eventually(lambda: pids_with_argument(f"docker://{ref}"), "the pull runs")
    rest.delete(f"/sandboxes/{sandbox['sandbox_id']}").expect(200)
    eventually(lambda: not pids_with_argument(f"docker://{ref}"), "the pull has ended")


def test_only_admin_keys_pull_and_remove(registry: Registry, service: Service) -> None:
    alice = service.rest.with_key(ALICE.key)
    ref = pushed(registry, "guarded:1", "x")
    assert alice.post("/images", {"pull": ref}).expect(403)["code"] == "forbidden"
    assert alice.delete(f"/images/{ref}").expect(403)["code"] == "forbidden"
    assert alice.get("/images").expect(200)["pulls"] == []


def test_an_image_is_removed_unless_a_sandbox_uses_it(registry: Registry, rest: Rest) -> None:
    ref = pushed(registry, "removed:1", "an image of its own")
    sandbox = rest.post("/sandboxes", {"image": ref}, wait=60).expect(200)
    assert rest.delete(f"/images/{ref}").expect(409)["code"] == "conflict"
    rest.delete(f"/sandboxes/{sandbox['sandbox_id']}").expect(200)
    assert rest.delete(f"/images/{ref}").expect(200)["image"] == ref
    assert rest.delete(f"/images/{ref}").expect(404)["code"] == "image_not_found"


def test_a_service_does_not_pull_unless_told(registry: Registry, tmp_path: Path) -> None:
    ref = pushed(registry, "unasked:1", "x")
    server = Service(tmp_path / "state").start()
    try:
        sandbox = server.rest.post("/sandboxes", {"image": ref}, wait=60).expect(200)
        assert (sandbox["status"], sandbox["reason"]) == ("failed", "image_not_found")
        assert "orchard images pull" in sandbox["status_message"]
    finally:
        assert server.stop() == 0


def test_a_service_that_stops_ends_its_pulls(
    registry: Registry, faulty: FaultyRegistry, tmp_path: Path
) -> None:
    pushed(registry, "late:1", "x")
    faulty.decide = lambda method, path, n: Fault(hold=True, cut_after=1) if "/blobs/" in path else None
    ref = f"{faulty.host}/late:1"
    server = Service(tmp_path / "state").start()
    server.rest.post("/images", {"pull": ref}).expect(200)
    eventually(lambda: pids_with_argument(f"docker://{ref}"), "the pull runs")
    assert server.stop() == 0
    assert pids_with_argument(f"docker://{ref}") == []


def test_an_unknown_policy_is_refused(tmp_path: Path) -> None:
    command = [*Service(tmp_path / "state").command(), "--pull", "sometimes"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "never or missing" in done.stderr


@pytest.mark.parametrize("flavour", ["async", "sync"])
async def test_the_sdk_pulls_lists_and_removes(registry: Registry, service: Service, flavour: str) -> None:
    ref = pushed(registry, f"by-sdk:{flavour}", flavour)
    async with open_sdk(flavour, service.base_url, ROOT.key) as sdk:
        assert (await sdk.images.pull(ref)).name == ref
        assert ref in [image.name for image in await sdk.images.list()]
        sandbox = await sdk.create(ref)
        assert (await sandbox.exec(["/bin/busybox", "cat", "/said"])).stdout == flavour
        with pytest.raises(Conflict):
            await sdk.images.remove(ref)
        await sandbox.delete()
        await sdk.images.remove(ref)
        assert ref not in [image.name for image in await sdk.images.list()]


async def test_what_a_pull_fails_with_reaches_the_caller_of_the_sdk(
    registry: Registry, service: Service
) -> None:
    async with AsyncSandboxClient(service.base_url, ROOT.key) as client:
        with pytest.raises(ImageNotFound):
            await client.images.pull(f"{registry.host}/absent:1")
        assert [p.status for p in await client.images.pulls() if p.pull.endswith("/absent:1")] == ["failed"]
    async with AsyncSandboxClient(service.base_url, ALICE.key) as client:
        with pytest.raises(Forbidden):
            await client.images.start_pull(f"{registry.host}/absent:1")


async def test_a_pull_that_takes_too_long_goes_on(
    registry: Registry, faulty: FaultyRegistry, service: Service
) -> None:
    pushed(registry, "slow-sdk:1", "x")
    given_up = threading.Event()
    busy = Fault(429, {"Retry-After": "1"})
    faulty.decide = lambda _method, path, _n: busy if "/blobs/" in path and not given_up.is_set() else None
    async with AsyncSandboxClient(service.base_url, ROOT.key) as client:
        ref = f"{faulty.host}/slow-sdk:1"
        with pytest.raises(SandboxTimeout):
            await client.images.pull(ref, timeout_s=0.2)
        given_up.set()
        assert (await client.images.pull(ref)).name == ref
