"""Archives as streams: any cutting gives the same entries, other programs' archives are understood, hostile ones refused."""

from __future__ import annotations

import io
import tarfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchard.env import tars
from orchard.env.errors import ArchiveInvalid

Seen = tuple[tars.Entry, bytes]

_parts = (
    st.binary(min_size=1, max_size=120)
    .map(lambda raw: raw.replace(b"\0", b"0").replace(b"/", b"_"))
    .filter(lambda raw: raw not in (b".", b".."))
    .map(lambda raw: raw.decode("utf-8", "surrogateescape"))
)
_names = st.lists(_parts, min_size=1, max_size=4).map("/".join)
_modes = st.integers(0, 0o7777)
_times = st.integers(-(2**33) * 10**9, 2**40 * 10**9)
_files = st.builds(
    lambda name, content, mode, time: (tars.Entry(name, "file", len(content), mode, time), content),
    _names, st.binary(max_size=1500), _modes, _times,
)  # fmt: skip
_folders = st.builds(
    lambda name, mode, time: (tars.Entry(name, "directory", 0, mode, time), b""), _names, _modes, _times
)
_links = st.builds(
    lambda name, target, time: (tars.Entry(name, "symlink", 0, 0o777, time, target), b""),
    _names,
    _names,
    _times,
)
trees = st.lists(_files | _folders | _links, max_size=6)


def written(entries: list[Seen]) -> bytes:
    return (
        b"".join(tars.header(entry) + content + tars.padding(len(content)) for entry, content in entries)
        + tars.END
    )


def read(*pieces: bytes) -> list[Seen]:
    reader = tars.Reader()
    seen: list[Seen] = []
    for piece in pieces:
        for event in reader.feed(piece):
            if isinstance(event, tars.Entry):
                seen.append((event, b""))
            else:
                seen[-1] = (seen[-1][0], seen[-1][1] + event)
    reader.finish()
    return seen


def made(*members: tuple[tarfile.TarInfo, bytes], style: int = tarfile.PAX_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=style) as archive:
        for info, content in members:
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


@given(trees, st.data())
def test_entries_survive_any_cutting(entries: list[Seen], data: st.DataObject) -> None:
    stream = written(entries)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=10)))
    pieces = [stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert read(*pieces) == entries


@given(trees)
def test_what_is_written_is_what_others_read(entries: list[Seen]) -> None:
    with tarfile.open(fileobj=io.BytesIO(written(entries))) as archive:
        found = [(info.name, info.linkname, info.mode, info.size) for info in archive]
    assert found == [(e.name, e.target, e.mode, e.size) for e, _ in entries]


@pytest.mark.parametrize("style", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_every_usual_format_is_understood(style: int) -> None:
    long = "d" * 90 + "/" + "e" * 90
    members = [
        (member("./a"), b"content"),
        (member("d/", tarfile.DIRTYPE), b""),
        (member("l", tarfile.SYMTYPE, "d/x"), b""),
        (member("h", tarfile.LNKTYPE, "a"), b""),
        (member(long), b"x" * 600),
    ]
    seen = read(made(*members, style=style))
    assert [(e.name, e.kind, e.target, content) for e, content in seen] == [
        ("a", "file", "", b"content"),
        ("d", "directory", "", b""),
        ("l", "symlink", "d/x", b""),
        ("h", "hardlink", "a", b""),
        (long, "file", "", b"x" * 600),
    ]


@pytest.mark.parametrize("style", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_names_and_targets_of_any_length_are_understood(style: int) -> None:
    name, target = "n" * 3000, "t" * 3000
    ((entry, _),) = read(made((member(name, tarfile.SYMTYPE, target), b""), style=style))
    assert (entry.name, entry.target) == (name, target)


@pytest.mark.parametrize("name", ["/etc/passwd", "../x", "a/../../x", "a/..", "//x"])
@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE])
def test_names_that_lead_outside_are_refused_by_name(name: str, kind: bytes) -> None:
    with pytest.raises(ArchiveInvalid) as caught:
        read(made((member(name, kind, "x"), b"")))
    assert name in caught.value.detail


def test_a_hard_link_to_the_outside_is_refused_by_name() -> None:
    with pytest.raises(ArchiveInvalid, match="sly"):
        read(made((member("sly", tarfile.LNKTYPE, "../secret"), b"")))


@pytest.mark.parametrize(
    "kind", [tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, tarfile.GNUTYPE_SPARSE, b"V"]
)
def test_what_is_no_file_directory_or_link_is_refused_by_name(kind: bytes) -> None:
    with pytest.raises(ArchiveInvalid, match="gadget"):
        read(made((member("gadget", kind), b"")))


def test_a_huge_name_is_refused_before_it_is_read() -> None:
    info = member("pax", tarfile.XHDTYPE)
    info.size = 1 << 30
    reader = tars.Reader()
    with pytest.raises(ArchiveInvalid, match="1073741824"):
        list(reader.feed(info.tobuf(tarfile.USTAR_FORMAT)))


def test_a_pax_size_rules_over_the_headers_own() -> None:
    info = member("f")
    info.pax_headers = {"size": "5"}
    stream = info.tobuf(tarfile.PAX_FORMAT) + b"12345" + tars.padding(5) + tars.END
    ((entry, content),) = read(stream)
    assert (entry.size, content) == (5, b"12345")


@given(st.lists(_files, min_size=1, max_size=3), st.data())
def test_an_archive_that_breaks_off_is_never_whole(entries: list[Seen], data: st.DataObject) -> None:
    stream = written(entries)[: -len(tars.END)]
    with pytest.raises(ArchiveInvalid):
        read(stream[: data.draw(st.integers(0, len(stream)))])


@given(st.binary(max_size=3000))
def test_noise_is_an_archive_or_refused(noise: bytes) -> None:
    try:
        read(noise)
    except ArchiveInvalid:
        pass


@given(trees.filter(bool), st.data())
def test_a_damaged_archive_is_read_or_refused(entries: list[Seen], data: st.DataObject) -> None:
    stream = bytearray(written(entries))
    for _ in range(data.draw(st.integers(1, 4))):
        stream[data.draw(st.integers(0, len(stream) - 1))] = data.draw(st.integers(0, 255))
    try:
        for entry, _ in read(bytes(stream)):
            assert not entry.name.startswith("/")
            assert ".." not in entry.name.split("/")
    except ArchiveInvalid:
        pass
