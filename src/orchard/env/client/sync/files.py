# Generated from aio/files.py by tools/generate_sync_client.py; change that and run it.
"""Files in a sandbox: whole in memory, or as streams and trees of any size."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import TypeAlias

from orchard.env.client.aio.files import AsyncFiles
from orchard.env.client.portal import Portal
from orchard.env.contract import FileChange, FileEntry, FileStat, FileWritten

LocalPath: TypeAlias = str | os.PathLike[str]

FileEntries: TypeAlias = list[FileEntry]

Chunks: TypeAlias = Iterable[bytes]


class Files:
    """The files of one sandbox: `sandbox.files`. Paths are absolute or relative to the working directory."""

    def __init__(self, portal: Portal, wrapped: AsyncFiles) -> None:
        self._portal = portal
        self._async = wrapped

    def read(self, path: str) -> bytes:
        """The content of a file. Raises `FileMissing`, or `PathInvalid` if it is not a regular file."""
        return self._portal.call(self._async.read(path))

    def read_text(self, path: str, *, encoding: str = "utf-8", errors: str = "strict") -> str:
        """The content of a file as text."""
        return self._portal.call(self._async.read_text(path, encoding=encoding, errors=errors))

    def write(self, path: str, data: bytes | str, *, mode: int | None = None) -> FileWritten:
        """Write a file, with its parent directories; it appears whole or not at all. Text becomes UTF-8.

        mode: permission bits such as 0o755. Raises `PathInvalid`, or `TooLarge` above 256 MiB.
        """
        return self._portal.call(self._async.write(path, data, mode=mode))

    def stream(self, path: str) -> Iterator[bytes]:
        """The content of a file of any size, in pieces as they come.

        Raises `FileMissing`, `PathInvalid`, or `ConnectionFailed` when it breaks off before its end: because the
        connection or the sandbox did, or because the file was replaced.
        """
        yield from self._portal.iterate(self._async.stream(path))

    def write_stream(self, path: str, chunks: Chunks, *, mode: int | None = None) -> FileWritten:
        """Write a file of any size from pieces of bytes, with its parent directories; it appears when they have ended,
        whole, or not at all.

        chunks: an iterator is sent once; after a lost connection only what can be iterated again (a list) is sent
        again. mode: permission bits. What `chunks` raises is raised here. Raises `PathInvalid`, `DiskFull`.
        """
        return self._portal.call(self._async.write_stream(path, chunks, mode=mode))

    def stat(self, path: str, *, follow: bool = False) -> FileStat:
        """What is at `path`: type, size, mode, time. Of a link, the link itself, unless `follow`. Raises
        `FileMissing`."""
        return self._portal.call(self._async.stat(path, follow=follow))

    def mkdir(self, path: str, *, parents: bool = False, mode: int | None = None) -> None:
        """Make a directory. parents: make those above it too, and accept one that is there already; without it that
        is a `Conflict`. mode: permission bits (default 0o755)."""
        self._portal.call(self._async.mkdir(path, parents=parents, mode=mode))

    def move(self, source: str, target: str, *, overwrite: bool = False) -> None:
        """Rename in one step, making the directories on the way. overwrite: replace a file, a link or an empty
        directory at `target`, which is a `Conflict` otherwise. Raises `FileMissing`."""
        self._portal.call(self._async.move(source, target, overwrite=overwrite))

    def remove(self, path: str, *, recursive: bool = False) -> None:
        """Remove a file, a link (not what it leads to) or a directory. recursive: with everything in it; without it
        a directory that is not empty is a `Conflict`. Raises `FileMissing`."""
        self._portal.call(self._async.remove(path, recursive=recursive))

    def watch(self, path: str, *, recursive: bool = False) -> Iterator[FileChange]:
        """What happens to a file, or to what is in a directory, as it happens. The first one is of type `open`: from
        there on nothing is missed. It ends when what is watched is gone.

        recursive: everything below the directory too. A `gap` says that changes may have been missed (they came
        faster than they were read, or the connection was lost): look at the files anew. Raises `FileMissing`, or the
        sandbox's end.
        """
        yield from self._portal.iterate(self._async.watch(path, recursive=recursive))

    def upload(self, local: LocalPath, remote: str) -> None:
        """Copy a file or a directory of any size from here into the sandbox, as `remote` itself; modes are kept, and
        in a directory times.

        In a directory, links that point inside it stay links; one that points outside, and anything that is
        no file, directory or link, is refused with `PathInvalid` before anything is sent.
        """
        self._portal.call(self._async.upload(local, remote))

    def download(self, remote: str, local: LocalPath) -> None:
        """Copy a file or a directory from the sandbox to `local` itself, creating parent directories.

        A file appears when it is whole. Nothing is ever written outside `local`: links that would lead outside are
        refused with `PathInvalid`.
        """
        self._portal.call(self._async.download(remote, local))

    def list(self, path: str = "/") -> FileEntries:
        """The entries of a directory. Raises `FileMissing` or `PathInvalid`."""
        return self._portal.call(self._async.list(path))
