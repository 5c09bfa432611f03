"""Pulling from a real registry, directly and through a server that makes its faults."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from orchard.env.errors import (
    DiskFull,
    ImageInvalid,
    ImageNotFound,
    InfrastructureError,
    InvalidRequest,
    PullDenied,
    RegistryRateLimited,
    RegistryUnreachable,
    RuntimeRefused,
)
from orchard.env.images import ImageStore
from orchard.env.images.documents import machine_architecture
from orchard.env.images.pull import Puller, PullSettings
from tests.env.images.archives import INDEX_TYPE, Layout, digest, file, tar, tree
from tests.support.machine import pids_with_argument
from tests.support.registry import Fault, FaultyRegistry, Registry, faulty_registry, running_registry
from tests.support.waiting import eventually

pytestmark = pytest.mark.xdist_group("registry")

#: htpasswd -nbB tester secret
USERS = "tester:$2y$05$WQaJFOLYRjElQNkpkVu9aeHnj1jbEVMUCw.inD7YLK48.4tVwrfWu\n"
LARGE = 1 << 20


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with running_registry(tmp_path_factory.mktemp("registry")) as running:
        yield running


@pytest.fixture
def faulty(registry: Registry) -> Iterator[FaultyRegistry]:
    with faulty_registry(registry) as between:
        yield between


@pytest.fixture
def puller(store: ImageStore) -> Puller:
    return Puller(store)


def image(*layers: bytes) -> Layout:
    layout = Layout()
    return layout.add(layout.manifest(*layers, Env=["MADE=1"]), "1")


def two_layers() -> tuple[Layout, str, str]:
    """An image, and the digests of its layers, of random bytes that no other test has."""
    layout = image(tar(file("a", os.urandom(LARGE))), tar(file("b", os.urandom(LARGE))))
    manifest = json.loads(layout.blobs[layout.index[0]["digest"]])
    first, second = (layer["digest"] for layer in manifest["layers"])
    return layout, first, second


def index_of(*architectures: str) -> tuple[Layout, str]:
    """An index with an image for each architecture, and its digest."""
    layout = Layout()
    manifests = [
        {
            **layout.manifest(tar(file(f"for-{each}")), architecture=each),
            "platform": {"architecture": each, "os": "linux"},
        }
        for each in architectures
    ]
    index = json.dumps({"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": manifests}).encode()
    return layout.add(layout.add_blob(index, INDEX_TYPE), "1"), digest(index)


def test_a_tag_is_pulled(registry: Registry, puller: Puller, store: ImageStore) -> None:
    ref = registry.push(image(tar(file("a", "content"))), "group/app:1")
    record = puller.pull(ref)
    assert (record.name, record.kind, record.env) == (ref, "oci", {"MADE": "1"})
    (layer,) = store.resolve(ref).layers
    assert (layer / "a").read_text() == "content"


def test_the_plain_name_finds_what_was_pulled(registry: Registry, puller: Puller, store: ImageStore) -> None:
    ref = registry.push(image(tar(file("a"))), "plain:1")
    record = puller.pull(ref)
    assert store.resolve("plain:1").digest == record.digest


def test_the_image_for_this_machine_is_taken_from_an_index(
    registry: Registry, puller: Puller, store: ImageStore
) -> None:
    layout, _ = index_of("s390x", machine_architecture())
    ref = registry.push(layout, "multi:1")
    puller.pull(ref)
    assert set(tree(store.resolve(ref).layers[0])) == {f"for-{machine_architecture()}"}


def test_an_index_without_this_machine_is_told(registry: Registry, puller: Puller) -> None:
    layout, _ = index_of("s390x")
    ref = registry.push(layout, "foreign:1")
    with pytest.raises(ImageInvalid, match="no image for linux/"):
        puller.pull(ref)


def test_an_index_is_pulled_by_its_digest_and_found_by_it(
    registry: Registry, puller: Puller, store: ImageStore
) -> None:
    layout, index = index_of(machine_architecture())
    repository = registry.push(layout, "exact:1").removesuffix(":1")
    record = puller.pull(f"{repository}@{index}")
    assert store.resolve(f"{repository}@{index}").digest == record.digest
    store.prune()
    assert store.resolve(f"{repository}:1@{index}").digest == record.digest


def test_a_tag_that_moved_is_pulled_anew(registry: Registry, puller: Puller, store: ImageStore) -> None:
    ref = registry.push(image(tar(file("a", "old"))), "moving:1")
    puller.pull(ref)
    registry.push(image(tar(file("a", "new"))), "moving:1")
    puller.pull(ref)
    assert (store.resolve(ref).layers[0] / "a").read_text() == "new"


def test_an_unknown_tag_is_told_with_those_that_exist(registry: Registry, puller: Puller) -> None:
    ref = registry.push(image(tar(file("a"))), "tagged:1.0")
    with pytest.raises(ImageNotFound, match=r"no tag '2\.0' .*it has: 1\.0"):
        puller.pull(ref.replace("1.0", "2.0"))


def test_an_unknown_name_is_told_as_a_name(registry: Registry, puller: Puller) -> None:
    with pytest.raises(ImageNotFound, match="no image of the name"):
        puller.pull(f"{registry.host}/never/pushed:1")


@pytest.mark.parametrize("ref", ["host", "dir:/tmp", "sha256:" + "0" * 64, "name@sha256:12", "No Name"])
def test_what_no_registry_can_have_is_refused(puller: Puller, ref: str) -> None:
    with pytest.raises(InvalidRequest):
        puller.pull(ref)


def test_a_registry_that_is_not_there_is_told(puller: Puller) -> None:
    with pytest.raises(RegistryUnreachable, match=r"127\.0\.0\.1:1 cannot be reached") as caught:
        puller.pull("127.0.0.1:1/app:1")
    assert caught.value.retryable and caught.value.infra


def test_credentials_come_from_the_auth_file(tmp_path: Path, store: ImageStore) -> None:
    with running_registry(tmp_path / "private", USERS) as private:
        auth_file = tmp_path / "auth.json"
        auth_file.write_text(json.dumps({"auths": {private.host: {"auth": "dGVzdGVyOnNlY3JldA=="}}}))
        private.auth_file = auth_file
        ref = private.push(image(tar(file("a", "private"))), "app:1")
        with pytest.raises(PullDenied, match="skopeo login"):
            Puller(store).pull(ref)
        assert Puller(store, PullSettings(auth_file=auth_file)).pull(ref).name == ref


def test_a_missing_auth_file_is_told(store: ImageStore, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no file"):
        Puller(store, PullSettings(auth_file=tmp_path / "none")).pull("app:1")


def test_without_skopeo_the_error_says_how_to_get_it(puller: Puller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(RuntimeRefused, match="apt install skopeo"):
        puller.pull("app:1")


# -- layers --------------------------------------------------------------------------------------------------


def test_a_layer_that_is_cached_is_not_fetched_again(
    registry: Registry, faulty: FaultyRegistry, puller: Puller
) -> None:
    shared = tar(file("base", os.urandom(1000)))
    registry.push(image(shared, tar(file("one"))), "shared-one:1")
    registry.push(image(shared, tar(file("two"))), "shared-two:1")
    puller.pull(f"{faulty.host}/shared-one:1")
    first = set(faulty.fetched_blobs())
    faulty.seen.clear()
    puller.pull(f"{faulty.host}/shared-two:1")
    again = set(faulty.fetched_blobs())
    assert len(again) == 2 and not first & again  # its own layer and its configuration


def test_a_layer_that_breaks_off_is_tried_again_alone(
    registry: Registry, faulty: FaultyRegistry, puller: Puller, store: ImageStore
) -> None:
    layout, first, second = two_layers()
    registry.push(layout, "cut:1")

    def decide(method: str, path: str, n: int) -> Fault | None:
        broken = path.endswith(second) and n == 0
        return Fault(cut_after=LARGE // 2, after=lambda: cached(store, first)) if broken else None

    faulty.decide = decide
    puller.pull(f"{faulty.host}/cut:1")
    assert (faulty.fetched_blobs().count(first), faulty.fetched_blobs().count(second)) == (1, 2)
    assert set(tree(store.resolve("cut:1").layers[0])) == {"a", "b"}


def test_a_pull_killed_in_the_middle_goes_on_with_the_layers_that_had_arrived(
    registry: Registry, faulty: FaultyRegistry, puller: Puller, store: ImageStore
) -> None:
    layout, first, second = two_layers()
    registry.push(layout, "killed:1")
    ref = f"{faulty.host}/killed:1"

    def decide(method: str, path: str, n: int) -> Fault | None:
        halted = path.endswith(second) and n == 0
        return Fault(cut_after=LARGE // 2, hold=True) if halted else None

    faulty.decide = decide
    command = [
        sys.executable,
        "-m",
        "orchard",
        "images",
        "pull",
        ref,
        "--state-dir",
        str(store.area.root.parent),
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    eventually(
        lambda: cached(store, first) and second in faulty.fetched_blobs(),
        "the first layer is there, the second not",
    )
    process.send_signal(signal.SIGKILL)
    process.wait()
    eventually(
        lambda: not pids_with_argument(f"docker://{ref}"), "skopeo ends with the program that started it"
    )
    puller.pull(ref)
    assert (faulty.fetched_blobs().count(first), faulty.fetched_blobs().count(second)) == (1, 2)
    assert scratch(store) == []


def test_a_stopped_pull_leaves_nothing_but_the_cache(
    registry: Registry, faulty: FaultyRegistry, puller: Puller, store: ImageStore
) -> None:
    layout, first, second = two_layers()
    registry.push(layout, "stopped:1")
    ref = f"{faulty.host}/stopped:1"
    faulty.decide = lambda method, path, n: Fault(hold=True, cut_after=1) if path.endswith(second) else None
    stop = threading.Event()
    with ThreadPoolExecutor() as pool:
        pull = pool.submit(puller.pull, ref, stop=stop)
        eventually(lambda: cached(store, first), "the first layer is cached")
        stop.set()
        with pytest.raises(InfrastructureError, match="stopped"):
            pull.result(30)
    assert pids_with_argument(f"docker://{ref}") == []
    assert scratch(store) == []
    assert [record.name for record in store.list()] == ["host"]
    assert store.prune() >= LARGE
    assert not cached(store, first)


def test_a_pull_that_receives_nothing_is_given_up(
    registry: Registry, faulty: FaultyRegistry, store: ImageStore
) -> None:
    layout, _, second = two_layers()
    registry.push(layout, "silent:1")
    faulty.decide = lambda method, path, n: Fault(hold=True, cut_after=1) if path.endswith(second) else None
    with pytest.raises(RegistryUnreachable, match="sent nothing for 1 s"):
        Puller(store, PullSettings(stall_timeout_s=1)).pull(f"{faulty.host}/silent:1")


def test_a_registry_that_asks_to_wait_is_asked_again(
    registry: Registry, faulty: FaultyRegistry, puller: Puller
) -> None:
    registry.push(image(tar(file("a"))), "busy:1")

    def decide(method: str, path: str, n: int) -> Fault | None:
        return Fault(429, {"Retry-After": "1"}) if "/manifests/" in path and n == 0 else None

    faulty.decide = decide
    lines: list[str] = []
    assert puller.pull(f"{faulty.host}/busy:1", lines.append).kind == "oci"
    assert "the registry asks to wait 1 s" in lines


def test_a_registry_that_only_asks_to_wait_is_a_retryable_error(
    registry: Registry, faulty: FaultyRegistry, puller: Puller
) -> None:
    registry.push(image(tar(file("a"))), "closed:1")
    faulty.decide = lambda method, path, n: (
        Fault(429, {"Retry-After": "1"}) if "/manifests/" in path else None
    )
    with pytest.raises(RegistryRateLimited) as caught:
        puller.pull(f"{faulty.host}/closed:1")
    assert caught.value.retryable and caught.value.retry_after_s == 1


def test_a_registry_that_falters_is_asked_again(
    registry: Registry, faulty: FaultyRegistry, puller: Puller
) -> None:
    registry.push(image(tar(file("a"))), "faltering:1")
    faulty.decide = lambda method, path, n: Fault(503) if "/manifests/" in path and n == 0 else None
    assert puller.pull(f"{faulty.host}/faltering:1").kind == "oci"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a small disk")
def test_a_full_disk_is_told(registry: Registry, tmp_path: Path) -> None:
    layout, _, _ = two_layers()
    ref = registry.push(layout, "too-large:1")
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={LARGE + LARGE // 2}", "tmpfs", str(disk)], check=True
    )
    try:
        small = ImageStore(disk / "images", durable=False)
        with pytest.raises(DiskFull, match="orchard images prune"):
            Puller(small).pull(ref)
        assert scratch(small) == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("what", ["layer", "manifest"])
def test_content_with_another_digest_is_refused(
    registry: Registry, faulty: FaultyRegistry, puller: Puller, store: ImageStore, what: str
) -> None:
    layout, _, second = two_layers()
    ref = registry.push(layout, f"changed-{what}:1").replace(registry.host, faulty.host)
    changed = second if what == "layer" else layout.index[0]["digest"]
    faulty.decide = lambda method, path, n: Fault(change=_altered) if path.endswith(changed) else None
    with pytest.raises(ImageInvalid, match="does not have its digest"):
        puller.pull(f"{ref.removesuffix(':1')}@{changed}" if what == "manifest" else ref)
    assert [record.name for record in store.list()] == ["host"]


def _altered(body: bytes) -> bytes:
    return body[:-1] + bytes([body[-1] ^ 1]) if body[-1:] != b"}" else body.replace(b"{", b"{ ", 1)


def test_a_damaged_cache_is_fetched_anew(registry: Registry, puller: Puller, store: ImageStore) -> None:
    layout, first, _ = two_layers()
    ref = registry.push(layout, "rotten:1")
    puller.pull(ref)
    store.remove(ref)
    blob = store.area.cache / "blobs" / "sha256" / first[7:]
    blob.write_bytes(bytes(blob.stat().st_size))
    puller.pull(ref)
    assert set(tree(store.resolve(ref).layers[0])) == {"a", "b"}


def test_pulls_of_one_reference_at_the_same_time_are_one(
    registry: Registry, faulty: FaultyRegistry, store: ImageStore
) -> None:
    layout, first, _ = two_layers()
    registry.push(layout, "popular:1")
    ref = f"{faulty.host}/popular:1"
    with ThreadPoolExecutor(8) as pool:
        records = [pull.result(60) for pull in [pool.submit(Puller(store).pull, ref) for _ in range(8)]]
    assert len({record.digest for record in records}) == 1
    assert faulty.fetched_blobs().count(first) == 1
    assert faulty.seen.count(("GET", "/v2/popular/manifests/1")) == 1


def test_pruning_does_not_disturb_a_pull(
    registry: Registry, faulty: FaultyRegistry, puller: Puller, store: ImageStore
) -> None:
    layout, first, second = two_layers()
    registry.push(layout, "pruned:1")
    pruned = threading.Event()
    faulty.decide = lambda method, path, n: Fault(after=pruned.is_set) if path.endswith(second) else None
    with ThreadPoolExecutor() as pool:
        pull = pool.submit(puller.pull, f"{faulty.host}/pruned:1")
        eventually(lambda: cached(store, first), "the first layer is cached")
        store.prune()
        pruned.set()
        pull.result(60)
    assert faulty.fetched_blobs().count(first) == 1


def cached(store: ImageStore, blob: str) -> bool:
    return (store.area.cache / "blobs" / "sha256" / blob[7:]).exists()


def scratch(store: ImageStore) -> list[Path]:
    return list((store.area.root / "scratch").iterdir())
