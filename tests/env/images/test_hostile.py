"""Archives that try to get out, to read the machine, or to exhaust it."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orchard.env.errors import ImageInvalid, OrchardError, TooLarge
from orchard.env.images import ImageStore
from tests.env.images.archives import (
    Item,
    directory,
    docker_archive,
    file,
    hardlink,
    opaque,
    symlink,
    tar,
    tree,
    whiteout,
)
from tests.env.images.conftest import Import

Files = Callable[[str], Path]


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    """A directory next to the store that must stay as it is."""
    path = tmp_path / "outside"
    (path / "sub").mkdir(parents=True)
    (path / "secret").write_text("secret")
    before = tree(path), path.stat().st_mtime_ns
    yield path
    assert (tree(path), path.stat().st_mtime_ns) == before


def _up(target: Path) -> str:
    return "../" * 40 + str(target).lstrip("/")


#: Each gets the path of the directory outside and gives the layers.
ESCAPES: dict[str, Callable[[Path], list[bytes]]] = {
    "dots": lambda out: [tar(file(f"{_up(out)}/new"))],
    "dots inside": lambda out: [tar(file(f"a/../{_up(out)}/new"))],
    "dots directory": lambda out: [tar(directory(f"{_up(out)}/new"))],
    "dots link": lambda out: [tar(symlink(f"{_up(out)}/new", "x"))],
    "dots whiteout": lambda out: [tar(whiteout(f"{_up(out)}/secret"))],
    "absolute": lambda out: [tar(file(f"{out}/new"))],
    "double slash": lambda out: [tar(file(f"//{out}/new"))],
    "link then file": lambda out: [tar(symlink("l", str(out)), file("l/new"))],
    "relative link then file": lambda out: [tar(symlink("l", _up(out)), file("l/new"))],
    "link then file over it": lambda out: [tar(symlink("l", f"{out}/secret"), file("l", "overwritten"))],
    "link then directory over it": lambda out: [tar(symlink("l", str(out)), directory("l", 0o000))],
    "link then link": lambda out: [tar(symlink("l", str(out)), symlink("l/new", "x"))],
    "link chain": lambda out: [
        tar(symlink("a", "b"), symlink("b", "c/d"), symlink("c", str(out)), file("a/new"))
    ],
    "link of an earlier layer": lambda out: [tar(symlink("l", str(out))), tar(file("l/new"))],
    "link of an earlier layer, whiteout": lambda out: [
        tar(symlink("l", str(out))),
        tar(whiteout("l/secret")),
    ],
    "link of an earlier layer, opaque": lambda out: [tar(symlink("l", str(out))), tar(opaque("l"))],
    "nested link": lambda out: [tar(directory("d"), symlink("d/l", _up(out)), file("d/l/sub/new"))],
    "directory replaced by link": lambda out: [
        tar(directory("d"), file("d/x"), symlink("d", str(out)), file("d/new"))
    ],
    "directory replaced by link, times": lambda out: [
        tar(directory("sub", mtime=1), directory("sub/y", mtime=1), symlink("sub", str(out)))
    ],
    "hard link out": lambda out: [tar(hardlink("h", f"{out}/secret"))],
    "hard link dots": lambda out: [tar(hardlink("h", f"{_up(out)}/secret"))],
    "hard link through link": lambda out: [tar(symlink("l", str(out)), hardlink("h", "l/secret"))],
    "hard link to link, written through": lambda out: [
        tar(symlink("l", f"{out}/secret"), hardlink("h", "l"), file("h", "overwritten"))
    ],
    "hard link to directory": lambda out: [tar(directory("d"), hardlink("h", "d"))],
    "hard link to root": lambda out: [tar(hardlink("h", "/"))],
    "whiteout of dot": lambda out: [tar(file("d/x")), tar(file("d/.wh.."))],
    "whiteout of dots": lambda out: [tar(file("d/x")), tar(file("d/.wh..."))],
    "whiteout of nothing": lambda out: [tar(file(".wh."))],
    "whiteout as link": lambda out: [tar(symlink(".wh.x", str(out)), file(".wh.x/new"))],
    "opaque as link": lambda out: [tar(symlink("d/.wh..wh..opq", str(out)))],
    "device": lambda out: [tar(Item("null", kind=tarfile.BLKTYPE, device=(8, 0)))],
    "whiteout device": lambda out: [tar(Item("x", kind=tarfile.CHRTYPE, device=(0, 0)))],
    "fifo then file": lambda out: [tar(Item("p", kind=tarfile.FIFOTYPE), file("p", "x"))],
    "fifo as parent": lambda out: [tar(Item("p", kind=tarfile.FIFOTYPE), file("p/x", "x"))],
    "file as parent": lambda out: [tar(file("f"), file("f/x"))],
    "link loop": lambda out: [tar(symlink("a", "b"), symlink("b", "a"), file("a/x"))],
    "link to itself": lambda out: [tar(symlink("a", "a/a/a/a"), file("a/x"))],
    "root as link": lambda out: [tar(symlink(".", str(out)), file("new"))],
    "root as file": lambda out: [tar(file("/", "x"))],
    "proc link": lambda out: [tar(symlink("l", f"/proc/self/root{out}"), file("l/new"))],
    "long name": lambda out: [tar(file("x" * 300))],
    "long path": lambda out: [tar(file("/".join(["x" * 200] * 30)))],
    "deep path": lambda out: [tar(file("/".join("x" * 1500)))],
    "huge owner": lambda out: [tar(file("x", pax={"uid": str(1 << 70)}))],
    "negative owner": lambda out: [tar(file("x", pax={"uid": "-1"}))],
    "nul in name": lambda out: [tar(file("x", pax={"path": "a\0b"}))],
    "absurd time": lambda out: [tar(file("x", pax={"mtime": "9" * 400}))],
    "no time": lambda out: [tar(file("x", pax={"mtime": "nan"}))],
    "negative size": lambda out: [tar(file("x", b"data", pax={"size": "-512"}))],
    "empty link": lambda out: [tar(symlink("l", ""))],
    "empty name": lambda out: [tar(file("", "x"))],
}


@pytest.mark.parametrize("name", ESCAPES)
@pytest.mark.parametrize("base", [None, "host"])
def test_nothing_outside_is_written_or_read(
    name: str, base: str | None, outside: Path, state: Path, store: ImageStore, add: Import
) -> None:
    """Either the archive is refused with a typed error, or its names are taken relative to the image."""
    if base is not None and os.geteuid() != 0:
        pytest.skip("whiteouts need root here")
    try:
        add(docker_archive(*ESCAPES[name](outside)), "hostile", base=base)
    except (ImageInvalid, TooLarge):
        return
    layer = store.resolve("hostile").layers[0]
    content = [value[2] for value in tree(layer).values()]
    assert b"secret" not in content
    assert all(path.is_relative_to(state) for path in layer.rglob("*"))


def test_a_file_written_through_a_planted_link_lands_inside(add: Import, files: Files, outside: Path) -> None:
    add(docker_archive(tar(symlink("l", str(outside)), file("l/new", "1"))), "inside")
    root = files("inside")
    assert (root / str(outside).lstrip("/") / "new").read_text() == "1"
    assert (root / "l").is_symlink()


def test_a_hard_link_to_a_planted_link_is_that_link(add: Import, files: Files, outside: Path) -> None:
    add(docker_archive(tar(symlink("l", f"{outside}/secret"), hardlink("h", "l"))), "linked")
    assert (files("linked") / "h").is_symlink()


# -- damage ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [0, 1, 100, 511, 512, 513, 1000, 1024, 1500, 2047])
def test_a_truncated_rootfs_tar_is_an_error(add: Import, keep: int) -> None:
    whole = tar(file("a", "x" * 600), file("b"), end=False)
    with pytest.raises(ImageInvalid):
        add(whole[:keep], "cut")


def test_an_archive_without_its_end_marker_is_called_truncated(add: Import) -> None:
    with pytest.raises(ImageInvalid, match="truncated"):
        add(tar(file("a", "x"), end=False), "cut")


def test_a_layer_may_lack_the_end_marker_as_its_digest_vouches_for_it(add: Import, files: Files) -> None:
    add(docker_archive(tar(file("a", "x"), end=False)), "unmarked")
    assert (files("unmarked") / "a").read_text() == "x"


def test_a_damaged_header_in_the_middle_is_not_taken_for_the_end(add: Import) -> None:
    data = bytearray(tar(file("a", "x" * 512), file("b"), file("c")))
    data[1024 + 150] ^= 0xFF  # the checksum of b's header
    with pytest.raises(ImageInvalid, match="damaged"):
        add(bytes(data), "broken")


@pytest.mark.parametrize("cut", [10, 100, 2000])
def test_a_truncated_compressed_archive_is_an_error(add: Import, cut: int) -> None:
    packed = gzip.compress(docker_archive(tar(file("a", os.urandom(5000)))))
    with pytest.raises(ImageInvalid, match="truncated"):
        add(packed[:-cut], "cut")


@pytest.mark.parametrize(
    "data", [b"", b"hello", b"\0" * 100, bytes(range(256)) * 16, b"\x1f\x8b" + b"x" * 100, b"BZh9xx"]
)
def test_what_is_no_archive_is_an_error(add: Import, data: bytes) -> None:
    with pytest.raises(ImageInvalid):
        add(data, "noise")


def test_flipped_bits_never_give_anything_but_a_typed_error(add: Import) -> None:
    whole = docker_archive(
        tar(directory("d"), file("d/a", "x" * 300), symlink("l", "d")), tar(whiteout("d/a"))
    )
    for position in range(0, len(whole), 97):
        data = bytearray(whole)
        data[position] ^= 0x41
        try:
            add(bytes(data), "flipped")
        except OrchardError as error:
            assert not error.infra, error.detail


# -- exhaustion ------------------------------------------------------------------------------------------------


def _claiming(kind: bytes, size: int) -> bytes:
    """A tar header that claims more than there is."""
    info = tarfile.TarInfo("x")
    info.type, info.size = kind, size
    return info.tobuf(tarfile.GNU_FORMAT)


@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.XGLTYPE])
def test_a_gigantic_header_does_not_become_memory(add: Import, kind: bytes) -> None:
    layer = _claiming(kind, 1 << 30) + b"\0" * (3 << 20)
    with pytest.raises(ImageInvalid):
        add(layer, "header")


def test_a_file_that_claims_petabytes_is_refused_before_a_byte_is_written(add: Import) -> None:
    with pytest.raises((TooLarge, ImageInvalid)):
        add(_claiming(tarfile.REGTYPE, 1 << 50) + b"\0" * 2048, "claim")


def test_endless_headers_of_headers_end(add: Import) -> None:
    longname = _claiming(tarfile.GNUTYPE_LONGNAME, 512) + b"a" * 512
    with pytest.raises(ImageInvalid):
        add(longname * 5000 + b"\0" * 1024, "chain")


def test_memory_does_not_grow_with_the_size_of_an_archive(add: Import, tmp_path: Path) -> None:
    big = tmp_path / "big"
    with open(big, "wb") as handle:
        handle.truncate(64 << 20)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as archive:
        archive.add(big, "big")
    packed = buffer.getvalue()
    tracemalloc.start()
    try:
        add(packed, "big")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16 << 20
