"""Trees as tar archives: made from the agent's listings and reads, and turned into its writes, as they flow."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from orchard.env import tars
from orchard.env.errors import ArchiveInvalid, Conflict, FileMissing, OrchardError, PathInvalid
from orchard.env.orchestrator.agents import Agents
from orchard.env.orchestrator.files import Files, check_path
from orchard.env.orchestrator.sandbox import Sandbox

_PAGE = 5000
#: Bytes of small entries that are sent together.
_BATCH_BYTES = 256 << 10


@dataclass(slots=True)
class _Folder:
    """A directory under way: what of it was listed and not yet visited, and where its listing goes on."""

    name: str
    entries: deque[dict[str, Any]] = field(default_factory=deque)
    after: str | None = ""


class Archives:
    def __init__(self, agents: Agents, files: Files) -> None:
        self._agents = agents
        self._files = files

    # ------------------------------------------------------------------------------------------------ out

    async def pack(self, sandbox: Sandbox, path: str) -> AsyncGenerator[bytes, None]:
        """The archive of what is below the directory `path`, in pieces. Links stay links; hard links are files of
        their own; sockets, FIFOs and devices are left out, and so is what vanishes meanwhile."""
        top = await self._files.stat(sandbox, path, follow=True)
        if top["type"] != "directory":
            raise PathInvalid(f"{path!r} is no directory; read a file as files/content")
        batch = bytearray(tars.header(_described("", top)))
        folders = [_Folder("")]
        while folders:
            folder = folders[-1]
            if not folder.entries:
                if folder.after is None or not await self._list(sandbox, path, folder):
                    folders.pop()
                continue
            found = folder.entries.popleft()
            name = f"{folder.name}/{found['name']}" if folder.name else found["name"]
            if found["type"] == "file":
                async for piece in self._file(sandbox, path, name, found):
                    batch += piece
                    if len(batch) >= _BATCH_BYTES:
                        yield bytes(batch)
                        batch.clear()
            elif found["type"] in ("directory", "symlink"):
                batch += tars.header(_described(name, found))
            if found["type"] == "directory":
                folders.append(_Folder(name))
        yield bytes(batch) + tars.END

    async def _list(self, sandbox: Sandbox, path: str, folder: _Folder) -> bool:
        """Read the next page of a folder; False when there is none."""
        try:
            page, _ = await self._agents.call(
                sandbox, "list", path=folder.name or ".", root=path, raw=True, after=folder.after, limit=_PAGE
            )
        except FileMissing:
            if not folder.name:
                raise
            return False
        folder.entries.extend(page["files"])
        folder.after = page.get("more")
        return bool(folder.entries) or folder.after is not None

    async def _file(
        self, sandbox: Sandbox, path: str, name: str, found: dict[str, Any]
    ) -> AsyncGenerator[bytes, None]:
        try:
            content = await self._files.open(sandbox, name, root=path)
        except FileMissing:
            return
        if content.size is None:
            raise PathInvalid(
                f"{name!r} below {path!r} does not tell its size, as an archive must; read it alone"
            )
        yield tars.header(_described(name, found, content.size))
        async for piece in content:
            yield piece
        yield tars.padding(content.size)

    # ------------------------------------------------------------------------------------------------- in

    async def unpack(self, sandbox: Sandbox, path: str, pieces: AsyncIterator[bytes]) -> dict[str, int]:
        """Make the archive's entries below the directory `path`: how many, and the bytes of their files.

        A directory that is not there yet appears whole, with the end of the archive; one that is there is filled
        file by file. Raises `ArchiveInvalid`, naming the entry.
        """
        check_path(path)
        place, slash, name = path.rstrip("/").rpartition("/")
        if not name or name in (".", "..") or await self._exists(sandbox, path):
            return await _Unpacking(self, sandbox, path).run(pieces)
        staged = f"{place}{slash}.{name[:100]}.orchard-{os.urandom(6).hex()}"
        try:
            await self._agents.call(sandbox, "mkdir", path=staged, parents=True)
            counts = await _Unpacking(self, sandbox, staged).run(pieces)
            await self._agents.call(sandbox, "move", source=staged, target=path)
            return counts
        except BaseException:
            try:
                await self._files.remove(sandbox, staged, recursive=True)
            except OrchardError:
                pass  # it was never made, or is gone with the sandbox
            raise

    async def _exists(self, sandbox: Sandbox, path: str) -> bool:
        try:
            found = await self._files.stat(sandbox, path, follow=True)
        except FileMissing:
            return False
        if found["type"] != "directory":
            raise PathInvalid(f"{path!r} is a {found['type']}, no directory to unpack into")
        return True


class _Unpacking:
    """One archive on its way in. Directories get their mode and time when the archive has left them, since filling
    them needs the one and changes the other."""

    def __init__(self, archives: Archives, sandbox: Sandbox, root: str) -> None:
        self._agents = archives._agents
        self._files = archives._files
        self._sandbox = sandbox
        self._root = root
        self._folders: list[tars.Entry] = []
        self._entries = 0
        self._bytes = 0

    async def run(self, pieces: AsyncIterator[bytes]) -> dict[str, int]:
        reader = tars.Reader()
        events = _events(reader, pieces)
        async for event in events:
            assert isinstance(event, tars.Entry), "content is taken with its entry"
            try:
                await self._make(event, events)
            except (PathInvalid, Conflict) as error:
                if isinstance(error, ArchiveInvalid):
                    raise
                raise ArchiveInvalid(
                    f"the entry {event.name!r:.200} cannot be made below {self._root!r}: {error.detail};"
                    " nothing is written through a link"
                ) from None
            self._entries += 1
        reader.finish()
        await self._leave("")
        while self._folders:
            await self._close(self._folders.pop())
        return {"entries": self._entries, "size": self._bytes}

    async def _make(self, entry: tars.Entry, events: AsyncIterator[tars.Entry | bytes]) -> None:
        await self._leave(entry.name)
        if entry.kind == "directory":
            if entry.name:
                await self._call("mkdir", entry, parents=True, mode=0o700)
            self._folders.append(entry)
        elif entry.kind == "symlink":
            tars.check_link(entry)
            await self._call("symlink", entry, target=entry.target, modified_ns=entry.modified_ns)
        else:
            await self._write(entry, events)

    async def _write(self, entry: tars.Entry, events: AsyncIterator[tars.Entry | bytes]) -> None:
        if entry.kind == "hardlink":
            try:
                content = aiter(await self._files.open(self._sandbox, entry.target, root=self._root))
            except FileMissing:
                raise ArchiveInvalid(
                    f"the entry {entry.name!r:.200} is a hard link to {entry.target!r:.200}, which does not come before it"
                ) from None
        else:
            content = _content(events, entry.size)
        self._bytes += await self._files.write_stream(
            self._sandbox,
            entry.name,
            content,
            mode=entry.mode,
            root=self._root,
            modified_ns=entry.modified_ns,
        )

    async def _call(self, op: str, entry: tars.Entry, **fields: Any) -> None:
        await self._agents.call(self._sandbox, op, path=entry.name or ".", root=self._root, **fields)

    async def _leave(self, name: str) -> None:
        """Close the directories under way that do not hold `name`."""
        while self._folders and self._folders[-1].name and not name.startswith(self._folders[-1].name + "/"):
            await self._close(self._folders.pop())

    async def _close(self, folder: tars.Entry) -> None:
        await self._call("attributes", folder, mode=folder.mode, modified_ns=folder.modified_ns)


def _described(name: str, found: dict[str, Any], size: int = 0) -> tars.Entry:
    return tars.Entry(name, found["type"], size, found["mode"], found["modified_ns"], found.get("target", ""))


async def _events(reader: tars.Reader, pieces: AsyncIterator[bytes]) -> AsyncIterator[tars.Entry | bytes]:
    async for piece in pieces:
        for event in reader.feed(piece):
            yield event


async def _content(events: AsyncIterator[tars.Entry | bytes], size: int) -> AsyncGenerator[bytes, None]:
    """The content of the entry that was read last."""
    while size:
        try:
            piece = await anext(events)
        except StopAsyncIteration:
            raise ArchiveInvalid("the tar archive breaks off within a file; send it again, whole") from None
        assert isinstance(piece, bytes)
        size -= len(piece)
        yield piece
