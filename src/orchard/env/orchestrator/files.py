"""Whole files and listings, moved to and from the agent in pieces."""

from __future__ import annotations

import base64
import os
from typing import Any

from orchard.env.agent.wire import CHUNK_BYTES
from orchard.env.contract import MAX_JSON_FILE_BYTES
from orchard.env.errors import OrchardError, PathInvalid, TooLarge
from orchard.env.orchestrator.agents import Agents
from orchard.env.orchestrator.sandbox import Sandbox


class Files:
    def __init__(self, agents: Agents) -> None:
        self._agents = agents

    async def write(self, sandbox: Sandbox, path: str, content: str, mode: int | None) -> int:
        """Replace a file by base64 `content`, atomically; its size in bytes. mode: permission bits, None keeps
        those of the file there, or takes the agent's default."""
        data = base64.b64decode(content)
        if len(data) > MAX_JSON_FILE_BYTES:
            raise TooLarge(
                f"the file has {len(data)} bytes; this endpoint takes at most {MAX_JSON_FILE_BYTES}"
            )
        upload = os.urandom(8).hex()
        extra = {} if mode is None else {"mode": mode}
        view = memoryview(data)
        offset = 0
        try:
            while True:
                chunk = bytes(view[offset : offset + CHUNK_BYTES])
                last = offset + len(chunk) >= len(data)
                header, _ = await self._agents.call(
                    sandbox, "write", chunk, path=path, upload=upload, offset=offset, last=last, **extra
                )
                if last:
                    return int(header["size"])
                offset += len(chunk)
        except BaseException:
            if offset:
                await self._abort(sandbox, upload)
            raise

    async def _abort(self, sandbox: Sandbox, upload: str) -> None:
        try:
            await self._agents.call(sandbox, "abort", upload=upload)
        except OrchardError:
            pass  # what it was sent for is gone with the sandbox, or goes with the connection

    async def read(self, sandbox: Sandbox, path: str) -> bytes:
        """A whole file. Raises `TooLarge` beyond what JSON should hold."""
        _check_path(path)
        parts: list[bytes] = []
        offset = 0
        while True:
            header, data = await self._agents.call(
                sandbox, "read", path=path, offset=offset, limit=CHUNK_BYTES
            )
            if header["size"] > MAX_JSON_FILE_BYTES or offset + len(data) > MAX_JSON_FILE_BYTES:
                raise TooLarge(
                    f"{path!r} has {header['size']} bytes; this endpoint gives at most {MAX_JSON_FILE_BYTES}"
                )
            parts.append(data)
            offset += len(data)
            if header["eof"] or not data:
                return b"".join(parts)

    async def list(self, sandbox: Sandbox, path: str) -> dict[str, Any]:
        """A directory: the fields of `FileListing`."""
        _check_path(path)
        header, _ = await self._agents.call(sandbox, "list", path=path)
        return {"path": header["path"], "files": header["files"]}


def _check_path(path: str) -> None:
    if not path or "\0" in path or len(path) > 4096:
        raise PathInvalid("path: give 1 to 4096 characters without NUL, such as /tmp/file")
