"""Directory trees between this machine and a sandbox, as tar archives that are made and unpacked while they flow."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from orchard.env import tars
from orchard.env.client.flows import Outgoing
from orchard.env.client.local import LocalFile, LocalTree
from orchard.env.client.transport import Transport
from orchard.env.contract import ArchiveWritten
from orchard.env.errors import Conflict, PathInvalid

link_stays_inside = tars.link_stays_inside

#: Read and written at once, on another thread.
_PIECE_BYTES = 256 << 10


@dataclass(slots=True)
class TreePlan:
    """What to create; paths are relative to the root and use '/'."""

    directories: list[tuple[str, int]] = field(default_factory=list)
    files: list[tuple[str, int]] = field(default_factory=list)
    links: list[tuple[str, str]] = field(default_factory=list)


def plan_tree(root: Path) -> TreePlan:
    """Look at a local tree. Raises `PathInvalid` for a link that leads outside and for special files."""
    plan = TreePlan([(".", stat.S_IMODE(root.stat().st_mode) & 0o777)])
    pending = [""]
    while pending:
        prefix = pending.pop()
        with os.scandir(root / prefix) as entries:
            for entry in sorted(entries, key=lambda each: each.name):
                path = f"{prefix}{entry.name}"
                mode = entry.stat(follow_symlinks=False).st_mode
                if stat.S_ISLNK(mode):
                    target = str(Path(entry.path).readlink())
                    tars.check_link(tars.Entry(path, "symlink", target=target))
                    plan.links.append((path, target))
                elif stat.S_ISDIR(mode):
                    plan.directories.append((path, mode & 0o777))
                    pending.append(path + "/")
                elif stat.S_ISREG(mode):
                    plan.files.append((path, mode & 0o777))
                else:
                    raise PathInvalid(f"{entry.path} is neither a file, a directory nor a link; leave it out")
    return plan


async def upload(transport: Transport, path: str, root: Path, remote: str) -> None:
    """Create the tree at `root` as `remote` in the sandbox whose archives are at the URL path `path`."""
    plan = await asyncio.to_thread(plan_tree, root)
    body = Outgoing(lambda: threaded(pack(root, plan)), "application/x-tar")
    await transport.call("PUT", path, ArchiveWritten, body=body, query=[("path", remote)])


def pack(root: Path, plan: TreePlan) -> Iterator[bytes]:
    """The tree as an archive, in pieces. Raises OSError, or `Conflict` for a file that shrinks meanwhile."""
    kinds: list[tuple[str, int, str]] = [(path, mode, "") for path, mode in plan.directories + plan.files]
    kinds += [(path, 0o777, target) for path, target in plan.links]
    batch = bytearray()
    # Each directory before what is in it, and all of that before what is beside it.
    for path, mode, target in sorted(kinds, key=lambda each: [] if each[0] == "." else each[0].split("/")):
        for piece in _entry(root, path, mode, target):
            batch += piece
            if len(batch) >= _PIECE_BYTES:
                yield bytes(batch)
                batch.clear()
    yield bytes(batch) + tars.END


def _entry(root: Path, path: str, mode: int, target: str) -> Iterator[bytes]:
    name = "" if path == "." else path
    info = (root / path).lstat() if name else root.stat()
    if target:
        yield tars.header(tars.Entry(name, "symlink", 0, mode, info.st_mtime_ns, target))
        return
    if stat.S_ISDIR(info.st_mode):
        yield tars.header(tars.Entry(name, "directory", 0, mode, info.st_mtime_ns))
        return
    # What became a link or a FIFO since it was looked at is neither followed nor waited for.
    with open(os.open(root / path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb", buffering=0) as file:
        info = os.fstat(file.fileno())
        yield tars.header(tars.Entry(name, "file", info.st_size, mode, info.st_mtime_ns))
        left = info.st_size
        while left:
            piece = file.read(min(left, _PIECE_BYTES))
            if not piece:
                raise Conflict(f"{root / path} became shorter while it was read; upload it again")
            left -= len(piece)
            yield piece
        yield tars.padding(info.st_size)


def read_file(path: Path) -> Iterator[bytes]:
    """The content of a local file, in pieces."""
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(_PIECE_BYTES):
            yield piece


async def threaded(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Pieces that are made on another thread, so that reading a disk holds up nobody."""
    while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
        yield piece


async def download_tree(transport: Transport, path: str, remote: str, local: Path) -> None:
    """Fetch the tree `remote` as `local`, from the archives at the URL path `path`."""

    async def take(pieces: AsyncIterator[bytes]) -> None:
        tree = LocalTree(local)
        try:
            async for batch in _batches(pieces):
                await asyncio.to_thread(tree.feed, batch)
            await asyncio.to_thread(tree.finish)
        finally:
            tree.abandon()

    await transport.receive(path, [("path", remote)], take)


async def download_file(transport: Transport, path: str, remote: str, local: Path, mode: int) -> None:
    """Fetch the file `remote` as `local`, from the contents at the URL path `path`."""

    async def take(pieces: AsyncIterator[bytes]) -> None:
        file = await asyncio.to_thread(LocalFile, local, mode)
        try:
            async for batch in _batches(pieces):
                await asyncio.to_thread(file.write, batch)
            await asyncio.to_thread(file.finish)
        finally:
            file.abandon()

    await transport.receive(path, [("path", remote)], take)


async def _batches(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Pieces of a size that is worth a thread."""
    batch = bytearray()
    async for piece in pieces:
        batch += piece
        if len(batch) >= _PIECE_BYTES:
            yield bytes(batch)
            batch.clear()
    if batch:
        yield bytes(batch)
