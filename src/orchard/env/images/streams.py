"""Byte streams of archives: digests, decompression, and a reader that tarfile may drive forward only."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import importlib
import io
import lzma
import os
import zlib
from collections.abc import Callable
from typing import IO, Any, Protocol

from orchard.env.errors import ImageInvalid, TooLarge

_CHUNK = 256 * 1024
_XZ_MEMORY = 256 << 20

#: What decoders raise on damaged input. OSError is only theirs where no file is touched: `gzip.BadGzipFile`.
DAMAGE = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile, ValueError)


class Source(Protocol):
    """Anything that gives bytes in order; `b""` at the end."""

    def read(self, size: int = -1, /) -> bytes: ...


class Slice:
    """`size` bytes of an open file from `offset` on, read by position: several may share the file."""

    def __init__(self, fd: int, offset: int, size: int) -> None:
        self._fd = fd
        self._at = offset
        self._end = offset + size

    def read(self, size: int = -1, /) -> bytes:
        left = self._end - self._at
        data = os.pread(self._fd, left if size < 0 else min(size, left), self._at)
        self._at += len(data)
        return data

    def skip(self, size: int) -> int:
        """Pass over up to `size` bytes without reading them; how many there were."""
        size = min(size, self._end - self._at)
        self._at += size
        return size


class Hashing:
    """Passes bytes on and keeps their SHA-256 and number."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._hash = hashlib.sha256()
        self.size = 0

    def read(self, size: int = -1, /) -> bytes:
        data = self._source.read(size)
        self._hash.update(data)
        self.size += len(data)
        return data

    def drain(self, limit: int) -> None:
        """Read what is left, so that the digest covers all of it. Raises TooLarge beyond `limit` bytes in all."""
        while self.read(_CHUNK):
            if self.size > limit:
                raise TooLarge(
                    f"The archive holds more than the allowed {limit} bytes; import a smaller one."
                )

    @property
    def digest(self) -> str:
        """`sha256:…` of what was read so far."""
        return f"sha256:{self._hash.hexdigest()}"


class _BlockDecoder(Protocol):
    """The interface that bz2's and lzma's decoders share."""

    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int = -1) -> bytes: ...


class _Decoded:
    """Bytes decoded piece by piece, concatenated streams included, with bounded memory."""

    def __init__(self, source: Source, new_decoder: Callable[[], _BlockDecoder]) -> None:
        self._source = source
        self._new_decoder = new_decoder
        self._decoder = new_decoder()
        self._started = False

    def read(self, size: int = -1, /) -> bytes:
        size = _CHUNK if size < 0 else size
        while True:
            data = b""
            if self._decoder.eof:
                # Streams may follow each other, padded with NUL bytes as xz allows.
                data = self._decoder.unused_data.lstrip(b"\0") or self._source.read(_CHUNK).lstrip(b"\0")
                if not data:
                    return b""
                self._decoder = self._new_decoder()
            elif self._decoder.needs_input:
                data = self._source.read(_CHUNK)
                if not data:
                    raise EOFError("the compressed data ends too early")
            try:
                out = self._decoder.decompress(data, size)
            except OSError as error:  # what bz2 raises, without having touched a file
                raise ValueError(str(error)) from error
            if out:
                return out


_MAGIC: tuple[tuple[bytes, str], ...] = (
    (b"\x1f\x8b", "gzip"),
    (b"BZh", "bzip2"),
    (b"\xfd7zXZ\x00", "xz"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
)


def compression_of(head: bytes) -> str | None:
    """The compression that the first bytes of a file tell, or None."""
    return next((name for magic, name in _MAGIC if head.startswith(magic)), None)


class _Rejoined:
    """A source whose first bytes were already taken to look at."""

    def __init__(self, head: bytes, rest: Source) -> None:
        self._head = head
        self._rest = rest

    def read(self, size: int = -1, /) -> bytes:
        if not self._head:
            return self._rest.read(size)
        size = len(self._head) if size < 0 else size
        data, self._head = self._head[:size], self._head[size:]
        return data


def decompressed(source: Source) -> Source:
    """`source` decoded by what its first bytes say, or as it is. Raises ImageInvalid where no decoder exists."""
    head = b""
    while len(head) < 6 and (data := source.read(6 - len(head))):
        head += data
    whole = _Rejoined(head, source)
    match compression_of(head):
        case "gzip":
            return gzip.GzipFile(fileobj=_as_file(whole), mode="rb")
        case "bzip2":
            return _Decoded(whole, bz2.BZ2Decompressor)
        case "xz":
            return _Decoded(whole, lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, _XZ_MEMORY))
        case "zstd":
            return _zstd(whole)
        case _:
            return whole


def _zstd(source: Source) -> Source:
    """Zstandard through the standard library (Python 3.14) or the `zstandard` package, whichever exists."""
    try:
        return _Decoded(source, importlib.import_module("compression.zstd").ZstdDecompressor)
    except ModuleNotFoundError:
        pass
    try:
        package = importlib.import_module("zstandard")
    except ModuleNotFoundError:
        raise ImageInvalid(
            "The archive is compressed with Zstandard, which this Python cannot read: `pip install zstandard`, or "
            "store the image with gzip layers instead."
        ) from None
    errors: type[Exception] = package.ZstdError
    reader = package.ZstdDecompressor().stream_reader(_as_file(source), read_across_frames=True)
    return _Translated(reader, errors)


class _Translated:
    """Turns a foreign decoder's own exception into ValueError, one of `DAMAGE`."""

    def __init__(self, source: Source, errors: type[Exception]) -> None:
        self._source = source
        self._errors = errors

    def read(self, size: int = -1, /) -> bytes:
        try:
            return self._source.read(size)
        except self._errors as error:
            raise ValueError(str(error)) from error


def _as_file(source: Source) -> IO[bytes]:
    """A file object over a source, for libraries that want one."""

    class Raw(io.RawIOBase):
        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any, /) -> int:
            data = source.read(len(buffer))
            buffer[: len(data)] = data
            return len(data)

    return io.BufferedReader(Raw(), _CHUNK)


class ForwardReader:
    """What tarfile gets to see: `read`, `tell`, and `seek` forward only, which skips by reading.

    Two meters stop hostile input: `allow_header` grants tarfile a number of bytes for the next header, so that a
    name of 8 GiB is an error and not memory; `limit` bounds all bytes together.
    """

    def __init__(self, source: Source, *, limit: int) -> None:
        self._source = source
        self._skip = source.skip if isinstance(source, Slice) else None
        self._ahead = b""  # read from the source, from `_used` on not yet given out
        self._used = 0
        self._at = 0
        self._limit = limit
        self._granted = 0
        self._metered = False
        self.last = b""

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        if whence != 0 or offset < self._at:
            raise ValueError("the tar archive points backwards")
        while self._at < offset:
            wanted = offset - self._at
            if self._skip is not None and self._used == len(self._ahead):
                done = self._skip(wanted)
                self._count(done)
            else:
                done = len(self._some(wanted))
            if not done:
                raise EOFError("unexpected end of data")
        return self._at

    def read(self, size: int = -1, /) -> bytes:
        if size < 0 or (self._metered and size > self._granted):
            raise ValueError("a tar header is larger than any real one")
        self._granted -= size
        data = self._some(size)
        if len(data) < size and data:
            parts = [data]
            left = size - len(data)
            while left and (data := self._some(left)):
                parts.append(data)
                left -= len(data)
            data = b"".join(parts)
        self.last = data
        return data

    def allow_header(self, size: int) -> None:
        """The next reads are for headers, of `size` bytes together at most."""
        self._granted = size
        self._metered = True

    def allow_content(self) -> None:
        """The next reads are for an entry's content, whose reader keeps to its size."""
        self._metered = False

    def _some(self, size: int) -> bytes:
        """At least one and up to `size` bytes; none at the end."""
        if self._used == len(self._ahead):
            self._ahead, self._used = self._source.read(_CHUNK), 0
        data = self._ahead[self._used : self._used + size]
        self._used += len(data)
        self._count(len(data))
        return data

    def _count(self, size: int) -> None:
        self._at += size
        if self._at > self._limit:
            raise TooLarge(
                f"The archive holds more than the allowed {self._limit} bytes; import a smaller one."
            )
