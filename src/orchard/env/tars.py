"""Tar archives as streams: entries to bytes, and bytes in any pieces back to entries, in constant memory.

Written are POSIX pax archives. Read are those, ustar and GNU's; what a tree of files, directories and links does not
need (devices, sparse files) is refused, and so is every name that would lead outside. No I/O happens here.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from orchard.env.errors import ArchiveInvalid

Kind: TypeAlias = Literal["file", "directory", "symlink", "hardlink"]

BLOCK = 512
#: Two empty blocks end an archive.
END = bytes(2 * BLOCK)
#: Names and attributes of one entry may take so many bytes.
_MAX_EXTENSION_BYTES = 256 << 10
_NS = 10**9
_KINDS: dict[bytes, Kind] = {
    tarfile.REGTYPE: "file", tarfile.AREGTYPE: "file", tarfile.CONTTYPE: "file", tarfile.DIRTYPE: "directory",
    tarfile.SYMTYPE: "symlink", tarfile.LNKTYPE: "hardlink",
}  # fmt: skip
_REFUSED = {
    tarfile.CHRTYPE: "a character device", tarfile.BLKTYPE: "a block device", tarfile.FIFOTYPE: "a FIFO",
    tarfile.GNUTYPE_SPARSE: "a sparse file", b"D": "an incremental dump", b"M": "a part of a file",
}  # fmt: skip
_TIME = re.compile(r"(-?\d{1,18})(?:\.(\d*))?")


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry. name: relative, '/' between its parts, empty for the top itself; bytes that are no UTF-8 are lone
    surrogates. size: bytes of content that follow. target: of a link; a hard link's is a name in the archive."""

    name: str
    kind: Kind
    size: int = 0
    mode: int = 0o644
    modified_ns: int | None = None
    target: str = ""


def header(entry: Entry) -> bytes:
    """The blocks that stand before the content of an entry."""
    info = tarfile.TarInfo(entry.name or ".")
    info.type = next(kind for kind, name in _KINDS.items() if name == entry.kind)
    info.size, info.mode, info.linkname = entry.size, entry.mode & 0o7777, entry.target
    if entry.modified_ns is not None:
        info.mtime, rest = divmod(entry.modified_ns, _NS)
        if rest or info.mtime < 0:
            info.pax_headers = {"mtime": _time_text(entry.modified_ns)}
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def padding(size: int) -> bytes:
    """What follows `size` bytes of content."""
    return bytes(-size % BLOCK)


def link_stays_inside(path: str, target: str) -> bool:
    """Whether a symbolic link at the relative `path` leads inside the root, whatever other links do.

    That holds when the target is relative and climbs only at its beginning, at most as far as the root: such
    links cannot leave even when they lead through each other.
    """
    if not target or target.startswith("/"):
        return False
    parts = [part for part in target.split("/") if part not in ("", ".")]
    climbs = 0
    while climbs < len(parts) and parts[climbs] == "..":
        climbs += 1
    return ".." not in parts[climbs:] and climbs <= path.count("/")


class Reader:
    """Reads an archive that comes in pieces: `feed` them in order, then `finish`."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._content = 0
        self._skip = 0
        self._extension: tuple[bytes, int] | None = None
        self._pax: dict[str, str] = {}
        self._global: dict[str, str] = {}
        self._ended = False

    def feed(self, data: bytes) -> Iterator[Entry | bytes]:
        """What `data` completes: entries, each followed by its content in pieces that are never empty.

        To be iterated to its end. Raises `ArchiveInvalid`, naming the entry.
        """
        self._buffer += data
        while True:
            if self._content:
                piece = bytes(self._buffer[: self._content])
                if not piece:
                    return
                del self._buffer[: len(piece)]
                self._content -= len(piece)
                yield piece
            elif self._skip:
                skipped = min(self._skip, len(self._buffer))
                if not skipped:
                    return
                del self._buffer[:skipped]
                self._skip -= skipped
            elif self._ended:
                self._buffer.clear()
                return
            else:
                need = self._extension[1] if self._extension else BLOCK
                if len(self._buffer) < need:
                    return
                block = bytes(self._buffer[:need])
                del self._buffer[:need]
                if self._extension:
                    self._extend(block)
                elif (entry := self._begin(block)) is not None:
                    yield entry

    def finish(self) -> None:
        """Raises `ArchiveInvalid` when the archive breaks off before its end."""
        if not self._ended:
            raise ArchiveInvalid("the tar archive breaks off before its end; send it again, whole")

    def _begin(self, block: bytes) -> Entry | None:
        if not block.strip(b"\0"):
            self._ended = True
            return None
        try:
            info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except (tarfile.HeaderError, ValueError) as error:
            raise ArchiveInvalid(f"not a tar archive, or a damaged one: {error}") from None
        if info.size < 0:
            raise ArchiveInvalid(f"the entry {info.name!r:.200} has a negative size")
        if info.type in (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, *tarfile.GNU_TYPES[:2]):
            if info.size > _MAX_EXTENSION_BYTES:
                raise ArchiveInvalid(
                    f"a name or an attribute has {info.size} bytes; at most {_MAX_EXTENSION_BYTES} are taken"
                )
            if info.size:
                self._extension = (info.type, info.size)
            return None
        return self._entry(info)

    def _extend(self, data: bytes) -> None:
        assert self._extension is not None
        kind, size = self._extension
        self._extension = None
        self._skip = -size % BLOCK
        if kind == tarfile.GNUTYPE_LONGNAME:
            self._pax["path"] = _text(data.split(b"\0", 1)[0])
        elif kind == tarfile.GNUTYPE_LONGLINK:
            self._pax["linkpath"] = _text(data.split(b"\0", 1)[0])
        else:
            (self._global if kind == tarfile.XGLTYPE else self._pax).update(_records(data))

    def _entry(self, info: tarfile.TarInfo) -> Entry:
        pax, self._pax = {**self._global, **self._pax}, {}
        raw = pax.get("path", info.name)
        if info.type in _REFUSED or any(key.startswith("GNU.sparse.") for key in pax):
            what = _REFUSED.get(info.type, "a sparse file")
            raise ArchiveInvalid(
                f"the entry {raw!r:.200} is {what}: only files, directories and links are taken"
            )
        kind = _KINDS.get(info.type)
        if kind is None:
            raise ArchiveInvalid(f"the entry {raw!r:.200} is of an unknown type {info.type!r}")
        if kind == "file" and raw.endswith("/"):
            kind = "directory"  # as archives from before 1988 have them
        size = _number(pax["size"], raw) if "size" in pax else info.size
        # Only files have content; what a broken writer announces for others follows all the same.
        if kind != "file" and size:
            raise ArchiveInvalid(f"the entry {raw!r:.200} is no file and has content")
        self._content, self._skip = size, -size % BLOCK
        entry = Entry(
            name=_relative(raw, raw),
            kind=kind,
            size=size,
            mode=info.mode & 0o7777,
            modified_ns=_time(pax["mtime"], raw) if "mtime" in pax else int(info.mtime) * _NS,
        )
        if not entry.name and kind != "directory":
            raise ArchiveInvalid(f"the entry {raw!r:.200} would replace the directory itself")
        if kind == "directory" or kind == "file":
            return entry
        target = pax.get("linkpath", info.linkname)
        if not target or "\0" in target:
            raise ArchiveInvalid(f"the link {raw!r:.200} leads to {target!r:.200}")
        return replace(entry, target=target if kind == "symlink" else _relative(target, raw))


def check_link(entry: Entry) -> None:
    """Raises `ArchiveInvalid` for a symbolic link that would lead outside."""
    if entry.kind == "symlink" and not link_stays_inside(entry.name, entry.target):
        raise ArchiveInvalid(
            f"the link {entry.name!r:.200} points to {entry.target!r:.200}, outside the directory;"
            " remove it or copy what it points to"
        )


def _relative(name: str, raw: str) -> str:
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if not name or name.startswith("/") or ".." in parts or "\0" in name:
        raise ArchiveInvalid(
            f"the entry {raw!r:.200} would lead outside: names are relative and without '..'"
        )
    return "/".join(parts)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _records(data: bytes) -> dict[str, str]:
    """The records of a pax header: "LENGTH KEY=VALUE\\n"."""
    found = {}
    while data:
        length_text, space, _ = data[:20].partition(b" ")
        length = int(length_text) if length_text.isdigit() else 0
        record = data[len(length_text) + 1 : length - 1]
        key, equals, value = record.partition(b"=")
        if not space or not equals or length > len(data) or data[length - 1 : length] != b"\n":
            raise ArchiveInvalid("the tar archive has a damaged pax header; make it anew")
        found[_text(key)] = _text(value)
        data = data[length:]
    return found


def _number(text: str, name: str) -> int:
    if not re.fullmatch(r"\d{1,18}", text, re.ASCII):
        raise ArchiveInvalid(f"the entry {name!r:.200} has an impossible size {text!r:.40}")
    return int(text)


def _time(text: str, name: str) -> int:
    match = re.fullmatch(_TIME, text)
    if match is None or not match[1].isascii():
        raise ArchiveInvalid(f"the entry {name!r:.200} has an impossible time {text!r:.40}")
    fraction = int(((match[2] or "") + "0" * 9)[:9])
    whole = int(match[1]) * _NS
    return whole - fraction if match[1].startswith("-") else whole + fraction


def _time_text(time_ns: int) -> str:
    seconds, rest = divmod(abs(time_ns), _NS)
    return f"{'-' if time_ns < 0 else ''}{seconds}.{rest:09d}"
