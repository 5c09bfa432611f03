"""Patches reach the tool byte for byte, in git trees and elsewhere."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.conformance.conftest import NewBox
from tests.support.images import SHELL_LESS_TOOLS
from tests.support.rest import Box

GIT = "git -c init.defaultBranch=main -c user.name=t -c user.email=t@localhost"


def git_diff(old: dict[str, bytes], new: dict[str, bytes], folder: Path) -> str:
    """The diff that git itself writes between two trees."""
    folder.mkdir()
    run = {"cwd": folder, "check": True, "capture_output": True}
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@localhost", "-c", "core.autocrlf=false"]
    subprocess.run([*git, "init", "-q"], **run)
    for state in (old, new):
        for path in folder.iterdir():
            if path.name != ".git":
                path.unlink()
        for name, content in state.items():
            (folder / name).write_bytes(content)
        if state is old:
            subprocess.run([*git, "add", "-A"], **run)
            subprocess.run([*git, "commit", "-qm", "old", "--allow-empty"], **run)
    subprocess.run([*git, "add", "-A"], **run)
    return subprocess.run([*git, "diff", "--binary", "--cached", "HEAD"], **run).stdout.decode(
        "utf-8", "surrogateescape"
    )


CASES: dict[str, tuple[dict[str, bytes], dict[str, bytes]]] = {
    "plain": ({"f": b"a\nb\nc\n"}, {"f": b"a\nB\nc\n"}),
    "crlf": ({"f": b"a\r\nb\r\nc\r\n"}, {"f": b"a\r\nB\r\nc\r\n"}),
    "mixed line endings": ({"f": b"a\r\nb\nc\r\n"}, {"f": b"a\r\nb\nC\n"}),
    "no final newline": ({"f": b"a\nb"}, {"f": b"a\nb\nc"}),
    "final newline added": ({"f": b"a\nb"}, {"f": b"a\nb\n"}),
    "here-document terminators": (
        {"f": b"EOF\nPATCH\n"},
        {"f": b"EOF\nEOF\nPATCH\n_EOF_\nEND\n'EOF'\nPATCH_EOF\n$(touch /tmp/owned)`id`\n"},
    ),
    "trailing spaces": ({"f": b"a \n\t\n"}, {"f": b"a  \n\t\t\nb \n"}),
    "binary": ({"f": b"\x00\x01" * 50}, {"f": bytes(range(256)) * 8}),
    "new file": ({"keep": b"x\n"}, {"keep": b"x\n", "new": b"content\n"}),
    "deleted file": ({"keep": b"x\n", "gone": b"y\n"}, {"keep": b"x\n"}),
    "empty new file": ({"keep": b"x\n"}, {"keep": b"x\n", "empty": b""}),
    "unicode": ({"ünï ☃": "a ☃\n".encode()}, {"ünï ☃": "b 你\n".encode()}),
    "spaces in names": ({"a b": b"1\n"}, {"a b": b"2\n"}),
    "no newline and carriage return": ({"f": b"a\r\nb\r"}, {"f": b"a\r\nc\r"}),
}
#: What the program `patch` cannot do by itself.
GIT_ONLY = {"binary", "unicode", "empty new file"}


def prepare(box: Box, place: str, files: dict[str, bytes], git: bool) -> None:
    for name, content in files.items():
        box.write(f"{place}/{name}", content)
    if git:
        box.out(f"{GIT} init -q && {GIT} add -A && {GIT} commit -qm old", cwd=place)


def state(box: Box, place: str) -> dict[str, bytes]:
    return {n: box.read(f"{place}/{n}") for n, e in box.ls(place).items() if e["type"] == "file"}


@pytest.mark.parametrize("name", CASES)
def test_in_a_git_tree_a_patch_is_applied_byte_for_byte(
    box: Box, place: str, tmp_path: Path, name: str
) -> None:
    old, new = CASES[name]
    prepare(box, place, old, git=True)
    result = box.apply_patch(git_diff(old, new, tmp_path / "g"), cwd=place).expect(200)
    assert (result["success"], result["exit_code"]) == (True, 0), result
    assert state(box, place) == new
    assert box.run(["/bin/ls", "/tmp/owned"])["exit_code"] != 0


@pytest.mark.parametrize("name", sorted(set(CASES) - GIT_ONLY))
def test_outside_a_git_tree_a_patch_is_applied_all_the_same(
    box: Box, place: str, tmp_path: Path, name: str
) -> None:
    old, new = CASES[name]
    prepare(box, place, old, git=False)
    result = box.apply_patch(git_diff(old, new, tmp_path / "g"), cwd=place).expect(200)
    assert result["success"], result
    assert state(box, place) == new


@pytest.mark.parametrize("git", [True, False])
def test_a_patch_without_a_final_newline_is_applied(box: Box, place: str, git: bool) -> None:
    prepare(box, place, {"f": b"a"}, git=git)
    end = "\\ No newline at end of file"
    patch = f"--- a/f\n+++ b/f\n@@ -1 +1 @@\n-a\n{end}\n+b\n{end}"
    assert box.apply_patch(patch, cwd=place).expect(200)["success"]
    assert box.read(f"{place}/f") == b"b"


@pytest.mark.parametrize("git", [True, False])
def test_a_patch_cut_off_in_a_line_is_not_mended(box: Box, place: str, git: bool) -> None:
    """Byte for byte: the tool's own verdict on what was sent."""
    prepare(box, place, {"f": b"a\n"}, git=git)
    assert not box.apply_patch("--- a/f\n+++ b/f\n@@ -1 +1 @@\n-a\n+b", cwd=place).expect(200)["success"]
    assert box.read(f"{place}/f") == b"a\n"


def test_a_patch_that_does_not_fit_fails_and_says_where(box: Box, place: str) -> None:
    prepare(box, place, {"f": b"other\n"}, git=True)
    result = box.apply_patch("--- a/f\n+++ b/f\n@@ -1 +1 @@\n-a\n+b\n", cwd=place).expect(200)
    assert not result["success"]
    assert result["exit_code"] not in (0, None)
    assert "f" in result["stderr"] + result["stdout"]
    assert state(box, place) == {"f": b"other\n"}


def test_a_patch_of_two_files_of_which_one_does_not_fit_changes_nothing_in_a_git_tree(
    box: Box, place: str
) -> None:
    prepare(box, place, {"f": b"a\n", "g": b"other\n"}, git=True)
    patch = "--- a/f\n+++ b/f\n@@ -1 +1 @@\n-a\n+b\n--- a/g\n+++ b/g\n@@ -1 +1 @@\n-a\n+b\n"
    assert not box.apply_patch(patch, cwd=place).expect(200)["success"]
    assert state(box, place) == {"f": b"a\n", "g": b"other\n"}


def test_text_that_is_no_patch_fails(box: Box, place: str) -> None:
    result = box.apply_patch("hello\n", cwd=place).expect(200)
    assert not result["success"]


@pytest.mark.parametrize("git", [True, False])
def test_leading_components_are_stripped_as_asked(box: Box, place: str, git: bool) -> None:
    prepare(box, place, {"f": b"a\n"}, git=git)
    assert box.apply_patch("--- f\n+++ f\n@@ -1 +1 @@\n-a\n+b\n", cwd=place, strip=0).expect(200)["success"]
    assert box.apply_patch("--- x/y/f\n+++ x/y/f\n@@ -1 +1 @@\n-b\n+c\n", cwd=place, strip=2).expect(200)[
        "success"
    ]
    assert box.read(f"{place}/f") == b"c\n"


def test_a_patch_applies_in_the_working_directory_by_default(new_box: NewBox) -> None:
    box = new_box(working_dir="/srv/project")
    box.write("/srv/project/f", b"a\n")
    assert box.apply_patch("--- a/f\n+++ b/f\n@@ -1 +1 @@\n-a\n+b\n").expect(200)["success"]
    assert box.read("/srv/project/f") == b"b\n"


def test_a_patch_applies_below_the_top_of_a_git_tree(box: Box, place: str) -> None:
    box.write(f"{place}/sub/f", b"a\n")
    prepare(box, place, {"top": b"x\n"}, git=True)
    result = box.apply_patch("--- a/f\n+++ b/f\n@@ -1 +1 @@\n-a\n+b\n", cwd=f"{place}/sub").expect(200)
    assert result["success"], result
    assert box.read(f"{place}/sub/f") == b"b\n"


@pytest.mark.parametrize("git", [True, False])
def test_a_patch_cannot_leave_its_directory(box: Box, place: str, git: bool) -> None:
    box.out(["/bin/mkdir", f"{place}/inner"])
    if git:
        box.out(f"{GIT} init -q", cwd=f"{place}/inner")
    patch = "--- /dev/null\n+++ b/../planted\n@@ -0,0 +1 @@\n+x\n"
    box.apply_patch(patch, cwd=f"{place}/inner")
    assert "planted" not in box.ls(place)


def test_a_directory_that_does_not_exist_is_refused(box: Box) -> None:
    answer = box.apply_patch("--- a/f\n+++ b/f\n@@ -1 +1 @@\n-a\n+b\n", cwd="/nope")
    assert (answer.status, answer.code) == (400, "cwd_not_found")


def test_an_image_with_patch_alone_is_enough(busybox: Box) -> None:
    busybox.out("mkdir /tmp/p; echo a > /tmp/p/f")
    result = busybox.apply_patch("--- a/f\n+++ b/f\n@@ -1 +1 @@\n-a\n+b\n", cwd="/tmp/p").expect(200)
    assert result["success"], result
    assert busybox.read("/tmp/p/f") == b"b\n"


def test_an_image_with_neither_tool_says_so(shell_less: Box) -> None:
    assert "patch" not in SHELL_LESS_TOOLS
    answer = shell_less.apply_patch("--- a/f\n+++ b/f\n@@ -1 +1 @@\n-a\n+b\n", cwd="/tmp")
    assert (answer.status, answer.code) == (400, "patch_tool_missing")


def test_a_large_patch_is_applied(box: Box, place: str, tmp_path: Path) -> None:
    old = {"f": b"".join(b"%d\n" % n for n in range(60_000))}
    new = {"f": b"".join(b"%d changed\n" % n for n in range(60_000)), "bin": os.urandom(300_000)}
    prepare(box, place, old, git=True)
    assert box.apply_patch(git_diff(old, new, tmp_path / "g"), cwd=place).expect(200)["success"]
    assert state(box, place) == new


def test_a_patch_leaves_no_files_of_its_own(box: Box, place: str) -> None:
    for git in (False, True):
        folder = f"{place}/{git}"
        prepare(box, folder, {"f": b"a\n"}, git=git)
        assert box.apply_patch("--- a/f\n+++ b/f\n@@ -1 +1 @@\n-a\n+b\n", cwd=folder).expect(200)["success"]
        assert set(box.ls(folder)) - {".git"} == {"f"}


def test_an_empty_patch_is_refused(box: Box) -> None:
    assert box.apply_patch("").status == 422
