"""Trees as tar archives: everything of them makes the round trip, nothing of them leaves its place."""

from __future__ import annotations

import http.client
import io
import os
import shutil
import stat
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conformance.conftest import NewBox
from tests.conformance.test_file_paths import SECRET, host_secret, tricks  # noqa: F401 - a fixture
from tests.conformance.test_file_streams import GIB, begin_get, rest_of
from tests.support.rest import Answer, Box, new_id
from tests.support.waiting import eventually

MODEST = settings(
    max_examples=25, deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip

#: Path → type, mode, time in ns, and the content or the link's target.
Picture = dict[str, tuple[str, int, int, bytes]]


def member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "", mode: int = 0o644) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode, info.mtime = kind, target, mode, 10**9
    return info


def archive(*members: tarfile.TarInfo, content: bytes = b"content", style: int = tarfile.PAX_FORMAT) -> bytes:
    """Files hold `content`."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=style) as tar:
        for info in members:
            info.size = len(content) if info.isreg() else 0
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def picture(tree: bytes) -> Picture:
    """What is in an archive."""
    found: Picture = {}
    with tarfile.open(fileobj=io.BytesIO(tree), errors="surrogateescape") as tar:
        for info in tar:
            kind = {tarfile.REGTYPE: "file", tarfile.DIRTYPE: "directory", tarfile.SYMTYPE: "symlink"}[
                info.type
            ]
            file = tar.extractfile(info) if info.isreg() else None
            data = file.read() if file else os.fsencode(info.linkname)
            exact = info.pax_headers.get("mtime", f"{int(info.mtime)}.0")
            whole, _, part = exact.partition(".")
            time_ns = int(whole) * 10**9 + int(f"{part:0<9}"[:9])
            found[info.name] = (kind, 0 if kind == "symlink" else info.mode, time_ns, data)
    return found


def refused(answer: Answer, name: str) -> bool:
    """It is a typed error that names the entry."""
    assert (answer.status, answer.code) == (400, "archive_invalid"), answer
    assert name in answer.json["detail"]
    return True


EVERYTHING = """
    mkdir -p "$1" && cd "$1"
    mkdir -p empty d/e 'ünïcode ☃'
    printf '#!/bin/sh\\necho ran\\n' > d/script; chmod 755 d/script
    printf secret > d/e/secret; chmod 4600 d/e/secret
    ln d/script d/e/twin
    ln -s d/script link; ln -s ../d d/around; ln -s nowhere broken
    touch "$(printf '\\377\\376')" 'new
line' ./-rf
    n=$(printf 'n%.0s' $(seq 250)); mkdir -p "$n/$n"; head -c 3000000 /dev/urandom > "$n/$n/$n"
    touch -d @1234567890.123456789 d/script; touch -d @0 empty; touch -h -d @999999999 link
    chmod 555 d; chmod 1777 empty; chmod 700 .
"""


def test_everything_of_a_tree_makes_the_round_trip(box: Box, place: str) -> None:
    box.out(["sh", "-c", EVERYTHING, "sh", f"{place}/a"])
    first = box.get_archive(f"{place}/a")
    assert (first.status, first.headers["content-type"]) == (200, "application/x-tar")
    answer = box.put_archive(f"{place}/b", first.body).expect(200)
    assert (answer["success"], answer["path"], answer["entries"]) == (True, f"{place}/b", 17)
    second = picture(box.get_archive(f"{place}/b").body)
    assert second == picture(first.body)
    assert second["."][1] == 0o700
    assert second["d/script"][1:3] == (0o755, 1234567890123456789)
    assert second["link"] == ("symlink", 0, 999999999 * 10**9, b"d/script")
    assert second["d/e/twin"] == second["d/script"]
    assert box.out([f"{place}/b/link"]) == "ran\n"


def test_hard_links_become_files_of_their_own(box: Box, place: str) -> None:
    tree = archive(member("f"), member("d/twin", tarfile.LNKTYPE, "f"))
    box.put_archive(f"{place}/t", tree).expect(200)
    assert box.out(f"cd {place}/t; echo changed > f; cat d/twin; stat -c %h f") == "content1\n"


@pytest.mark.parametrize("style", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_every_usual_format_is_taken(box: Box, place: str, style: int) -> None:
    box.put_archive(f"{place}/t", archive(member("./a/b"), style=style)).expect(200)
    assert box.read(f"{place}/t/a/b") == b"content"


def test_what_gnu_tar_makes_is_taken_and_what_comes_is_taken_by_it(
    box: Box, place: str, tmp_path: Path
) -> None:
    program = shutil.which("tar")
    if program is None:
        pytest.skip("no tar on this machine")
    (tmp_path / "in/d").mkdir(parents=True)
    (tmp_path / "in/d/f").write_bytes(os.urandom(100_000))
    (tmp_path / "in/l").symlink_to("d/f")
    made = subprocess.run([program, "-C", tmp_path / "in", "-c", "."], capture_output=True, check=True).stdout
    box.put_archive(f"{place}/t", made).expect(200)
    back = box.get_archive(f"{place}/t").body
    (tmp_path / "out").mkdir()
    subprocess.run([program, "-C", tmp_path / "out", "-x"], input=back, check=True)
    assert (tmp_path / "out/d/f").read_bytes() == (tmp_path / "in/d/f").read_bytes()
    assert (tmp_path / "out/l").readlink() == Path("d/f")


def test_an_image_without_any_tool_takes_and_gives_archives(shell_less: Box) -> None:
    path = f"/tmp/{new_id()}"
    shell_less.put_archive(path, archive(member("a/b"), member("l", tarfile.SYMTYPE, "a/b"))).expect(200)
    assert shell_less.out(["/bin/cat", f"{path}/l"]) == "content"
    assert set(picture(shell_less.get_archive(path).body)) == {".", "a", "a/b", "l"}


def test_a_directory_that_exists_is_filled(box: Box, place: str) -> None:
    box.out(f"cd {place}; echo old > f; echo stays > g; ln -s g l; mkdir d")
    tree = archive(member("f"), member("l"), member("d", tarfile.DIRTYPE, mode=0o750), member("d/h"))
    box.put_archive(place, tree).expect(200)
    assert box.out(f"cd {place}; cat f g d/h; stat -c '%a %F' d l") == (
        "contentstays\ncontent750 directory\n644 regular file\n"
    )


def test_an_archive_of_a_link_to_a_directory_is_of_the_directory(box: Box, place: str) -> None:
    box.out(f"cd {place}; mkdir d; touch d/f; ln -s d l")
    assert set(picture(box.get_archive(f"{place}/l").body)) == {".", "f"}


def test_a_large_directory_is_whole(box: Box, place: str) -> None:
    box.out(f"mkdir {place}/t; cd {place}/t; seq 12001 | xargs touch")
    tree = box.get_archive(f"{place}/t").body
    assert len(picture(tree)) == 12002
    box.remove(f"{place}/t", recursive="true").expect(200)
    box.put_archive(f"{place}/t", tree).expect(200)
    assert len(box.ls(f"{place}/t")) == 12001


def test_what_is_no_file_directory_or_link_is_left_out(box: Box, place: str) -> None:
    box.out(f"cd {place}; mkfifo p; touch f")
    box.python("import socket,sys; socket.socket(socket.AF_UNIX).bind(sys.argv[1])", f"{place}/s")
    assert set(picture(box.get_archive(place).body)) == {".", "f"}


def test_an_archive_of_what_is_no_directory_is_refused(box: Box, place: str) -> None:
    box.write(f"{place}/f", b"")
    answer = box.get_archive(f"{place}/f")
    assert (answer.status, answer.code) == (400, "path_invalid")
    answer = box.put_archive(f"{place}/f", archive(member("x")))
    assert (answer.status, answer.code) == (400, "path_invalid")
    answer = box.get_archive(f"{place}/nope")
    assert (answer.status, answer.code) == (404, "file_not_found")


# -- hostile archives


@pytest.mark.parametrize("name", ["/etc/planted", "../planted", "a/../../planted"])
@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE])
def test_names_that_lead_outside_are_refused(box: Box, place: str, name: str, kind: bytes) -> None:
    assert refused(box.put_archive(f"{place}/t", archive(member(name, kind, "x"))), name)
    assert box.ls(place) == {}
    assert box.stat("/etc/planted").status == 404


@pytest.mark.parametrize("target", ["/etc/passwd", "..", "../x", "a/../../x"])
def test_links_that_lead_outside_are_refused(box: Box, place: str, target: str) -> None:
    assert refused(box.put_archive(f"{place}/t", archive(member("sly", tarfile.SYMTYPE, target))), "sly")
    assert box.ls(place) == {}


@pytest.mark.parametrize("target", ["../secret", "/etc/passwd", "missing", "l"])
def test_hard_links_to_anything_but_files_of_the_tree_are_refused(box: Box, place: str, target: str) -> None:
    box.write(f"{place}/secret", b"secret")
    tree = archive(member("l", tarfile.SYMTYPE, "f"), member("f"), member("sly", tarfile.LNKTYPE, target))
    assert refused(box.put_archive(f"{place}/t", tree), "sly")
    assert list(box.ls(place)) == ["secret"]


@pytest.mark.parametrize("kind", [tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE])
def test_devices_and_pipes_are_refused(box: Box, place: str, kind: bytes) -> None:
    assert refused(box.put_archive(f"{place}/t", archive(member("gadget", kind))), "gadget")
    assert box.ls(place) == {}


@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE])
def test_an_entry_below_a_link_of_the_archive_is_refused(box: Box, place: str, kind: bytes) -> None:
    tree = archive(
        member("real", tarfile.DIRTYPE), member("l", tarfile.SYMTYPE, "real"), member("l/x", kind, "y")
    )
    assert refused(box.put_archive(f"{place}/t", tree), "l/x")
    assert box.ls(place) == {}


def test_an_entry_below_a_link_that_was_there_is_refused(box: Box, place: str) -> None:
    box.out(f"cd {place}; mkdir t outside; ln -s ../outside t/l")
    assert refused(box.put_archive(f"{place}/t", archive(member("l/planted"))), "l/planted")
    assert box.ls(f"{place}/outside") == {}


@pytest.mark.unprivileged
def test_links_swapped_during_an_upload_never_lead_outside(fresh: Box) -> None:
    fresh.out("mkdir -p /tmp/t/now /tmp/outside")
    swap = "cd /tmp/t; while :; do mv now was; ln -s ../outside now; rm now; mv was now; done"
    swapper = fresh.running(swap)
    tree = archive(*[member(f"now/{number}") for number in range(50)])
    for _ in range(20):
        answer = fresh.put_archive("/tmp/t", tree)
        assert answer.status in (200, 400), answer
    fresh.rest.delete(f"/jobs/{swapper}").expect(200)
    assert fresh.ls("/tmp/outside") == {}


def test_noise_is_refused(box: Box, place: str) -> None:
    for noise in (b"", b"no tar", os.urandom(2000), b"\x1f\x8b" + bytes(1000)):
        answer = box.put_archive(f"{place}/t", noise)
        assert (answer.status, answer.code) == (400, "archive_invalid")
    assert box.ls(place) == {}


@pytest.mark.parametrize("name", tricks(""))
def test_no_path_leads_out(box: Box, host_secret: Path, name: str) -> None:  # noqa: F811
    folder = tricks(str(host_secret.parent))[name]
    assert b"a secret of" not in box.get_archive(folder).body
    box.put_archive(folder, archive(member("secret"), member("planted")))
    assert host_secret.read_bytes() == SECRET
    assert [each.name for each in host_secret.parent.iterdir()] == ["secret"]


# -- archives that do not come whole


def test_an_archive_that_breaks_off_is_refused_and_leaves_nothing(box: Box, place: str) -> None:
    tree = archive(member("a"), member("b"), content=b"x" * 5000)
    for size in (100, 512, 3000, 6000, 7000):
        answer = box.put_archive(f"{place}/t", tree[:size])
        assert (answer.status, answer.code) == (400, "archive_invalid")
    assert box.ls(place) == {}


def test_an_upload_that_breaks_off_leaves_nothing(box: Box, place: str) -> None:
    connection = box.rest.connect()
    connection.putrequest("PUT", f"{box.path}/archive?path={place}/t")
    for name, value in {**box.rest.headers(), "Content-Length": "1000000"}.items():
        connection.putheader(name, value)
    connection.endheaders(archive(member("a"), member("b"))[:2048])
    eventually(lambda: len(box.ls(place)) == 1, "the upload is under way")
    connection.close()
    eventually(lambda: box.ls(place) == {}, "nothing is left of it")


@pytest.mark.unprivileged
def test_a_full_disk_is_told_and_leaves_nothing(new_box: NewBox) -> None:
    box = new_box(disk="64Mi")
    answer = box.put_archive("/tmp/t", archive(*map(member, "abcdefgh"), content=b"x" * (10 << 20)))
    assert (answer.status, answer.code) == (507, "disk_full")
    assert box.ls("/tmp") == {}


def test_a_download_of_a_sandbox_that_ends_breaks_off(new_box: NewBox) -> None:
    box = new_box()
    box.out("mkdir /tmp/t; truncate -s 1G /tmp/t/f")
    response = begin_get(box, "/tmp/t", "archive")
    response.read(1 << 20)
    box.delete()
    assert rest_of(response) < GIB - (1 << 20)


def test_a_file_that_shrinks_meanwhile_breaks_the_archive_off(box: Box, place: str) -> None:
    box.out(f"mkdir {place}/t; truncate -s 1G {place}/t/f")
    response = begin_get(box, f"{place}/t", "archive")
    response.read(1 << 20)
    box.out(["truncate", "-s", "1M", f"{place}/t/f"])
    with pytest.raises(http.client.IncompleteRead):
        for _ in iter(lambda: response.read(1 << 20), b""):
            pass


# -- any tree

_NAMES = (
    st.binary(min_size=1, max_size=60)
    .map(lambda raw: raw.replace(b"\0", b"0").replace(b"/", b"_"))
    .filter(lambda raw: raw not in (b".", b".."))
    .map(os.fsdecode)
)
_LEAVES = st.tuples(st.integers(0, 0o777), st.binary(max_size=3000)) | st.just("link")
_TREES: st.SearchStrategy[Any] = st.recursive(
    st.dictionaries(_NAMES, _LEAVES, max_size=3),
    lambda inner: st.dictionaries(_NAMES, _LEAVES | inner, max_size=3),
    max_leaves=8,
)


def members(tree: Any, prefix: str = "") -> Iterator[tuple[tarfile.TarInfo, bytes]]:
    for name, node in tree.items():
        path = prefix + name
        if node == "link":
            yield member(path, tarfile.SYMTYPE, os.fsdecode(b"to/" + os.fsencode(name))), b""
        elif isinstance(node, dict):
            yield member(path, tarfile.DIRTYPE, mode=0o500 | len(node)), b""
            yield from members(node, path + "/")
        else:
            info = member(path, mode=node[0])
            info.size = len(node[1])
            yield info, node[1]


@MODEST
@given(tree=_TREES)
@pytest.mark.unprivileged
def test_any_tree_makes_the_round_trip(box: Box, place: str, tree: Any) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", errors="surrogateescape") as tar:
        tar.addfile(member(".", tarfile.DIRTYPE, mode=stat.S_IRWXU))
        for info, content in members(tree):
            tar.addfile(info, io.BytesIO(content))
    path = f"{place}/{new_id()}"
    box.put_archive(path, buffer.getvalue()).expect(200)
    assert picture(box.get_archive(path).body) == picture(buffer.getvalue())
