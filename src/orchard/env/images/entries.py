"""Entries of a tar stream, read once from front to back in bounded memory, every field distrusted.

The headers are parsed by the standard library's tarfile; nothing of its extraction is used.
"""

from __future__ import annotations

import base64
import binascii
import os
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from typing import IO, Any, Literal, cast
from urllib.parse import unquote

from orchard.env.errors import ImageInvalid, OrchardError, TooLarge
from orchard.env.images.limits import ImportLimits
from orchard.env.images.streams import DAMAGE, ForwardReader, Source

EntryKind = Literal["file", "directory", "symlink", "hardlink", "fifo", "device", "other"]

_CHUNK = 1 << 20
_BLOCK = 512
_MAX_ID = (1 << 32) - 2  # 2^32-1 means "leave it" to chown
_TIMES_S = (-(1 << 31), (1 << 34) - 1)  # what ext4 can keep
_UNREADABLE = (*DAMAGE, tarfile.TarError, ArithmeticError, LookupError, RecursionError)


@dataclass(frozen=True, slots=True)
class Entry:
    """One tar entry. segments: (offset, size) of the data of a sparse file, None for a plain one."""

    name: bytes
    kind: EntryKind
    mode: int = 0o644
    uid: int = 0
    gid: int = 0
    mtime_ns: int = 0
    size: int = 0
    link: bytes = b""
    xattrs: Mapping[str, bytes] = field(default_factory=dict)
    segments: tuple[tuple[int, int], ...] | None = None


class TarEntries:
    """Iterates over the entries of a tar stream; the content of the current one comes from `content()`.

    sealed: the stream's digest is checked elsewhere, so an archive without its end marker is accepted.
    Raises ImageInvalid for damage and TooLarge beyond the limits, each naming `label`.
    """

    def __init__(self, source: Source, limits: ImportLimits, *, label: str, sealed: bool = False) -> None:
        self._reader = ForwardReader(source, limit=limits.unpacked_bytes)
        self._limits = limits
        self._label = label
        self._sealed = sealed
        self._entry: Entry | None = None

    def __iter__(self) -> Iterator[Entry]:
        try:
            for member in self._members():
                self._entry = self._checked(member)
                yield self._entry
        except OrchardError:
            raise
        except _UNREADABLE as error:
            raise self._damaged(error) from error

    @property
    def offset(self) -> int:
        """Where the current entry's content begins in the stream, before any of it is read."""
        return self._reader.tell()

    def content(self) -> Iterator[tuple[int, bytes]]:
        """(offset, data) pieces of the current file, in order; what lies between them is zeros."""
        entry = self._entry
        if entry is None or entry.kind != "file":
            return
        self._reader.allow_content()
        segments = ((0, entry.size),) if entry.segments is None else entry.segments
        try:
            for start, size in segments:
                done = 0
                while done < size:
                    data = self._reader.read(min(_CHUNK, size - done))
                    if not data:
                        raise EOFError("unexpected end of data")
                    yield start + done, data
                    done += len(data)
        except OrchardError:
            raise
        except _UNREADABLE as error:
            raise self._damaged(error) from error

    def _members(self) -> Iterator[tarfile.TarInfo]:
        reader = self._reader
        reader.allow_header(self._limits.header_bytes)
        tar = tarfile.TarFile(
            fileobj=cast(IO[bytes], reader), mode="r", encoding="utf-8", errors="surrogateescape"
        )
        count = 0
        while (member := tar.next()) is not None:
            # tarfile remembers every member it saw; two million of them are gigabytes.
            cast(Any, tar).members = []
            count += 1
            if count > self._limits.entries:
                raise TooLarge(f"{self._label} has more than the allowed {self._limits.entries} entries.")
            yield member
            reader.allow_header(self._limits.header_bytes)
        self._check_end()

    def _check_end(self) -> None:
        """tarfile takes a damaged header for the end; only zeros, or nothing in a sealed stream, are one."""
        last = self._reader.last
        if last == b"\0" * _BLOCK or (last == b"" and self._sealed):
            return
        if last == b"":
            raise EOFError("the end-of-archive marker is missing")
        raise ValueError("a header in the middle is damaged")

    def _checked(self, member: tarfile.TarInfo) -> Entry:
        kind = _kind(member)
        size = member.size if kind == "file" else 0
        if size < 0 or size > self._limits.unpacked_bytes:
            raise TooLarge(f"{self._label}: {member.name!r} claims {size} bytes, more than allowed.")
        if not (0 <= member.uid <= _MAX_ID and 0 <= member.gid <= _MAX_ID):
            raise ValueError(f"{member.name!r} has an impossible owner {member.uid}:{member.gid}")
        return Entry(
            name=_bytes(member.name),
            kind=kind,
            mode=member.mode & 0o7777,
            uid=member.uid,
            gid=member.gid,
            mtime_ns=_mtime_ns(member),
            size=size,
            link=_bytes(member.linkname) if kind in ("symlink", "hardlink") else b"",
            xattrs=_xattrs(member.pax_headers),
            segments=_segments(member) if kind == "file" else None,
        )

    def _damaged(self, error: BaseException) -> ImageInvalid:
        if isinstance(error, EOFError) or "unexpected end" in str(error):
            what = f"is truncated ({error})"
        elif isinstance(error, tarfile.ReadError):
            what = f"is no tar archive ({error})"
        else:
            what = f"is damaged ({error or type(error).__name__})"
        return ImageInvalid(f"{self._label} {what}; fetch or export it again.")


def _kind(member: tarfile.TarInfo) -> EntryKind:
    if member.isreg():
        return "file"
    if member.isdir():
        return "directory"
    if member.issym():
        return "symlink"
    if member.islnk():
        return "hardlink"
    if member.isfifo():
        return "fifo"
    return "device" if member.isdev() else "other"


def _bytes(text: str) -> bytes:
    if "\0" in text:
        raise ValueError(f"the name {text!r} contains a NUL byte")
    return text.encode("utf-8", "surrogateescape")


def _mtime_ns(member: tarfile.TarInfo) -> int:
    # tarfile keeps the pax time as a float, which loses the nanoseconds.
    text = member.pax_headers.get("mtime")
    if text is None and isinstance(member.mtime, int) and 0 <= member.mtime <= _TIMES_S[1]:
        return member.mtime * 1_000_000_000
    try:
        seconds = Decimal(text) if text is not None else Decimal(int(member.mtime))
        if not seconds.is_finite():
            return 0
    except (InvalidOperation, ValueError, OverflowError):
        return 0
    low, high = _TIMES_S
    return int(min(max(seconds, Decimal(low)), Decimal(high)) * 1_000_000_000)


def _xattrs(headers: Mapping[str, str]) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for key, value in headers.items():
        if key.startswith("SCHILY.xattr."):
            found[key.removeprefix("SCHILY.xattr.")] = value.encode("utf-8", "surrogateescape")
        elif key.startswith("LIBARCHIVE.xattr."):
            name = unquote(key.removeprefix("LIBARCHIVE.xattr."))
            try:
                found.setdefault(name, base64.b64decode(value + "=" * (-len(value) % 4)))
            except binascii.Error:
                continue  # an attribute that nobody can read is as good as absent
    return found


def _segments(member: tarfile.TarInfo) -> tuple[tuple[int, int], ...] | None:
    sparse = cast("list[tuple[int, int]] | None", getattr(member, "sparse", None))
    if sparse is None:
        return None
    segments = tuple((offset, size) for offset, size in sparse if size)  # empty ones only pad the map
    end = 0
    for offset, size in segments:
        if offset < end or size < 0 or offset + size > member.size:
            raise ValueError(f"{member.name!r} has an impossible sparse map")
        end = offset + size
    return segments


def components(name: bytes, depth: int) -> tuple[bytes, ...]:
    """The path components of a name in an archive, relative to the image's root: `/a/./b/` gives `a`, `b`.

    Raises ImageInvalid for `..`, for names no file system takes and for more than `depth` components.
    """
    parts = tuple(part for part in name.split(b"/") if part not in (b"", b"."))
    if b".." in parts:
        raise ImageInvalid(
            f"The archive names {os.fsdecode(name)!r}: `..` leads outside; it is broken or hostile."
        )
    if len(parts) > depth or len(name) > 4095 or max(map(len, parts), default=0) > 255:
        raise ImageInvalid(f"The archive holds a name that is too long: {os.fsdecode(name[:80])!r}…")
    return parts
