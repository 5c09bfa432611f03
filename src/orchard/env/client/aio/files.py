"""Files in a sandbox: whole in memory, or as streams and trees of any size."""

from __future__ import annotations

import asyncio
import base64
import json
import os
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from contextlib import aclosing
from pathlib import Path
from stat import S_ISREG
from typing import TypeAlias

from orchard.env.client.aio import trees, watching
from orchard.env.client.flows import Outgoing
from orchard.env.client.transport import Repeat, Transport, build, encode, path_of
from orchard.env.contract import (
    MAX_JSON_FILE_BYTES,
    FileChange,
    FileContent,
    FileEntry,
    FileListing,
    FileRemoved,
    FileStat,
    FileWritten,
    MakeDirectory,
    MoveFile,
    Ok,
    decode_base64,
)
from orchard.env.errors import InfrastructureError, TooLarge

LocalPath: TypeAlias = str | os.PathLike[str]
#: A class with a method `list` cannot name the type in its annotations.
FileEntries: TypeAlias = list[FileEntry]
Chunks: TypeAlias = AsyncIterable[bytes] | Iterable[bytes]

#: Above this size, encoding is done on another thread so that other requests go on.
_THREAD_BYTES = 256 << 10
#: Removing a large tree may take the service this long.
_REMOVE_S = 660.0


class AsyncFiles:
    """The files of one sandbox: `sandbox.files`. Paths are absolute or relative to the working directory."""

    def __init__(self, transport: Transport, sandbox_id: str) -> None:
        self._transport = transport
        self._path = path_of("sandboxes", sandbox_id, "files")
        self._archive = path_of("sandboxes", sandbox_id, "archive")

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

    async def stream(self, path: str) -> AsyncIterator[bytes]:
        """The content of a file of any size, in pieces as they come.

        Raises `FileMissing`, `PathInvalid`, or `ConnectionFailed` when it breaks off before its end: because the
        connection or the sandbox did, or because the file was replaced.
        """
        url = self._path + "/content"
        async with aclosing(self._transport.open_stream(url, [("path", path)], again=True)) as pieces:
            async for piece in pieces:
                yield piece

    async def write_stream(self, path: str, chunks: Chunks, *, mode: int | None = None) -> FileWritten:
        """Write a file of any size from pieces of bytes, with its parent directories; it appears when they have ended,
        whole, or not at all.

        chunks: an iterator is sent once; after a lost connection only what can be iterated again (a list) is sent
        again. mode: permission bits. What `chunks` raises is raised here. Raises `PathInvalid`, `DiskFull`.
        """
        once = isinstance(chunks, AsyncIterator | Iterator)
        body = Outgoing(lambda: _each(chunks), "application/octet-stream", once=once)
        return await self._put(path, body, mode)

    async def stat(self, path: str, *, follow: bool = False) -> FileStat:
        """What is at `path`: type, size, mode, time. Of a link, the link itself, unless `follow`. Raises
        `FileMissing`."""
        query = [("path", path), ("follow", "true" if follow else "false")]
        return await self._transport.call("GET", self._path + "/stat", FileStat, query=query)

    async def mkdir(self, path: str, *, parents: bool = False, mode: int | None = None) -> None:
        """Make a directory. parents: make those above it too, and accept one that is there already; without it that
        is a `Conflict`. mode: permission bits (default 0o755)."""
        request = build(MakeDirectory, path=path, parents=parents, mode=mode)
        # Without `parents` a repeat of what was done already would be told that the directory exists.
        repeat = Repeat.SAFE if parents else Repeat.UNSENT_ONLY
        await self._transport.call("POST", self._path + "/mkdir", Ok, body=encode(request), repeat=repeat)

    async def move(self, source: str, target: str, *, overwrite: bool = False) -> None:
        """Rename in one step, making the directories on the way. overwrite: replace a file, a link or an empty
        directory at `target`, which is a `Conflict` otherwise. Raises `FileMissing`."""
        request = build(MoveFile, source=source, target=target, overwrite=overwrite)
        await self._transport.call(
            "POST", self._path + "/move", Ok, body=encode(request), repeat=Repeat.UNSENT_ONLY
        )

    async def remove(self, path: str, *, recursive: bool = False) -> None:
        """Remove a file, a link (not what it leads to) or a directory. recursive: with everything in it; without it
        a directory that is not empty is a `Conflict`. Raises `FileMissing`."""
        query = [("path", path), ("recursive", "true" if recursive else "false")]
        await self._transport.call(
            "DELETE", self._path, FileRemoved, query=query, repeat=Repeat.UNSENT_ONLY, silence_s=_REMOVE_S
        )

    async def watch(self, path: str, *, recursive: bool = False) -> AsyncIterator[FileChange]:
        """What happens to a file, or to what is in a directory, as it happens. The first one is of type `open`: from
        there on nothing is missed. It ends when what is watched is gone.

        recursive: everything below the directory too. A `gap` says that changes may have been missed (they came
        faster than they were read, or the connection was lost): look at the files anew. Raises `FileMissing`, or the
        sandbox's end.
        """
        query = [("path", path), ("recursive", "true" if recursive else "false")]
        async with aclosing(watching.follow(self._transport, self._path + "/watch", query, path)) as changes:
            async for change in changes:
                yield change

    async def upload(self, local: LocalPath, remote: str) -> None:
        """Copy a file or a directory of any size from here into the sandbox, as `remote` itself; modes are kept, and
        in a directory times.

        In a directory, links that point inside it stay links; one that points outside, and anything that is
        no file, directory or link, is refused with `PathInvalid` before anything is sent.
        """
        source = Path(local)
        if await asyncio.to_thread(source.is_dir):
            await trees.upload(self._transport, self._archive, source, remote)
            return
        status = await asyncio.to_thread(source.stat)
        # A pipe can be read once only.
        body = Outgoing(
            lambda: trees.threaded(trees.read_file(source)),
            "application/octet-stream",
            once=not S_ISREG(status.st_mode),
        )
        await self._put(remote, body, status.st_mode & 0o777)

    async def download(self, remote: str, local: LocalPath) -> None:
        """Copy a file or a directory from the sandbox to `local` itself, creating parent directories.

        A file appears when it is whole. Nothing is ever written outside `local`: links that would lead outside are
        refused with `PathInvalid`.
        """
        found = await self.stat(remote, follow=True)
        if found.type == "directory":
            await trees.download_tree(self._transport, self._archive, remote, Path(local))
            return
        await trees.download_file(self._transport, self._path + "/content", remote, Path(local), found.mode)

    async def list(self, path: str = "/") -> FileEntries:
        """The entries of a directory. Raises `FileMissing` or `PathInvalid`."""
        query = [("path", path)]
        return (await self._transport.call("GET", self._path + "/list", FileListing, query=query)).files

    async def _put(self, path: str, body: Outgoing, mode: int | None) -> FileWritten:
        query = [("path", path), *([] if mode is None else [("mode", f"{mode:04o}")])]
        return await self._transport.call("PUT", self._path + "/content", FileWritten, body=body, query=query)


async def _each(chunks: Chunks) -> AsyncIterator[bytes]:
    if isinstance(chunks, AsyncIterable):
        async for chunk in chunks:
            yield chunk
        return
    # Whatever makes them may take its time: other requests go on meanwhile.
    async for chunk in trees.threaded(iter(chunks)):
        yield chunk


def _check_size(size: int, name: str) -> None:
    if size > MAX_JSON_FILE_BYTES:
        raise TooLarge(
            f"{name} has {size} bytes, more than the {MAX_JSON_FILE_BYTES >> 20} MiB of one file:"
            " use `write_stream` or `upload`"
        )


def _content(raw: bytes) -> bytes:
    try:
        return decode_base64(FileContent.model_validate_json(raw).content)
    except ValueError as error:
        raise InfrastructureError(f"the service sent a file that cannot be read: {error!s:.200}") from None


def _write_body(path: str, data: bytes, mode: int | None) -> bytes:
    head = json.dumps({"path": path, **({} if mode is None else {"mode": mode})}).encode()
    return b'%b,"content":"%b"}' % (head[:-1], base64.b64encode(data))
