"""Which links stay inside a tree, and what of a local tree is sent."""

from __future__ import annotations

import errno
import os
import socket
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchard.env.client.aio.trees import link_stays_inside, plan_tree
from orchard.env.errors import PathInvalid

names = st.sampled_from(["a", "b", "c"])
links = st.lists(
    st.tuples(
        st.lists(names, min_size=1, max_size=3).map("/".join),
        st.lists(st.sampled_from(["a", "b", "c", "..", ".", ""]), min_size=1, max_size=5).map("/".join),
    ),
    max_size=6,
)


@given(links)
def test_accepted_links_never_lead_outside_even_through_each_other(wanted: list[tuple[str, str]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        outer = Path(folder).resolve()
        root = outer / "root"
        root.mkdir()
        made = []
        for path, target in wanted:
            place = root / path
            # As a download makes them: below real directories only.
            if any(parent.is_symlink() for parent in place.parents) or not link_stays_inside(path, target):
                continue
            try:
                place.parent.mkdir(parents=True, exist_ok=True)
                place.symlink_to(target)
            except (FileExistsError, NotADirectoryError):
                continue
            made.append(place)
        for place in made:
            try:
                place.stat()
            except OSError as error:
                if error.errno == errno.ELOOP:
                    continue  # it leads nowhere, and realpath makes no sense of it
            end = Path(os.path.realpath(place))
            assert end == root or root in end.parents, f"{place} leads to {end}"


@pytest.mark.parametrize(
    ("path", "target", "inside"),
    [
        ("link", "file", True),
        ("link", "folder/file", True),
        ("folder/link", "../file", True),
        ("folder/link", "./../file", True),
        ("link", "../file", False),
        ("folder/link", "../../file", False),
        ("link", "/etc/passwd", False),
        ("link", "folder/../file", False),
        ("link", "", False),
    ],
)
def test_link_examples(path: str, target: str, inside: bool) -> None:
    assert link_stays_inside(path, target) is inside


def test_a_tree_is_planned_with_its_modes(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir(mode=0o700)
    (tmp_path / "ünïcode").mkdir()
    script = tmp_path / "ünïcode/run me"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    (tmp_path / "link").symlink_to("ünïcode/run me")
    plan = plan_tree(tmp_path)
    assert ("empty", 0o700) in plan.directories
    assert plan.files == [("ünïcode/run me", 0o755)]
    assert plan.links == [("link", "ünïcode/run me")]


def test_a_link_that_leads_outside_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "bad").symlink_to("/etc/passwd")
    with pytest.raises(PathInvalid, match=r"bad.*/etc/passwd"):
        plan_tree(tmp_path)


def test_special_files_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as special:
        special.bind("door")
        with pytest.raises(PathInvalid, match="door"):
            plan_tree(tmp_path)
