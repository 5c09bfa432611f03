"""Where the files of an image archive lie: a directory, or the inside of a tar, compressed or not."""

from __future__ import annotations

import os
import posixpath
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from orchard.env.errors import DiskFull, FileMissing, ImageInvalid, InvalidRequest, OrchardError, TooLarge
from orchard.env.images.area import no_space
from orchard.env.images.entries import TarEntries, components
from orchard.env.images.limits import ImportLimits
from orchard.env.images.streams import DAMAGE, Slice, compression_of, decompressed

_CHUNK = 1 << 20
#: No image archive has more files than this; a root file system has.
_MAX_FILES = 5_000


class Bundle(Protocol):
    """Named files of an archive. label: how to call it in an error."""

    label: str

    def size(self, name: str) -> int | None:
        """The size of a file in bytes, or None where there is none of that name."""
        ...

    @contextmanager
    def open(self, name: str) -> Iterator[Slice]:
        """The bytes of a file. Raises ImageInvalid where it is missing."""
        ...


class DirectoryBundle:
    """Files below a directory. Symbolic links in it are not followed: they could name files of this machine."""

    def __init__(self, path: Path) -> None:
        self.label = str(path)
        self._path = path

    def size(self, name: str) -> int | None:
        fd = self._open(name)
        if fd is None:
            return None
        try:
            return os.fstat(fd).st_size
        finally:
            os.close(fd)

    @contextmanager
    def open(self, name: str) -> Iterator[Slice]:
        fd = self._open(name)
        if fd is None:
            raise _missing(self.label, name)
        try:
            yield Slice(fd, 0, os.fstat(fd).st_size)
        finally:
            os.close(fd)

    def _open(self, name: str) -> int | None:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        parts = components(os.fsencode(name), 16)
        fd = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        for part in parts:
            try:
                inner = os.open(part, flags, dir_fd=fd)
            except (FileNotFoundError, NotADirectoryError):
                return None
            except OSError as error:
                raise ImageInvalid(
                    f"{self.label}: {name!r} is unreadable or a symbolic link ({error.strerror}); links are not "
                    f"followed, copy the layout with `cp -rL` first."
                ) from error
            finally:
                os.close(fd)
            fd = inner
        if stat.S_ISREG(os.fstat(fd).st_mode):
            return fd
        os.close(fd)
        return None


class TarBundle:
    """Files inside an uncompressed tar, read by position."""

    def __init__(self, fd: int, label: str, limits: ImportLimits) -> None:
        self.label = label
        self._fd = fd
        self._files: dict[str, tuple[int, int]] = {}
        self._links: dict[str, str] = {}
        self.plain = not self._index(limits)

    def whole(self) -> Slice:
        """The tar itself."""
        return Slice(self._fd, 0, os.fstat(self._fd).st_size)

    def size(self, name: str) -> int | None:
        place = self._files.get(self._followed(name))
        return None if place is None else place[1]

    @contextmanager
    def open(self, name: str) -> Iterator[Slice]:
        place = self._files.get(self._followed(name))
        if place is None:
            raise _missing(self.label, name)
        yield Slice(self._fd, *place)

    def _index(self, limits: ImportLimits) -> bool:
        """Note where files lie; False when there are too many for an image archive."""
        entries = TarEntries(self.whole(), limits, label=self.label)
        for entry in entries:
            name = os.fsdecode(b"/".join(components(entry.name, limits.depth)))
            if entry.kind == "file" and entry.segments is None:
                self._files[name] = (entries.offset, entry.size)
            elif entry.kind == "symlink":
                self._links[name] = posixpath.join(posixpath.dirname(name), os.fsdecode(entry.link))
            elif entry.kind == "hardlink":
                self._links[name] = os.fsdecode(entry.link)
            if len(self._files) + len(self._links) > _MAX_FILES:
                return False
        return True

    def _followed(self, name: str) -> str:
        # Old versions of `docker save` store a layer that occurs twice as a link to its first place.
        for _ in range(8):
            name = posixpath.normpath(name).lstrip("/")
            if name not in self._links:
                break
            name = self._links[name]
        return name


def _missing(label: str, name: str) -> ImageInvalid:
    return ImageInvalid(f"{label} lacks {name!r}, which it refers to; export the image again, whole.")


@contextmanager
def open_bundle(path: Path, scratch: Path, limits: ImportLimits) -> Iterator[DirectoryBundle | TarBundle]:
    """The archive at `path`. scratch: where a compressed one is opened.

    Raises FileMissing, InvalidRequest for what is neither file nor directory, ImageInvalid for what is no tar.
    """
    fd = _open_archive(path)
    try:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            yield DirectoryBundle(path)
            return
        if compression_of(os.pread(fd, 8, 0)) is not None:
            opened = _spooled(fd, path, scratch / "archive.tar", limits)
            os.close(fd)
            fd = opened
        yield TarBundle(fd, str(path), limits)
    finally:
        os.close(fd)


def _open_archive(path: Path) -> int:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        raise FileMissing(f"There is no archive at {str(path)!r}.") from None
    except OSError as error:
        raise InvalidRequest(f"The archive {str(path)!r} is not readable: {error.strerror}.") from error
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        return fd
    os.close(fd)
    raise InvalidRequest(f"{str(path)!r} is neither a file nor a directory; images are imported from those.")


def _spooled(source_fd: int, path: Path, target: Path, limits: ImportLimits) -> int:
    """Decompress into a nameless file, since the parts of an archive are read in another order; its descriptor."""
    fd = os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    target.unlink()
    try:
        _decompress(source_fd, fd, str(path), limits.unpacked_bytes)
    except BaseException as error:
        os.close(fd)
        if isinstance(error, OrchardError):
            raise
        if isinstance(error, DAMAGE):
            raise ImageInvalid(
                f"{path} is damaged or truncated ({error}); fetch or export it again."
            ) from error
        if isinstance(error, OSError) and no_space(error):
            raise DiskFull(
                f"The disk is full while decompressing {str(path)!r}; free space, import again."
            ) from error
        raise
    return fd


def _decompress(source_fd: int, target_fd: int, label: str, limit: int) -> None:
    stream = decompressed(Slice(source_fd, 0, os.fstat(source_fd).st_size))
    total = 0
    while data := stream.read(_CHUNK):
        total += len(data)
        if total > limit:
            raise TooLarge(f"{label}: more than the allowed {limit} bytes when decompressed.")
        view = memoryview(data)
        while view:
            view = view[os.write(target_fd, view) :]
