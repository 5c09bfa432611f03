"""Files in a sandbox, whole: the service moves them in chunks, this API holds one file in memory."""

from __future__ import annotations

import asyncio
import base64
import json
import os
from pathlib import Path
from typing import TypeAlias

from orchard.env.client.aio import trees
from orchard.env.client.transport import Transport, path_of
from orchard.env.contract import (
    MAX_JSON_FILE_BYTES,
    FileContent,
    FileEntry,
    FileListing,
    FileWritten,
    decode_base64,
)
from orchard.env.errors import InfrastructureError, TooLarge

LocalPath: TypeAlias = str | os.PathLike[str]
#: A class with a method `list` cannot name the type in its annotations.
FileEntries: TypeAlias = list[FileEntry]

#: Above this size, encoding is done on another thread so that other requests go on.
_THREAD_BYTES = 256 << 10


class AsyncFiles:
    """The files of one sandbox: `sandbox.files`. Paths are absolute or relative to the working directory."""

    def __init__(self, transport: Transport, sandbox_id: str) -> None:
        self._transport = transport
        self._sandbox_id = sandbox_id
        self._path = path_of("sandboxes", sandbox_id, "files")

    async def read(self, path: str) -> bytes:
        """The content of a file. Raises `FileMissing`, or `PathInvalid` if it is not a regular file."""
        raw = await self._transport.request("GET", self._path, query=[("path", path)])
        if len(raw) > _THREAD_BYTES:
            return await asyncio.to_thread(_content, raw)
        return _content(raw)

    async def read_text(self, path: str, *, encoding: str = "utf-8", errors: str = "strict") -> str:
        """The content of a file as text."""
        return (await self.read(path)).decode(encoding, errors)

    async def write(self, path: str, data: bytes | str, *, mode: int | None = None) -> FileWritten:
        """Write a file, with its parent directories; it appears whole or not at all. Text becomes UTF-8.

        mode: permission bits such as 0o755. Raises `PathInvalid`, or `TooLarge` above 256 MiB.
        """
        raw = data.encode() if isinstance(data, str) else bytes(data)
        _check_size(len(raw), path)
        if len(raw) > _THREAD_BYTES:
            body = await asyncio.to_thread(_write_body, path, raw, mode)
        else:
            body = _write_body(path, raw, mode)
        return await self._transport.call("POST", self._path, FileWritten, body=body)

    async def upload(self, local: LocalPath, remote: str) -> None:
        """Copy a file or a directory from here into the sandbox, as `remote` itself; modes are kept.

        In a directory, links that point inside it stay links; one that points outside, and anything that is
        no file, directory or link, is refused with `PathInvalid` before anything is sent.
        """
        source = Path(local)
        if await asyncio.to_thread(source.is_dir):
            await trees.upload(self._transport, self._sandbox_id, self, source, remote)
            return
        status = await asyncio.to_thread(source.stat)
        _check_size(status.st_size, str(source))
        data = await asyncio.to_thread(source.read_bytes)
        await self.write(remote, data, mode=status.st_mode & 0o777)

    async def download(self, remote: str, local: LocalPath) -> None:
        """Copy a file or a directory from the sandbox to `local` itself, creating parent directories.

        Nothing is ever written outside `local`: links that would lead outside are refused with `PathInvalid`.
        """
        await trees.download(self, remote, Path(local))

    async def list(self, path: str = "/") -> FileEntries:
        """The entries of a directory. Raises `FileMissing` or `PathInvalid`."""
        query = [("path", path)]
        return (await self._transport.call("GET", self._path + "/list", FileListing, query=query)).files


def _check_size(size: int, name: str) -> None:
    if size > MAX_JSON_FILE_BYTES:
        raise TooLarge(
            f"{name} has {size} bytes, more than the {MAX_JSON_FILE_BYTES >> 20} MiB of one file:"
            " split it, or let the sandbox fetch it"
        )


def _content(raw: bytes) -> bytes:
    try:
        return decode_base64(FileContent.model_validate_json(raw).content)
    except ValueError as error:
        raise InfrastructureError(f"the service sent a file that cannot be read: {error!s:.200}") from None


def _write_body(path: str, data: bytes, mode: int | None) -> bytes:
    head = json.dumps({"path": path, **({} if mode is None else {"mode": mode})}).encode()
    return b'%b,"content":"%b"}' % (head[:-1], base64.b64encode(data))
