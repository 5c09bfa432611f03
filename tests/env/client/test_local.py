"""Archives unpacked on this machine: all of them stay in the place that was asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchard.env import tars
from orchard.env.client.local import LocalFile, LocalTree
from orchard.env.errors import ArchiveInvalid


def unpack(root: Path, *entries: tuple[tars.Entry, bytes]) -> None:
    tree = LocalTree(root)
    try:
        for entry, content in entries:
            tree.feed(tars.header(entry) + content + tars.padding(len(content)))
        tree.feed(tars.END)
        tree.finish()
    finally:
        tree.abandon()


def file(name: str, content: bytes = b"new") -> tuple[tars.Entry, bytes]:
    return tars.Entry(name, "file", len(content), 0o640, 10**18 + 5), content


def link(name: str, target: str) -> tuple[tars.Entry, bytes]:
    return tars.Entry(name, "symlink", target=target), b""


def test_modes_and_times_are_kept(tmp_path: Path) -> None:
    shut = tars.Entry("d", "directory", 0, 0o555, 10**18)
    unpack(tmp_path / "t", (shut, b""), file("d/f"))
    assert (tmp_path / "t/d/f").stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "t/d/f").stat().st_mtime_ns == 10**18 + 5
    assert (tmp_path / "t/d").stat().st_mode & 0o777 == 0o555
    assert (tmp_path / "t/d").stat().st_mtime_ns == 10**18


@pytest.mark.parametrize("target", ["/etc", "..", "../t2", "a/../../x"])
def test_a_link_that_leads_outside_is_refused_by_name(tmp_path: Path, target: str) -> None:
    with pytest.raises(ArchiveInvalid, match="sly"):
        unpack(tmp_path / "t", link("sly", target))
    assert list((tmp_path / "t").iterdir()) == []


def test_links_that_were_there_are_replaced_and_not_followed(tmp_path: Path) -> None:
    outside, root = tmp_path / "outside", tmp_path / "t"
    (outside / "d").mkdir(parents=True)
    (outside / "f").write_text("old")
    root.mkdir()
    (root / "d").symlink_to(outside / "d")
    (root / "f").symlink_to(outside / "f")
    unpack(root, file("d/planted"), file("f"))
    assert (outside / "f").read_text() == "old"
    assert list((outside / "d").iterdir()) == []
    assert (root / "d/planted").read_text() == (root / "f").read_text() == "new"


def test_an_entry_below_a_link_of_the_same_archive_stays_inside(tmp_path: Path) -> None:
    unpack(tmp_path / "t", file("real/f", b"old"), link("l", "real"), file("l/f"))
    assert (tmp_path / "t/real/f").read_bytes() == b"old"
    assert (tmp_path / "t/l/f").read_bytes() == b"new"


def test_a_hard_link_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArchiveInvalid, match="twin"):
        unpack(tmp_path / "t", (tars.Entry("twin", "hardlink", target="f"), b""))


def test_a_file_that_breaks_off_leaves_nothing(tmp_path: Path) -> None:
    tree = LocalTree(tmp_path)
    tree.feed(tars.header(tars.Entry("f", "file", 1000)) + b"half")
    with pytest.raises(ArchiveInvalid):
        tree.finish()
    tree.abandon()
    assert list(tmp_path.iterdir()) == []


def test_a_file_appears_only_whole(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("old")
    file = LocalFile(tmp_path / "f", 0o600)
    file.write(b"new")
    assert (tmp_path / "f").read_text() == "old"
    file.finish()
    assert (tmp_path / "f").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_a_device_is_written_to_and_not_replaced() -> None:
    file = LocalFile(Path("/dev/null"), 0o600)
    file.write(b"x")
    file.finish()
    assert Path("/dev/null").is_char_device()
