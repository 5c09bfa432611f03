"""Files and listings, moved to and from the agent in pieces: whole for JSON, or as streams of any size."""

from __future__ import annotations

import base64
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Any

from orchard.env.agent.wire import CHUNK_BYTES
from orchard.env.contract import MAX_JSON_FILE_BYTES
from orchard.env.errors import Conflict, OrchardError, PathInvalid, TooLarge
from orchard.env.orchestrator.agents import Agents
from orchard.env.orchestrator.sandbox import Sandbox

#: One piece of a stream: what each stream under way takes of memory, here and in the agent, a few times over.
STREAM_BYTES = 1 << 20
#: A file that is replaced again and again is not read anew for ever.
_READS = 5
#: A watch that has nothing to tell says so this often.
WATCH_KEEPALIVE_S = 10.0
#: A directory that others fill as fast as it is emptied is given up on.
_REMOVE_S = 600.0


@dataclass(slots=True)
class Content:
    """A file that is being read. size: its bytes, None where it does not tell (as in /proc). Iterate once: exactly
    `size` bytes come, or an error. Raises `Conflict` when it is replaced or gets shorter meanwhile."""

    agents: Agents
    sandbox: Sandbox
    request: dict[str, Any]
    first: bytes
    size: int | None

    async def __aiter__(self) -> AsyncGenerator[bytes, None]:
        data, offset = self.first, 0
        self.first = b""
        while data:
            left = len(data) if self.size is None else self.size - offset
            yield data[:left]
            offset += len(data)
            if self.size is not None and offset >= self.size:
                return
            _, data = await self.agents.call(self.sandbox, "read", offset=offset, **self.request)
        if self.size is not None and offset < self.size:
            raise Conflict(f"{self.request['path']!r} got shorter while it was read; read it again")


class Files:
    def __init__(self, agents: Agents) -> None:
        self._agents = agents

    # ------------------------------------------------------------------------------------------- content

    async def open(self, sandbox: Sandbox, path: str, root: str | None = None) -> Content:
        """Begin to read a file; below `root` and through no link where one is given."""
        check_path(path)
        request = {"path": path, "limit": STREAM_BYTES, **({} if root is None else {"root": root})}
        header, data = await self._agents.call(sandbox, "read", offset=0, **request)
        request["identity"] = header["identity"]
        if header["eof"] or len(data) < STREAM_BYTES:
            # Also of a file that grows meanwhile: what was read at once is whole.
            return Content(self._agents, sandbox, request, data, len(data))
        return Content(self._agents, sandbox, request, data, header["size"] or None)

    async def write_stream(
        self, sandbox: Sandbox, path: str, pieces: AsyncIterator[bytes], **fields: Any
    ) -> int:
        """Replace a file, in one step at the end; its size in bytes. Whatever ends it before leaves nothing.

        fields: `mode` (permission bits; None keeps those of the file there, or takes the agent's default), `root`,
        `modified_ns`.
        """
        check_path(path)
        upload = os.urandom(8).hex()
        request = {
            "path": path,
            "upload": upload,
            **{name: value for name, value in fields.items() if value is not None},
        }
        buffer = bytearray()
        offset = 0
        try:
            async for piece in pieces:
                buffer += piece
                if len(buffer) >= STREAM_BYTES:
                    await self._agents.call(
                        sandbox, "write", bytes(buffer), offset=offset, last=False, **request
                    )
                    offset += len(buffer)
                    buffer.clear()
            await self._agents.call(sandbox, "write", bytes(buffer), offset=offset, last=True, **request)
            return offset + len(buffer)
        except BaseException:
            # Also when the first piece was not answered: it may have arrived.
            await self._abort(sandbox, upload)
            raise

    async def _abort(self, sandbox: Sandbox, upload: str) -> None:
        try:
            await self._agents.call(sandbox, "abort", upload=upload)
        except OrchardError:
            pass  # what it was sent for is gone with the sandbox, or goes with the connection

    async def write(self, sandbox: Sandbox, path: str, content: str, mode: int | None) -> int:
        """Replace a file by base64 `content`; see `write_stream`."""
        data = base64.b64decode(content)
        if len(data) > MAX_JSON_FILE_BYTES:
            raise TooLarge(
                f"the file has {len(data)} bytes; this endpoint takes at most {MAX_JSON_FILE_BYTES}: PUT"
                " files/content takes any"
            )
        return await self.write_stream(sandbox, path, _pieces(data), mode=mode)

    async def read(self, sandbox: Sandbox, path: str) -> bytes:
        """A whole file. Raises `TooLarge` beyond what JSON should hold."""
        for attempt in range(_READS):
            try:
                return await self._read(sandbox, path)
            except Conflict:
                if attempt + 1 == _READS:
                    raise
        raise AssertionError("unreachable")

    async def _read(self, sandbox: Sandbox, path: str) -> bytes:
        content = await self.open(sandbox, path)
        parts: list[bytes] = []
        size = content.size or 0
        if size <= MAX_JSON_FILE_BYTES:
            size = 0
            async for piece in content:
                parts.append(piece)
                size += len(piece)
                if size > MAX_JSON_FILE_BYTES:
                    break
        if size > MAX_JSON_FILE_BYTES:
            raise TooLarge(
                f"{path!r} has {size} bytes; this endpoint gives at most {MAX_JSON_FILE_BYTES}: GET"
                " files/content gives any"
            )
        return b"".join(parts)

    async def watch(
        self, sandbox: Sandbox, path: str, recursive: bool
    ) -> AsyncGenerator[list[dict[str, Any]], None]:
        """What happens to a file or in a directory: the fields of `FileChange`, beginning with `open`. An empty list
        comes when nothing has happened for a while. Ends when what is watched is gone."""
        check_path(path)
        began, _ = await self._agents.call(sandbox, "watch", path=path, recursive=recursive)
        watch = began["watch"]
        try:
            yield [{"type": "open", "path": path}]
            ended = False
            while not ended:
                answer, _ = await self._agents.call(
                    sandbox, "watch_changes", watch=watch, timeout_s=WATCH_KEEPALIVE_S
                )
                ended = answer["ended"]
                if answer["changes"] or not ended:
                    yield answer["changes"]
        finally:
            if sandbox.live:
                await self._unwatch(sandbox, watch)

    async def _unwatch(self, sandbox: Sandbox, watch: int) -> None:
        try:
            await self._agents.call(sandbox, "unwatch", watch=watch)
        except OrchardError:
            pass  # it ends by itself when nobody asks

    # ------------------------------------------------------------------------------------------- entries

    async def list(self, sandbox: Sandbox, path: str) -> dict[str, Any]:
        """A directory: the fields of `FileListing`."""
        check_path(path)
        header, _ = await self._agents.call(sandbox, "list", path=path)
        return {"path": header["path"], "files": header["files"]}

    async def stat(self, sandbox: Sandbox, path: str, follow: bool = False) -> dict[str, Any]:
        """What is at `path`: the fields of `FileStat`, and `modified_ns`. A link itself unless `follow`."""
        check_path(path)
        header, _ = await self._agents.call(sandbox, "stat", path=path, follow=follow)
        return {"path": path, **{name: header[name] for name in header if name not in ("id", "ok")}}

    async def mkdir(self, sandbox: Sandbox, path: str, parents: bool, mode: int | None) -> None:
        """Make a directory. Raises `Conflict` when it exists, unless `parents` and it is one."""
        check_path(path)
        await self._agents.call(sandbox, "mkdir", path=path, parents=parents, mode=mode)

    async def move(self, sandbox: Sandbox, source: str, target: str, overwrite: bool) -> None:
        """Rename in one step. Raises `Conflict` when `target` exists and may not be overwritten."""
        check_path(source)
        check_path(target)
        await self._agents.call(sandbox, "move", source=source, target=target, overwrite=overwrite)

    async def remove(self, sandbox: Sandbox, path: str, recursive: bool) -> None:
        """Remove a file, a link or a directory. Raises `Conflict` for one that is not empty unless `recursive`."""
        check_path(path)
        deadline = time.monotonic() + _REMOVE_S
        while True:
            header, _ = await self._agents.call(sandbox, "remove", path=path, recursive=recursive)
            if not header["more"]:
                return
            if time.monotonic() > deadline:
                raise Conflict(
                    f"{path!r} is being filled as fast as it is emptied; end what writes there first"
                )


async def _pieces(data: bytes) -> AsyncIterator[bytes]:
    view = memoryview(data)
    for offset in range(0, len(data), CHUNK_BYTES):
        yield bytes(view[offset : offset + CHUNK_BYTES])


def check_path(path: str) -> None:
    """Raises `PathInvalid` for what no file can be called."""
    if not path or "\0" in path or len(path) > 4096:
        raise PathInvalid("path: give 1 to 4096 characters without NUL, such as /tmp/file")
