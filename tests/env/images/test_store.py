"""References, listing, removal, pruning and crashes."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from orchard.env.errors import (
    Conflict,
    FileMissing,
    Forbidden,
    ImageInvalid,
    ImageNotFound,
    InvalidRequest,
    PathInvalid,
    RuntimeRefused,
    TooLarge,
)
from orchard.env.images import ImageRecord, ImageStore
from orchard.env.images.limits import ImportLimits
from tests.env.images import overlay
from tests.env.images.archives import directory, docker_archive, file, symlink, tar
from tests.env.images.conftest import Import


def _note_sandbox(state: Path, sandbox_id: str, digest: str) -> Path:
    home = state / "sandboxes" / sandbox_id
    home.mkdir(parents=True)
    (home / "sandbox.json").write_text(json.dumps({"ref": "any", "digest": digest}))
    return home


def _layers(state: Path) -> set[str]:
    return {path.name for path in (state / "images/layers").iterdir()}


# -- references ------------------------------------------------------------------------------------------------


def test_an_unknown_name_says_what_is_near_and_how_to_import(store: ImageStore, add: Import) -> None:
    add(docker_archive(tar(file("a"))), "team/busybox:1.36")
    with pytest.raises(ImageNotFound, match=r"team/busybox:1\.36") as caught:
        store.resolve("busybox")
    assert "orchard images import" in caught.value.detail
    assert "orchard images pull" in caught.value.detail


@pytest.mark.parametrize(
    "ref", ["", " ", "a b", "../x", "a//b", "/abs", "x:", "-x", "a:b:c", "host:1", "x" * 300, "é"]
)
def test_text_that_names_no_image_is_refused(store: ImageStore, ref: str) -> None:
    with pytest.raises(InvalidRequest):
        store.resolve(ref)


@pytest.mark.parametrize("name", ["a", "a:1", "a/b_c.d-e:V1.0", "reg.example:5000/a/b:t", "A/B"])
def test_ordinary_names_work(store: ImageStore, add: Import, name: str) -> None:
    add(docker_archive(tar(file("a"))), name)
    assert store.resolve(name).ref == name


def test_the_registry_of_a_name_may_be_left_out_when_that_is_clear(store: ImageStore, add: Import) -> None:
    plain = add(docker_archive(tar(file("a", "1"))), "registry.example/library/tool:1")
    add(docker_archive(tar(file("a", "2"))), "registry.example/team/tool:1")
    assert store.resolve("tool:1").digest == plain.digest
    own = add(docker_archive(tar(file("a", "3"))), "tool:1")
    assert store.resolve("tool:1").digest == own.digest
    add(docker_archive(tar(file("a", "4"))), "other.example/team/tool:1")
    with pytest.raises(ImageNotFound, match=r"other\.example"):
        store.resolve("team/tool:1")
    store.remove("tool:1")
    store.remove("tool:1")
    assert [each.name for each in store.list()][1:] == [
        "other.example/team/tool:1",
        "registry.example/team/tool:1",
    ]


@pytest.mark.parametrize("ref", ["sha256:abc", "sha256:XYZ123", "sha256:", "app@sha256:12"])
def test_digests_need_enough_hexadecimal_digits(store: ImageStore, ref: str) -> None:
    with pytest.raises(InvalidRequest, match="6 hexadecimal digits"):
        store.resolve(ref)


def test_a_digest_nobody_has_is_not_found(store: ImageStore) -> None:
    with pytest.raises(ImageNotFound):
        store.resolve("sha256:" + "0" * 64)


# -- directories -----------------------------------------------------------------------------------------------


def test_a_directory_is_its_own_layer(store: ImageStore, tmp_path: Path) -> None:
    (tmp_path / "rootfs").mkdir()
    image = store.resolve(f"dir:{tmp_path}/rootfs")
    assert image.layers == (tmp_path / "rootfs",)
    assert image.digest == store.resolve(f"dir:{tmp_path}/rootfs/").digest


@pytest.mark.parametrize(
    ("ref", "error"),
    [
        ("dir:", PathInvalid),
        ("dir:relative", PathInvalid),
        ("dir:/a/../etc", PathInvalid),
        ("dir:/", PathInvalid),
        ("dir:/proc/self", PathInvalid),
        ("dir:/dev", PathInvalid),
        ("dir:/etc/passwd", PathInvalid),
        ("dir:/nowhere/at/all", ImageNotFound),
        ("dir:/etc\0", PathInvalid),
    ],
)
def test_unusable_directories_are_refused_with_a_reason(
    store: ImageStore, ref: str, error: type[Exception]
) -> None:
    with pytest.raises(error):
        store.resolve(ref)


def test_directories_that_overlap_the_state_are_refused(
    store: ImageStore, state: Path, tmp_path: Path
) -> None:
    (state / "sandboxes").mkdir(parents=True)
    (tmp_path / "link").symlink_to(state)
    for path in (state, state / "sandboxes", tmp_path, tmp_path / "link"):
        with pytest.raises(PathInvalid, match="state"):
            store.resolve(f"dir:{path}")


def test_the_operator_may_limit_where_directories_lie(state: Path, tmp_path: Path) -> None:
    allowed = tmp_path / "allowed"
    (allowed / "one").mkdir(parents=True)
    (allowed / "out").symlink_to("/usr")
    store = ImageStore(state / "images", directories=[allowed])
    assert store.resolve(f"dir:{allowed}/one").layers == (allowed / "one",)
    for path in ("/usr", f"{allowed}/out"):
        with pytest.raises(Forbidden):
            store.resolve(f"dir:{path}")


# -- listing and removing --------------------------------------------------------------------------------------


def test_the_list_has_host_and_every_name(store: ImageStore, add: Import) -> None:
    record = add(docker_archive(tar(file("a", "12345")), Env=["A=1"]), "app:1")
    host, listed = store.list()
    assert (host.name, host.kind) == ("host", "host")
    assert listed == record
    assert listed.size_bytes == 5
    assert ImageRecord(**{**listed.to_json(), "notes": tuple(listed.notes)}) == listed
    assert json.dumps(listed.to_json())


def test_a_name_moves_to_the_newest_import_and_the_old_image_keeps_its_digest(
    store: ImageStore, add: Import
) -> None:
    old = add(docker_archive(tar(file("a", "1"))), "app")
    new = add(docker_archive(tar(file("a", "2"))), "app")
    assert store.resolve("app").digest == new.digest
    assert store.resolve(old.digest).digest == old.digest
    assert [record.name for record in store.list()] == ["host", "app:latest", old.digest]


def test_removing_the_last_name_frees_the_files(store: ImageStore, state: Path, add: Import) -> None:
    add(docker_archive(tar(file("a"))), "one")
    add(docker_archive(tar(file("a"))), "two")
    store.remove("one")
    assert store.resolve("two")
    assert len(_layers(state)) == 1
    store.remove("two:latest")
    assert _layers(state) == set()
    with pytest.raises(ImageNotFound):
        store.resolve("two")


def test_removing_by_digest_takes_all_names(store: ImageStore, add: Import) -> None:
    add(docker_archive(tar(file("a"))), "one")
    record = add(docker_archive(tar(file("a"))), "two")
    store.remove(record.digest[:20])
    assert [each.name for each in store.list()] == ["host"]


def test_an_image_in_use_is_not_removed(store: ImageStore, state: Path, add: Import) -> None:
    record = add(docker_archive(tar(file("a"))), "app")
    home = _note_sandbox(state, "busy-one", record.digest)
    with pytest.raises(Conflict, match="busy-one"):
        store.remove("app")
    (home / "sandbox.json").unlink()
    with pytest.raises(Conflict, match="starting"):
        store.remove("app", in_use=[record.digest])
    store.remove("app")


def test_a_note_that_cannot_be_read_protects_every_image(store: ImageStore, state: Path, add: Import) -> None:
    add(docker_archive(tar(file("a"))), "app")
    (_note_sandbox(state, "torn", "x") / "sandbox.json").write_text("{")
    with pytest.raises(Conflict, match="torn"):
        store.remove("app")


@pytest.mark.parametrize("name", ["host", "dir:/tmp"])
def test_what_is_not_stored_cannot_be_removed(store: ImageStore, name: str) -> None:
    with pytest.raises(InvalidRequest):
        store.remove(name)


def test_removing_an_unknown_name_is_not_found(store: ImageStore) -> None:
    with pytest.raises(ImageNotFound):
        store.remove("nothing")


# -- pruning ---------------------------------------------------------------------------------------------------


def test_prune_takes_nameless_images_and_spares_those_in_use(
    store: ImageStore, state: Path, add: Import
) -> None:
    first = add(docker_archive(tar(file("a", "x" * 1000))), "app")
    add(docker_archive(tar(file("a", "y" * 2000))), "app")
    last = add(docker_archive(tar(file("a", "z"))), "app")
    home = _note_sandbox(state, "busy", first.digest)
    assert store.prune() >= 2000
    assert {store.resolve(each).digest for each in (first.digest, "app")} == {first.digest, last.digest}
    (home / "sandbox.json").unlink()
    assert store.prune() >= 1000
    assert len(_layers(state)) == 1
    assert store.prune() == 0


def test_prune_takes_old_skeletons_of_host_when_no_sandbox_uses_them(
    store: ImageStore, state: Path, machine: Path
) -> None:
    old = store.resolve("host")
    (machine / "etc/new").write_text("")
    (machine / "etc/services").unlink()
    store.resolve("host")
    home = _note_sandbox(state, "busy", old.digest)
    store.prune()
    assert old.layers[0].is_dir()
    (home / "sandbox.json").unlink()
    store.prune()
    assert not old.layers[0].exists()
    assert store.resolve("host").layers[0].is_dir()


def test_sandboxes_of_a_service_that_borrows_the_store_count(
    store: ImageStore, state: Path, tmp_path: Path, machine: Path, add: Import
) -> None:
    record = add(docker_archive(tar(file("a"))), "app")
    borrower = tmp_path / "borrower"
    borrower.mkdir()
    (borrower / "images").symlink_to(state / "images")
    ImageStore(borrower / "images", machine=machine).resolve("app")
    home = _note_sandbox(borrower, "borrowed", record.digest)
    with pytest.raises(Conflict, match="borrowed"):
        store.remove("app")
    (home / "sandbox.json").unlink()
    home.rmdir()
    store.remove("app")


# -- access, threads, crashes ------------------------------------------------------------------------------


def test_nobody_else_may_look_into_the_store(store: ImageStore, state: Path) -> None:
    store.list()
    assert stat.S_IMODE((state / "images").stat().st_mode) == 0o700


def test_a_store_that_cannot_be_made_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RuntimeRefused, match="another state directory"):
        ImageStore(tmp_path / "file/images").list()


def test_a_full_disk_is_told_as_such_and_leaves_nothing(tmp_path: Path, machine: Path) -> None:
    if not overlay.works():
        pytest.skip("only root can mount a small file system")
    small = tmp_path / "small"
    small.mkdir()
    archive = tmp_path / "image.tar"
    archive.write_bytes(docker_archive(tar(file("a", os.urandom(4 << 20)))))
    script = (
        "import subprocess, sys\nfrom pathlib import Path\n"
        "from orchard.env.images import ImageStore\nfrom orchard.env.errors import DiskFull\n"
        "small, archive = map(Path, sys.argv[1:])\n"
        "subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=2m', 'none', small], check=True)\n"
        "store = ImageStore(small / 'images')\n"
        "try:\n    store.import_archive(archive, 'big')\n"
        "except DiskFull:\n    print(sorted(p.name for p in (small / 'images/layers').iterdir()), "
        "sorted(p.name for p in (small / 'images/scratch').iterdir()))\n"
    )
    command = ["unshare", "-m", sys.executable, "-c", script, str(small), str(archive)]
    assert subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout == b"[] []\n"


def test_an_answer_from_the_cache_follows_changes_by_other_processes(
    store: ImageStore, state: Path, machine: Path, add: Import
) -> None:
    add(docker_archive(tar(file("a", "1"))), "app")
    other = ImageStore(state / "images", machine=machine)
    first = other.resolve("app")
    assert other.resolve("app") is first
    new = add(docker_archive(tar(file("a", "2"))), "app")
    assert other.resolve("app").digest == new.digest
    store.remove("app")
    with pytest.raises(ImageNotFound):
        other.resolve("app")


def test_many_threads_import_the_same_and_other_images(
    store: ImageStore, state: Path, tmp_path: Path
) -> None:
    for number in range(4):
        (tmp_path / f"{number}.tar").write_bytes(docker_archive(tar(file("a", str(number)))))
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            store.import_archive(tmp_path / f"{number % 4}.tar", f"image:{number}")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(_layers(state)) == 4
    assert len(store.list()) == 13
    assert list((state / "images/scratch").iterdir()) == []


def test_a_failed_import_leaves_nothing(store: ImageStore, state: Path, add: Import) -> None:
    with pytest.raises(ImageInvalid):
        add(docker_archive(tar(file("a"), file("b/../../c"))), "bad")
    assert _layers(state) == set()
    assert list((state / "images/scratch").iterdir()) == []
    with pytest.raises(ImageNotFound):
        store.resolve("bad")


_KILLED_IMPORT = """
import os, sys
from pathlib import Path
from orchard.env.images import ImageStore
def stop(line):
    print(line, flush=True)
    sys.stdin.read()
ImageStore(Path(sys.argv[1])).import_archive(Path(sys.argv[2]), "killed", progress=stop)
"""


def test_a_killed_import_is_cleared_by_the_next_use_but_a_live_one_is_not(
    store: ImageStore, state: Path, tmp_path: Path, machine: Path
) -> None:
    archive = tmp_path / "big.tar"
    archive.write_bytes(docker_archive(tar(directory("d"), file("d/a", "x" * 5000))))
    process = subprocess.Popen(
        [sys.executable, "-c", _KILLED_IMPORT, str(state / "images"), str(archive)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert b"layer 1" in process.stdout.readline()
    scratch = state / "images/scratch"
    assert store.prune() == 0
    assert any(path.is_dir() for path in scratch.iterdir())
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.communicate()
    assert any(path.is_dir() for path in scratch.iterdir())
    ImageStore(state / "images", machine=machine).list()
    assert list(scratch.iterdir()) == []
    assert _layers(state) == set()


def test_a_missing_archive_is_named(store: ImageStore, tmp_path: Path) -> None:
    with pytest.raises(FileMissing, match="nowhere"):
        store.import_archive(tmp_path / "nowhere.tar")


def test_a_fifo_is_no_archive_and_does_not_block(store: ImageStore, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(InvalidRequest, match="neither a file nor a directory"):
        store.import_archive(tmp_path / "fifo")


def test_limits_end_an_import(state: Path, tmp_path: Path, machine: Path) -> None:
    cases: list[tuple[ImportLimits, bytes, str]] = [
        (ImportLimits(entries=3), docker_archive(tar(*(file(str(n)) for n in range(5)))), "entries"),
        (
            ImportLimits(directories=3),
            docker_archive(tar(*(file(f"{n}/x") for n in range(5)))),
            "directories",
        ),
        (ImportLimits(unpacked_bytes=20_000), docker_archive(tar(file("a", "x" * 60_000))), "bytes"),
    ]
    for number, (limits, archive, word) in enumerate(cases):
        path = tmp_path / f"{number}.tar"
        path.write_bytes(archive)
        with pytest.raises(TooLarge, match=word):
            ImageStore(state / "images", limits=limits, machine=machine).import_archive(path, "x")


def test_removing_a_tree_never_leaves_it(store: ImageStore, state: Path, tmp_path: Path, add: Import) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/file").write_text("keep")
    add(docker_archive(tar(symlink("link", str(tmp_path / "precious")), directory("shut", 0o000))), "app")
    store.remove("app")
    assert (tmp_path / "precious/file").read_text() == "keep"
