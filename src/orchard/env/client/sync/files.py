# Generated from aio/files.py by tools/generate_sync_client.py; change that and run it.
"""Files in a sandbox, whole: the service moves them in chunks, this API holds one file in memory."""

from __future__ import annotations

import os
from typing import TypeAlias

from orchard.env.client.aio.files import AsyncFiles
from orchard.env.client.portal import Portal
from orchard.env.contract import FileEntry, FileWritten

LocalPath: TypeAlias = str | os.PathLike[str]

FileEntries: TypeAlias = list[FileEntry]


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

    def upload(self, local: LocalPath, remote: str) -> None:
        """Copy a file or a directory from here into the sandbox, as `remote` itself; modes are kept.

        In a directory, links that point inside it stay links; one that points outside, and anything that is
        no file, directory or link, is refused with `PathInvalid` before anything is sent.
        """
        self._portal.call(self._async.upload(local, remote))

    def download(self, remote: str, local: LocalPath) -> None:
        """Copy a file or a directory from the sandbox to `local` itself, creating parent directories.

        Nothing is ever written outside `local`: links that would lead outside are refused with `PathInvalid`.
        """
        self._portal.call(self._async.download(remote, local))

    def list(self, path: str = "/") -> FileEntries:
        """The entries of a directory. Raises `FileMissing` or `PathInvalid`."""
        return self._portal.call(self._async.list(path))
