"""What an ordinary user's service finds out about itself, what it refuses, and how it removes trees."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from orchard.env.errors import RuntimeRefused
from orchard.env.runtimes.base import SandboxSpec
from orchard.env.runtimes.local import ordinary
from orchard.env.runtimes.local.ordinary import Ordinary
from orchard.env.runtimes.local.removal import remove_all

ME = pwd.getpwuid(os.geteuid()).pw_name


@pytest.fixture
def mappers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """newuidmap and newgidmap are installed."""
    for name in ("newuidmap", "newgidmap"):
        (tmp_path / name).touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))


def detect(folder: Path, uids: str, gids: str) -> Ordinary:
    for name, text in (("subuid", uids), ("subgid", gids)):
        (folder / name).write_text(text)
    return Ordinary.detect(folder / "subuid", folder / "subgid")


@pytest.mark.usefixtures("mappers")
@pytest.mark.parametrize("who", [ME, str(os.geteuid())])
def test_a_range_of_the_user_follows_its_own_id(tmp_path: Path, who: str) -> None:
    found = detect(tmp_path, f"other:1:9\n{who}:100000:65536\n", f"{who}:200000:70000\n")
    assert found.uids == ((0, os.geteuid(), 1), (1, 100000, 65535))
    assert found.gids == ((0, os.getegid(), 1), (1, 200000, 65535))
    assert found.ids == 65536


@pytest.mark.usefixtures("mappers")
@pytest.mark.parametrize(
    ("uids", "gids"), [("", ""), (f"{ME}:1:5", ""), (f"{ME}:x:5", f"{ME}:1:5"), ("other:1:5", "other:1:5")]
)
def test_without_a_range_in_both_files_there_is_only_the_own_id(tmp_path: Path, uids: str, gids: str) -> None:
    found = detect(tmp_path, uids, gids)
    assert (found.ids, found.uids) == (1, ((0, os.geteuid(), 1),))


@pytest.mark.usefixtures("mappers")
def test_of_two_ranges_the_smaller_counts(tmp_path: Path) -> None:
    assert detect(tmp_path, f"{ME}:100000:10", f"{ME}:100000:20").ids == 11


def test_a_range_is_of_no_use_without_newuidmap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert detect(tmp_path, f"{ME}:100000:65536", f"{ME}:100000:65536").ids == 1


MINE = Ordinary(((0, 1000, 1),), ((0, 1000, 1),))


@pytest.mark.parametrize(("field", "value"), [("memory_bytes", 1 << 30), ("cpu_cores", 2.0)])
def test_a_limit_is_refused_unless_a_control_group_enforces_it(field: str, value: float) -> None:
    spec = SandboxSpec("s", "host", **{field: value})  # type: ignore[arg-type]
    with pytest.raises(RuntimeRefused, match="Delegate=yes"):
        MINE.check(spec, set())
    MINE.check(spec, {"memory", "cpu"})


def test_a_network_is_refused() -> None:
    with pytest.raises(RuntimeRefused, match="block_network=true"):
        MINE.check(SandboxSpec("s", "host", block_network=False), {"memory"})


def test_every_weakness_is_said_only_where_it_is_one() -> None:
    bare = "\n".join(MINE.weaker(set()))
    assert all(text in bare for text in ("no users but root", "memory or cpu", "RLIMIT_NPROC", "by a mark"))
    rich = Ordinary(((0, 7, 1), (1, 100, 50)), ((0, 7, 1), (1, 100, 50)), "/sys/fs/cgroup/mine")
    said = "\n".join(rich.weaker({"memory", "cpu", "pids"}))
    assert "uid 7" in said
    assert "100 to 149" in said
    assert not any(
        text in said for text in ("no users but root", "memory or cpu", "RLIMIT_NPROC", "by a mark")
    )
    assert ordinary.HOW_TO_GET_LIMITS in bare


def test_a_tree_is_removed_whatever_its_modes_and_depth(tmp_path: Path) -> None:
    # As root modes are no obstacle; the conformance suite does the same as an ordinary user.
    root = tmp_path / "tree"
    (root / "a/b").mkdir(parents=True)
    (root / "a/b/file").touch()
    (root / "link").symlink_to(tmp_path)
    fd = os.open(root, os.O_RDONLY)
    for _ in range(1200):
        os.mkdir("deeper", dir_fd=fd)
        inner = os.open("deeper", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = inner
    os.close(fd)
    (root / "a").chmod(0)
    remove_all(str(root))
    assert not root.exists()
    assert tmp_path.exists()


def test_a_tree_that_is_not_there_is_fine(tmp_path: Path) -> None:
    remove_all(str(tmp_path / "none"))
