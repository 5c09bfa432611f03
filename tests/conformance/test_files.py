"""Files in and out: exact bytes, modes, names; failures that say so; never half a file."""

from __future__ import annotations

import base64
import hashlib
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.conformance.conftest import NewBox
from tests.support.rest import Box, Rest, new_id
from tests.support.waiting import Stopwatch

SIZES = [0, 1, 18 * 1024, 1 << 20, (4 << 20) - 1, 4 << 20, (4 << 20) + 1, 64 << 20]
NAMES = [
    "a b",
    "ünïcode ☃",
    "'quoted\"",
    "-rf",
    "$HOME",
    "new\nline",
    "back\\slash",
    "*",
    ".hidden",
    "x" * 255,
]


@pytest.mark.parametrize("size", SIZES)
def test_any_size_arrives_whole(box: Box, place: str, size: int) -> None:
    content = os.urandom(min(size, 1 << 20)) * (size // (1 << 20) or 1) if size else b""
    content = (content + b"x" * size)[:size]
    answer = box.write(f"{place}/f", content)
    assert (answer["success"], answer["path"], answer["size"]) == (True, f"{place}/f", size)
    inside = box.out(["/usr/bin/sha256sum", f"{place}/f"]).split()[0]
    assert inside == hashlib.sha256(content).hexdigest()
    assert box.read(f"{place}/f") == content


@pytest.mark.parametrize("name", NAMES, ids=lambda n: repr(n)[:16])
def test_any_name_is_taken_as_it_is(box: Box, place: str, name: str) -> None:
    box.write(f"{place}/{name}", b"content")
    assert box.read(f"{place}/{name}") == b"content"
    assert list(box.ls(place)) == [name]
    assert box.out(["/bin/cat", f"{place}/{name}"]) == "content"


@pytest.mark.unprivileged
def test_missing_parents_are_made(box: Box, place: str) -> None:
    box.write(f"{place}/a/b/c/f", b"x")
    assert box.out(["/bin/cat", f"{place}/a/b/c/f"]) == "x"


@pytest.mark.unprivileged
@pytest.mark.parametrize(
    ("mode", "expected"), [("0755", "755"), ("600", "600"), (0o640, "640"), ("0444", "444")]
)
def test_a_mode_is_set(box: Box, place: str, mode: object, expected: str) -> None:
    box.write(f"{place}/f", b"", mode=mode)
    assert box.out(["/usr/bin/stat", "-c", "%a", f"{place}/f"]) == f"{expected}\n"


def test_without_a_mode_a_new_file_has_644(box: Box, place: str) -> None:
    box.write(f"{place}/f", b"")
    assert box.out(["/usr/bin/stat", "-c", "%a %U", f"{place}/f"]) == "644 root\n"


@pytest.mark.unprivileged
def test_without_a_mode_an_existing_file_keeps_its_own(box: Box, place: str) -> None:
    box.out(f"echo old > {place}/f; chmod 755 {place}/f")
    box.write(f"{place}/f", b"#!/bin/sh\necho new\n")
    assert box.out([f"{place}/f"]) == "new\n"


@pytest.mark.parametrize("mode", ["99", "0888", "rwx", -1, 0o10000, "01755x"])
def test_a_malformed_mode_is_refused(box: Box, place: str, mode: object) -> None:
    assert box.post_write(f"{place}/f", b"", mode=mode).status == 422
    assert box.ls(place) == {}


def test_writing_replaces_what_was_there(box: Box, place: str) -> None:
    box.write(f"{place}/f", b"a much longer first content")
    box.write(f"{place}/f", b"short")
    assert box.read(f"{place}/f") == b"short"


def test_a_reader_never_sees_half_a_file(box: Box, place: str) -> None:
    old, new = b"o" * 9_000_000, b"n" * 9_000_000
    box.write(f"{place}/f", old)
    with ThreadPoolExecutor(2) as pool:
        writes = [pool.submit(box.write, f"{place}/f", content) for content in (new, old, new, old)]
        while not all(write.done() for write in writes):
            job = box.python(
                "import sys; d=open(sys.argv[1],'rb').read(); print(len(d), len(set(d)))",
                f"{place}/f",
                concurrent=True,
            )
            assert job["stdout"] == "9000000 1\n"


@pytest.mark.unprivileged
def test_a_write_leaves_no_temporary_files(box: Box, place: str) -> None:
    for _ in range(3):
        box.write(f"{place}/f", b"x" * 100_000)
    assert box.out(["/bin/ls", "-A", place]) == "f\n"


@pytest.mark.unprivileged
def test_a_write_that_fails_says_so_and_leaves_the_old_file(new_box: NewBox) -> None:
    box = new_box(disk="64Mi")
    box.write("/tmp/f", b"old")
    answer = box.post_write("/tmp/f", b"x" * (80 << 20))
    assert answer.status >= 400
    assert "space" in answer.json["detail"].lower()
    assert box.read("/tmp/f") == b"old"
    assert box.out(["/bin/ls", "-A", "/tmp"]) == "f\n"


def test_a_directory_is_no_file_to_write(box: Box, place: str) -> None:
    answer = box.post_write(place, b"x")
    assert (answer.status, answer.code) == (400, "path_invalid")


def test_a_file_is_no_directory_to_write_into(box: Box, place: str) -> None:
    box.write(f"{place}/f", b"x")
    answer = box.post_write(f"{place}/f/g", b"x")
    assert (answer.status, answer.code) == (400, "path_invalid")


def test_a_missing_file_is_404(box: Box, place: str) -> None:
    answer = box.get_file(f"{place}/nope")
    assert (answer.status, answer.code) == (404, "file_not_found")
    assert f"{place}/nope" in answer.json["detail"]


def test_a_missing_directory_is_404(box: Box, place: str) -> None:
    answer = box.get_list(f"{place}/nope")
    assert (answer.status, answer.code) == (404, "file_not_found")


def test_a_directory_cannot_be_read_as_a_file(box: Box, place: str) -> None:
    answer = box.get_file(place)
    assert (answer.status, answer.code) == (400, "path_invalid")


def test_content_that_is_not_base64_is_refused(box: Box, place: str) -> None:
    answer = box.rest.post(f"{box.path}/files", {"path": f"{place}/f", "content": "no base64!"})
    assert answer.status == 422
    assert box.ls(place) == {}


def test_a_read_answers_with_path_content_and_size(box: Box, place: str) -> None:
    box.out(f"printf 'a\\0b' > {place}/f")
    answer = box.get_file(f"{place}/f").expect(200)
    assert answer == {"path": f"{place}/f", "content": base64.b64encode(b"a\0b").decode(), "size": 3}


@pytest.mark.unprivileged
def test_a_listing_tells_name_type_size_and_time(box: Box, place: str) -> None:
    box.out(f"cd {place}; printf abc > f; touch -d @1000000000 f; mkdir d; ln -s f l; mkfifo p")
    listing = box.get_list(place).expect(200)
    assert listing["path"] == place
    assert listing["files"] == sorted(listing["files"], key=lambda f: f["name"])
    entries = {f["name"]: f for f in listing["files"]}
    assert {name: e["type"] for name, e in entries.items()} == {
        "f": "file",
        "d": "directory",
        "l": "symlink",
        "p": "other",
    }
    assert (entries["f"]["size"], int(entries["f"]["modified"])) == (3, 1_000_000_000)
    assert entries["l"]["target"] == "f"


def test_a_listing_of_a_link_to_a_directory_shows_the_directory(box: Box, place: str) -> None:
    box.out(f"cd {place}; mkdir d; touch d/inside; ln -s d l")
    assert set(box.ls(f"{place}/l")) == {"inside"}


def test_a_listing_of_a_file_is_refused(box: Box) -> None:
    answer = box.get_list("/etc/passwd")
    assert (answer.status, answer.code) == (400, "path_invalid")


def test_the_root_is_listed(box: Box) -> None:
    assert {"usr", "tmp", "etc"} <= set(box.ls("/"))


def test_a_listing_without_a_path_is_that_of_the_root(box: Box) -> None:
    listing = box.rest.get(f"{box.path}/files/list").expect(200)
    assert listing["path"] == "/"


def test_a_large_directory_is_listed_whole(box: Box, place: str) -> None:
    box.out(f"cd {place}; seq 5000 | xargs touch")
    assert len(box.ls(place)) == 5000


def test_names_that_are_no_text_are_listed_all_the_same(box: Box, place: str) -> None:
    box.python("import os,sys; os.chdir(sys.argv[1]); open(b'\\xff\\xfe','w'); open('fine','w')", place)
    entries = box.ls(place)
    assert len(entries) == 2
    assert "fine" in entries


def test_a_file_that_grows_without_end_is_refused_not_read_for_ever(box: Box) -> None:
    watch = Stopwatch()
    answer = box.get_file("/dev/zero")
    assert (answer.status, answer.code) == (400, "path_invalid")
    assert watch.seconds < 20


def test_files_of_proc_are_read_although_their_size_is_zero(box: Box) -> None:
    assert box.read("/proc/version").startswith(b"Linux version")


def test_a_file_may_be_written_while_a_command_runs(fresh: Box) -> None:
    fresh.running("sleep 30")
    fresh.write("/tmp/f", b"x")
    assert fresh.read("/tmp/f") == b"x"


def test_a_relative_path_is_refused_or_starts_at_the_working_directory(new_box: NewBox) -> None:
    box = new_box(working_dir="/srv")
    answer = box.post_write("relative", b"x")
    if answer.status == 400:
        assert answer.code == "path_invalid"
        return
    answer.expect(200)
    assert box.out(["/bin/cat", "/srv/relative"]) == "x"


def test_files_of_an_unknown_sandbox_are_404(rest: Rest) -> None:
    answer = rest.get(f"/sandboxes/{new_id()}/files", path="/etc/passwd")
    assert (answer.status, answer.code) == (404, "sandbox_not_found")


def test_a_path_is_required(box: Box) -> None:
    assert box.rest.get(f"{box.path}/files").status == 422
    assert box.rest.post(f"{box.path}/files", {"path": "", "content": ""}).status == 422
    assert box.post_write("/tmp/nul\0byte", b"").status == 422


def test_too_large_a_read_is_refused_with_what_to_do(box: Box, place: str) -> None:
    box.out(["/usr/bin/truncate", "-s", "300M", f"{place}/sparse"])
    answer = box.get_file(f"{place}/sparse")
    assert (answer.status, answer.code) == (413, "too_large")
    assert answer.json["detail"]
