"""Images stacked on others, seen through a real overlay."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from orchard.env.errors import ImageInvalid, ImageNotFound, InvalidRequest
from orchard.env.images import ImageStore, importer
from tests.env.images import overlay
from tests.env.images.archives import (
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

pytestmark = pytest.mark.skipif(
    not overlay.works(), reason="only root can mount the overlay that these look through"
)


@pytest.fixture
def below(add: Import) -> None:
    """An image `below` to stack on."""
    add(
        docker_archive(
            tar(
                directory("d", 0o750, uid=5),
                file("d/one", "1", 0o4711),
                file("d/two", "2"),
                directory("d/sub"),
                file("d/sub/x", "x"),
                directory("usr/lib"),
                symlink("lib", "usr/lib"),
                file("usr/lib/libc", "c"),
                file("plain", "p"),
            ),
            Env=["PATH=/bin", "A=below"],
            WorkingDir="/d",
            User="me",
        ),
        "below",
    )


def test_files_are_added_and_replaced_and_the_rest_shows_through(
    store: ImageStore, add: Import, below: None
) -> None:
    record = add(docker_archive(tar(file("d/two", "changed"), file("d/new", "n"))), "top", base="below")
    seen = overlay.shown(store.resolve("top"))
    assert seen["d/two"][2] == b"changed"
    assert seen["d/one"][1:] == (0o4711, b"1")
    assert {"d/new", "d/sub/x", "plain", "lib"} <= set(seen)
    assert (record.base, record.size_bytes) == ("below", 8)


def test_a_directory_made_on_the_way_looks_like_the_bases(
    store: ImageStore, add: Import, below: None
) -> None:
    add(docker_archive(tar(file("d/new"))), "top", base="below")
    layer, lower = store.resolve("top").layers
    mine, its = (layer / "d").stat(), (lower / "d").stat()
    assert (mine.st_mode, mine.st_uid, mine.st_mtime_ns) == (its.st_mode, 5, its.st_mtime_ns)


def test_whiteouts_and_opaque_marks_hide_the_bases_files(store: ImageStore, add: Import, below: None) -> None:
    add(
        docker_archive(tar(whiteout("plain"), whiteout("d/one"), opaque("d/sub"), file("d/sub/y"))),
        "top",
        base="below",
    )
    seen = set(overlay.shown(store.resolve("top")))
    assert {"d", "d/two", "d/sub", "d/sub/y"} <= seen
    assert not seen & {"plain", "d/one", "d/sub/x"}


def test_a_whiteout_of_what_the_base_does_not_have_leaves_no_trace(
    store: ImageStore, add: Import, below: None
) -> None:
    add(docker_archive(tar(whiteout("never"), whiteout("no/such/dir"), file("a"))), "top", base="below")
    assert set(tree(store.resolve("top").layers[0])) == {"a"}


def test_a_directory_that_comes_back_does_not_bring_the_bases_content(
    store: ImageStore, add: Import, below: None
) -> None:
    for number, layers in enumerate(
        (
            (tar(whiteout("d")), tar(directory("d"), file("d/fresh"))),
            (tar(whiteout("d")), tar(file("d/fresh"))),
            (tar(file("d", "a file for a while")), tar(directory("d"), file("d/fresh"))),
        )
    ):
        add(docker_archive(*layers), f"top:{number}", base="below")
        seen = overlay.shown(store.resolve(f"top:{number}"))
        assert {path for path in seen if path.startswith("d/")} == {"d/fresh"}


def test_names_go_through_the_bases_links(store: ImageStore, add: Import, below: None) -> None:
    add(docker_archive(tar(file("lib/new", "n"))), "top", base="below")
    seen = overlay.shown(store.resolve("top"))
    assert {"usr/lib/new", "usr/lib/libc"} <= set(seen)
    assert stat.S_ISLNK(seen["lib"][0])


def test_a_plain_tar_with_a_directory_where_the_base_has_a_link_keeps_the_link(
    store: ImageStore, add: Import, below: None
) -> None:
    record = add(tar(directory("."), directory("lib"), file("lib/new")), "top", base="below")
    assert record.kind == "rootfs"
    assert {"lib", "usr/lib/new", "usr/lib/libc"} <= set(overlay.shown(store.resolve("top")))


def test_a_hard_link_to_a_file_of_the_base_brings_it_along(
    store: ImageStore, add: Import, below: None
) -> None:
    add(docker_archive(tar(hardlink("again", "d/one"))), "top", base="below")
    layer = store.resolve("top").layers[0]
    assert (layer / "again").stat().st_ino == (layer / "d/one").stat().st_ino
    assert stat.S_IMODE((layer / "again").stat().st_mode) == 0o4711
    assert (layer / "again").read_text() == "1"


def test_environment_directory_and_user_are_inherited_and_overridden(
    store: ImageStore, add: Import, below: None
) -> None:
    add(docker_archive(tar(file("a")), Env=["A=top", "B=2"], User="you"), "top", base="below")
    image = store.resolve("top")
    assert image.env == {"PATH": "/bin", "A": "top", "B": "2"}
    assert (image.working_dir, image.user) == ("/d", "you")


def test_stacks_may_be_stacked_and_outlive_the_names_below(
    store: ImageStore, add: Import, below: None
) -> None:
    add(docker_archive(tar(file("middle"))), "middle", base="below")
    add(docker_archive(tar(file("top"), whiteout("plain"))), "top", base="middle")
    store.remove("middle")
    store.remove("below")
    store.prune()
    seen = set(overlay.shown(store.resolve("top")))
    assert {"middle", "top", "d/one"} <= seen
    assert "plain" not in seen


def test_over_host_files_below_usr_join_the_machines_own(
    store: ImageStore, add: Import, machine: Path
) -> None:
    add(
        tar(file("usr/local/lib/dep.py", "1"), file("usr/bin/tool", "mine"), file("opt/x"), file("bin/y")),
        "deps",
        base="host",
    )
    image = store.resolve("deps")
    (usr,) = image.mounts
    assert usr.layers[-1] == machine / "usr"
    seen = overlay.shown(image)
    assert {"usr/local/lib/dep.py", "usr/lib/libx.so", "opt/x", "usr/bin/y", "etc/passwd"} <= set(seen)
    assert seen["usr/bin/tool"][2] == b"mine"
    assert not set(seen) & {
        "usr/bin/admin-only",
        "usr/share/private",
        "usr/local/etc/service.conf",
        "etc/shadow",
    }


def test_over_host_whiteouts_below_usr_hide_the_machines_files(store: ImageStore, add: Import) -> None:
    add(tar(whiteout("usr/bin/tool"), opaque("usr/share/doc")), "less", base="host")
    seen = set(overlay.shown(store.resolve("less")))
    assert not seen & {"usr/bin/tool", "usr/share/doc/readme"}
    assert "usr/lib/libx.so" in seen


def test_hidden_files_of_the_machine_cannot_be_linked_out(store: ImageStore, add: Import) -> None:
    for hidden in ("usr/bin/admin-only", "usr/share/private/key", "usr/local/etc/service.conf", "etc/shadow"):
        with pytest.raises(ImageInvalid, match="hard link"):
            add(tar(hardlink("stolen", hidden)), "thief", base="host")


def test_an_image_over_host_follows_the_machine(store: ImageStore, add: Import, machine: Path) -> None:
    add(tar(file("opt/x")), "deps", base="host")
    before = store.resolve("deps")
    assert store.resolve("deps") is before
    (machine / "etc/services").unlink()
    after = store.resolve("deps")
    assert after.layers[0] == before.layers[0]
    assert after.layers[1] != before.layers[1]


@pytest.mark.parametrize(
    "item", [whiteout("usr"), opaque("usr"), symlink("usr", "/tmp"), file("usr"), opaque("")],
    ids=["whiteout", "opaque", "link", "file", "all"],
)  # fmt: skip
def test_a_tree_of_the_machine_cannot_be_replaced(add: Import, item: object) -> None:
    with pytest.raises(ImageInvalid, match="base"):
        add(tar(item), "bad", base="host")  # type: ignore[arg-type]


def test_a_directory_serves_as_base(store: ImageStore, add: Import, tmp_path: Path) -> None:
    (tmp_path / "rootfs/etc").mkdir(parents=True)
    (tmp_path / "rootfs/etc/a").write_text("a")
    add(tar(file("etc/b")), "top", base=f"dir:{tmp_path}/rootfs")
    assert {"etc/a", "etc/b"} <= set(overlay.shown(store.resolve("top")))
    assert not (tmp_path / "rootfs/etc/b").exists()


def test_the_base_must_exist(add: Import) -> None:
    with pytest.raises(ImageNotFound):
        add(tar(file("a")), "top", base="nothing")


def test_stacks_end_before_lookups_get_slow(
    store: ImageStore, add: Import, below: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importer, "MAX_LAYERS", 2)
    add(tar(file("a")), "two", base="below")
    with pytest.raises(InvalidRequest, match="layers already"):
        add(tar(file("b")), "three", base="two")


def test_the_layers_top_directory_looks_like_the_bases(store: ImageStore, add: Import) -> None:
    add(docker_archive(tar(directory(".", 0o711, uid=9))), "odd")
    add(tar(file("a")), "top", base="odd")
    info = store.resolve("top").layers[0].stat()
    assert (stat.S_IMODE(info.st_mode), info.st_uid) == (0o711, 9)
