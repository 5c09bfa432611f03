"""Importing what `docker save` writes."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import stat
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from orchard.env.errors import ImageInvalid, InvalidRequest
from orchard.env.images import ImageStore
from orchard.env.images.documents import machine_architecture
from tests.env.images.archives import (
    Item,
    config,
    digest,
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
BUSYBOX = Path("/bin/busybox")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root keeps owners and file capabilities")


def test_the_name_comes_from_the_archive_and_the_image_resolves(store: ImageStore, add: Import) -> None:
    record = add(
        docker_archive(
            tar(file("a", "1")), tags=["team/app:2.0"], Env=["K=v=w", "E="], WorkingDir="/w", User="u"
        )
    )
    image = store.resolve("team/app:2.0")
    assert record.name == "team/app:2.0"
    assert record.kind == "docker"
    assert record.architecture == machine_architecture()
    assert (image.env, image.working_dir, image.user) == ({"K": "v=w", "E": ""}, "/w", "u")
    assert (image.layers[0] / "a").read_text() == "1"


def test_a_name_without_tag_means_latest(store: ImageStore, add: Import) -> None:
    add(docker_archive(tar(file("a"))), "mine")
    assert store.resolve("mine").digest == store.resolve("mine:latest").digest


def test_the_digest_is_the_image_id_that_docker_shows(store: ImageStore, add: Import) -> None:
    layer = tar(file("a"))
    record = add(docker_archive(layer))
    assert record.digest == digest(config([layer]))
    assert store.resolve(record.digest[:20]).digest == record.digest


def test_every_tag_of_the_image_becomes_a_name(store: ImageStore, add: Import) -> None:
    add(docker_archive(tar(file("a")), tags=["one:1", "two:2"]))
    assert store.resolve("one:1").digest == store.resolve("two:2").digest


def test_an_archive_without_tags_is_named_after_its_file(add: Import) -> None:
    assert (
        add(docker_archive(tar(file("a")), tags=[]), file_name="My Tool-1.2.tar").name == "my-tool-1.2:latest"
    )


def test_later_layers_replace_hide_and_add(add: Import, files: Files) -> None:
    add(
        docker_archive(
            tar(
                directory("d"),
                file("d/kept", "1"),
                file("d/gone", "1"),
                file("changed", "1"),
                directory("e"),
                file("e/x"),
            ),
            tar(whiteout("d/gone"), file("changed", "2"), file("new", "3"), whiteout("e")),
        ),
        "layers",
    )
    assert set(tree(files("layers"))) == {"d", "d/kept", "changed", "new"}
    assert (files("layers") / "changed").read_text() == "2"


def test_an_opaque_mark_hides_lower_layers_only_wherever_it_stands(add: Import, files: Files) -> None:
    lower = tar(directory("d"), file("d/old"), directory("d/sub"), file("d/sub/old"))
    for number, upper in enumerate(
        (
            tar(opaque("d"), file("d/new"), file("d/sub/new")),
            tar(file("d/new"), file("d/sub/new"), opaque("d")),
        )
    ):
        add(docker_archive(lower, upper), f"opaque:{number}")
        assert set(tree(files(f"opaque:{number}"))) == {"d", "d/new", "d/sub", "d/sub/new"}


def test_a_whiteout_does_not_hide_what_its_own_layer_has(add: Import, files: Files) -> None:
    lower = tar(file("a", "old"), directory("d"), file("d/old"))
    add(
        docker_archive(
            lower, tar(file("a", "new"), whiteout("a"), directory("d"), file("d/new"), whiteout("d"))
        ),
        "own",
    )
    assert set(tree(files("own"))) == {"a", "d", "d/new"}
    assert (files("own") / "a").read_text() == "new"


def test_types_may_change_between_layers(add: Import, files: Files) -> None:
    add(
        docker_archive(
            tar(file("a"), directory("b"), file("b/x"), symlink("c", "b"), directory("d"), file("d/x")),
            tar(
                directory("a"), file("a/y"), file("b", "file"), directory("c"), file("c/z"), symlink("d", "a")
            ),
        ),
        "types",
    )
    root = files("types")
    assert set(tree(root)) == {"a", "a/y", "b", "c", "c/z", "d"}
    assert (root / "d").readlink() == Path("a")


def test_files_under_a_linked_directory_land_behind_the_link(add: Import, files: Files) -> None:
    """As on merged-/usr images, whose later layers may still say `lib/x`."""
    add(
        docker_archive(tar(directory("usr/lib"), symlink("lib", "/usr/lib")), tar(file("lib/x", "1"))),
        "merged",
    )
    assert (files("merged") / "usr/lib/x").read_text() == "1"
    assert (files("merged") / "lib").is_symlink()


@pytest.mark.parametrize(
    "target", ["/usr/lib", "../usr/lib", "../../../usr/lib", "/../usr/./lib/", "../usr/bin/../lib"]
)
def test_links_are_followed_from_where_they_stand_with_the_image_as_ceiling(
    add: Import, files: Files, target: str
) -> None:
    add(
        docker_archive(
            tar(directory("usr/lib"), directory("usr/bin"), symlink("d/l", target), file("d/l/x"))
        ),
        "linked",
    )
    assert {path for path in tree(files("linked")) if path.endswith("x")} == {"usr/lib/x"}


def test_modes_links_fifos_and_times_are_kept(add: Import, files: Files) -> None:
    add(
        docker_archive(
            tar(
                directory("d", 0o1777, mtime=1_600_000_000),
                file("d/suid", "x", 0o4755),
                file("d/none", "x", 0o000),
                hardlink("d/same", "d/suid"),
                symlink("d/link", "/absolute/../target"),
                Item("d/fifo", kind=tarfile.FIFOTYPE, mode=0o622),
                file("d/fine", mtime=1_700_000_000.25, pax={"mtime": "1700000000.123456789"}),
            )
        ),
        "kinds",
    )
    d = files("kinds") / "d"
    assert stat.S_IMODE(d.stat().st_mode) == 0o1777
    assert d.stat().st_mtime == 1_600_000_000
    assert stat.S_IMODE((d / "suid").stat().st_mode) == 0o4755
    assert stat.S_IMODE((d / "none").stat().st_mode) == 0
    assert (d / "same").stat().st_ino == (d / "suid").stat().st_ino
    assert (d / "link").readlink() == Path("/absolute/../target")
    assert stat.S_ISFIFO((d / "fifo").stat().st_mode)
    assert stat.S_IMODE((d / "fifo").stat().st_mode) == 0o622
    assert (d / "fine").stat().st_mtime_ns == 1_700_000_000_123_456_789


@as_root
def test_owners_and_file_capabilities_are_kept(add: Import, files: Files) -> None:
    capability = b"\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"
    text = capability.decode("utf-8", "surrogateescape")
    record = add(
        docker_archive(
            tar(
                file("ping", "x", 0o755, uid=12, gid=34, pax={"SCHILY.xattr.security.capability": text}),
                file("odd", uid=100_000, pax={"SCHILY.xattr.trusted.overlay.redirect": "/etc"}),
                Item("link", kind=tarfile.SYMTYPE, link="x", uid=7, gid=8),
            )
        ),
        "owned",
    )
    root = files("owned")
    info = (root / "ping").stat()
    assert (info.st_uid, info.st_gid) == (12, 34)
    assert os.getxattr(root / "ping", "security.capability") == capability
    assert os.listxattr(root / "odd") == []
    assert ((root / "link").lstat().st_uid, (root / "link").lstat().st_gid) == (7, 8)
    assert "1 extended attributes left out" in record.notes
    assert any("owners above 65535" in note for note in record.notes)


def test_device_nodes_are_left_out_with_a_note(add: Import, files: Files) -> None:
    record = add(docker_archive(tar(Item("dev/null", kind=tarfile.CHRTYPE), file("a"))), "devices")
    assert set(tree(files("devices"))) == {"a"}
    assert "1 device nodes left out" in record.notes


def test_names_that_are_not_utf8_survive(add: Import, files: Files) -> None:
    name = b"caf\xe9\xff".decode("utf-8", "surrogateescape")
    buffer = tar(file("plain"))
    # Written in the old GNU way: bytes as they are.
    stream = io.BytesIO()
    with tarfile.open(
        fileobj=stream, mode="w", format=tarfile.GNU_FORMAT, encoding="utf-8", errors="surrogateescape"
    ) as archive:
        archive.addfile(tarfile.TarInfo(name))
    add(docker_archive(buffer, stream.getvalue()), "bytes")
    assert {os.fsencode(path.name) for path in files("bytes").iterdir()} == {b"plain", b"caf\xe9\xff"}


def test_sparse_files_keep_their_holes_and_content(add: Import, files: Files, tmp_path: Path) -> None:
    source = tmp_path / "sparse"
    with open(source, "wb") as handle:
        handle.seek(8 << 20)
        handle.write(b"middle")
        handle.truncate(16 << 20)
    for number, options in enumerate((["--format=gnu"], ["--format=pax"])):
        layer = tmp_path / f"layer{number}.tar"
        subprocess.run(["tar", "-S", *options, "-cf", layer, "-C", tmp_path, "sparse"], check=True)
        add(docker_archive(layer.read_bytes()), f"sparse:{number}")
        result = files(f"sparse:{number}") / "sparse"
        assert result.read_bytes() == source.read_bytes()
        assert result.stat().st_blocks * 512 < 1 << 20


@pytest.mark.parametrize(
    "compress", [gzip.compress, bz2.compress, lzma.compress], ids=["gzip", "bzip2", "xz"]
)
def test_the_whole_archive_may_be_compressed(
    add: Import, files: Files, compress: Callable[[bytes], bytes]
) -> None:
    add(compress(docker_archive(tar(file("a", "x" * 100_000)))), "packed", file_name="packed.tar.z")
    assert (files("packed") / "a").stat().st_size == 100_000


def test_zstandard_works_or_says_what_is_missing(add: Import, files: Files, tmp_path: Path) -> None:
    plain = tmp_path / "plain.tar"
    plain.write_bytes(docker_archive(tar(file("a", "1"))))
    try:
        packed = subprocess.run(["zstd", "-qc", plain], check=True, capture_output=True).stdout
    except FileNotFoundError:
        pytest.skip("there is no zstd here to make such an archive")
    try:
        import zstandard  # type: ignore[import-not-found, unused-ignore]  # noqa: F401
    except ImportError:
        with pytest.raises(ImageInvalid, match="pip install zstandard"):
            add(packed, "zstd")
    else:
        add(packed, "zstd")
        assert (files("zstd") / "a").read_text() == "1"


def test_a_layer_stored_as_a_link_to_another_is_found(add: Import, files: Files) -> None:
    """As older versions of docker write a layer that occurs twice."""
    first, second = tar(file("a", "1")), tar(file("b", "1"))
    text = config([first, second, first])
    manifest = [
        {"Config": "c.json", "RepoTags": ["twice:1"], "Layers": ["x/layer.tar", "y/layer.tar", "z/layer.tar"]}
    ]
    add(
        tar(
            file("x/layer.tar", first),
            file("y/layer.tar", second),
            symlink("z/layer.tar", "../x/layer.tar"),
            file("c.json", text),
            file("manifest.json", json.dumps(manifest)),
        )
    )
    assert set(tree(files("twice:1"))) == {"a", "b"}


def test_several_images_need_a_choice_and_the_error_lists_them(store: ImageStore, add: Import) -> None:
    layers = {"one:1": tar(file("a", "1")), "two:1": tar(file("a", "2"))}
    texts = {name: config([layer]) for name, layer in layers.items()}
    manifest = [
        {"Config": f"{name[:3]}.json", "RepoTags": [name], "Layers": [f"{name[:3]}/layer.tar"]}
        for name in layers
    ]
    archive = tar(
        *(file(f"{name[:3]}/layer.tar", layer) for name, layer in layers.items()),
        *(file(f"{name[:3]}.json", text) for name, text in texts.items()),
        file("manifest.json", json.dumps(manifest)),
    )
    with pytest.raises(InvalidRequest, match="one:1, two:1"):
        add(archive)
    with pytest.raises(InvalidRequest, match="several images"):
        add(archive, "other")
    add(archive, "two:1")
    assert (store.resolve("two:1").layers[0] / "a").read_text() == "2"


def test_an_image_for_another_machine_is_refused_with_what_there_is(add: Import) -> None:
    with pytest.raises(ImageInvalid, match="linux/vax"):
        add(docker_archive(tar(file("a")), architecture="vax"))


def test_the_same_image_twice_is_stored_once(store: ImageStore, state: Path, add: Import) -> None:
    archive = docker_archive(tar(file("a", "1")))
    first, again = add(archive, "first"), add(archive, "again")
    assert first.digest == again.digest
    assert len(list((state / "images" / "layers").iterdir())) == 1
    assert [record.name for record in store.list()] == ["host", "again:latest", "first:latest"]


def test_progress_names_the_layers(add: Import) -> None:
    lines: list[str] = []
    add(docker_archive(tar(file("a")), tar(file("b"))), "steps", progress=lines.append)
    assert [line.split(" (")[0] for line in lines] == ["unpacking layer 1 of 2", "unpacking layer 2 of 2"]


@pytest.mark.skipif(not BUSYBOX.exists(), reason="needs /bin/busybox (Debian: busybox-static)")
def test_a_busybox_image_runs(add: Import, files: Files) -> None:
    applets = ("sh", "ls", "cat", "echo", "grep")
    base = tar(
        directory("bin"),
        file("bin/busybox", BUSYBOX.read_bytes(), 0o755),
        *(hardlink(f"bin/{name}", "bin/busybox") for name in applets),
        directory("etc"),
        file("etc/passwd", "root:x:0:0::/root:/bin/sh\n"),
        *(directory(name) for name in ("proc", "sys", "dev", "root")),
        directory("tmp", 0o1777),
    )
    record = add(docker_archive(base, tar(file("etc/motd", "hello\n")), Env=["PATH=/bin"]), "busybox:made")
    root = files("busybox:made")
    assert record.size_bytes < 2 * BUSYBOX.stat().st_size
    if os.geteuid() != 0:
        pytest.skip("chroot needs root")
    command = ["chroot", root, "/bin/sh", "-c", "cat /etc/motd; ls / | grep tmp"]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "hello\ntmp\n"
