"""Directory trees, file by file, between this machine and a sandbox."""

from __future__ import annotations

import asyncio
import logging
import os
import stat
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from orchard.env.client.aio import jobs
from orchard.env.client.transport import Transport, build
from orchard.env.contract import ExecRequest, FileEntry
from orchard.env.errors import FileMissing, PathInvalid

if TYPE_CHECKING:
    from orchard.env.client.aio.files import AsyncFiles

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Files on their way at once, and arguments of one helper command.
_PARALLEL = 8
_ARGUMENTS = 200
_DEFAULT_DIRECTORY_MODE = 0o755


@dataclass(slots=True)
class TreePlan:
    """What to create, in this order; paths are relative to the root and use '/'."""

    directories: list[tuple[str, int]] = field(default_factory=list)
    files: list[tuple[str, int]] = field(default_factory=list)
    links: list[tuple[str, str]] = field(default_factory=list)


def link_stays_inside(path: str, target: str) -> bool:
    """Whether a symbolic link at the relative `path` leads inside the root, whatever other links do.

    That holds when the target is relative and climbs only at its beginning, at most as far as the root: such
    links cannot leave even when they lead through each other.
    """
    if not target or target.startswith("/"):
        return False
    parts = [part for part in target.split("/") if part not in ("", ".")]
    climbs = 0
    while climbs < len(parts) and parts[climbs] == "..":
        climbs += 1
    return ".." not in parts[climbs:] and climbs <= path.count("/")


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
                    plan.links.append((path, _checked_target(path, str(Path(entry.path).readlink()), root)))
                elif stat.S_ISDIR(mode):
                    plan.directories.append((path, mode & 0o777))
                    pending.append(path + "/")
                elif stat.S_ISREG(mode):
                    plan.files.append((path, mode & 0o777))
                else:
                    raise PathInvalid(f"{entry.path} is neither a file, a directory nor a link; leave it out")
    return plan


async def upload(transport: Transport, sandbox_id: str, files: AsyncFiles, root: Path, remote: str) -> None:
    """Create the tree at `root` in the sandbox as `remote`."""
    plan = await asyncio.to_thread(plan_tree, root)
    base = remote.rstrip("/") or "/"

    async def run(argv: Sequence[str]) -> None:
        request = build(ExecRequest, command=list(argv), concurrent=True, job_id=jobs.new_job_id())
        (await jobs.run(transport, sandbox_id, request)).check()

    async def send(item: tuple[str, int]) -> None:
        data = await asyncio.to_thread((root / item[0]).read_bytes)
        await files.write(_join(base, item[0]), data, mode=item[1])

    names = [_join(base, path) for path, _ in plan.directories]
    for chunk in _chunks(names):
        await run(["mkdir", "-p", "--", *chunk])
    await _in_parallel(send, plan.files)
    for path, target in plan.links:
        await run(["ln", "-sfn", "--", target, _join(base, path)])
    # Last, and deepest first: a directory that may not be written must be filled before.
    modes: dict[int, list[str]] = {}
    for path, mode in reversed(plan.directories):
        if mode != _DEFAULT_DIRECTORY_MODE:
            modes.setdefault(mode, []).append(_join(base, path))
    for mode, directories in modes.items():
        for chunk in _chunks(directories):
            await run(["chmod", f"{mode:04o}", "--", *chunk])


async def download(files: AsyncFiles, remote: str, local: Path) -> None:
    """Fetch the file or the tree `remote` as `local`."""
    entry = await _entry_of(files, remote)
    if entry is None or entry.type == "directory":
        await _download_tree(files, remote.rstrip("/") or "/", local)
        return
    data = await files.read(remote)
    mode = entry.mode if entry.type == "file" else 0
    await asyncio.to_thread(local.parent.mkdir, parents=True, exist_ok=True)
    await asyncio.to_thread(_write_local, local, data, mode)


async def _entry_of(files: AsyncFiles, remote: str) -> FileEntry | None:
    """What `remote` is, as its parent directory lists it; None for the root and the like."""
    parent, _, name = remote.rstrip("/").rpartition("/")
    if name in ("", ".", ".."):
        return None
    parent = parent or ("/" if remote.startswith("/") else ".")
    for entry in await files.list(parent):
        if entry.name == name:
            return await _resolved(files, remote, entry)
    raise FileMissing(f"no such file in the sandbox: {remote}")


async def _resolved(files: AsyncFiles, remote: str, entry: FileEntry) -> FileEntry | None:
    """For a link that was named itself: None if it leads to a directory, so that its tree is fetched."""
    if entry.type != "symlink":
        return entry
    try:
        await files.list(remote)
    except (PathInvalid, FileMissing):
        return entry
    return None


async def _download_tree(files: AsyncFiles, remote: str, local: Path) -> None:
    await asyncio.to_thread(local.mkdir, parents=True, exist_ok=True)
    modes: list[tuple[Path, int]] = []
    pending = [""]
    while pending:
        prefix = pending.pop()
        found: list[tuple[str, FileEntry]] = []
        for entry in await files.list(_join(remote, prefix or ".")):
            if entry.name in ("", ".", "..") or "/" in entry.name or "\0" in entry.name:
                raise PathInvalid(f"the sandbox lists an impossible name {entry.name!r:.80}")
            path = prefix + entry.name
            if entry.type == "directory":
                await asyncio.to_thread(_make_directory, local / path)
                modes.append((local / path, entry.mode))
                pending.append(path + "/")
            elif entry.type == "symlink":
                target = _checked_target(path, entry.target or "", Path(remote))
                await asyncio.to_thread(_make_link, local / path, target)
            elif entry.type == "file":
                found.append((path, entry))
            else:
                logger.warning("not downloaded, neither a file, a directory nor a link: %s", path)

        async def fetch(item: tuple[str, FileEntry]) -> None:
            data = await files.read(_join(remote, item[0]))
            await asyncio.to_thread(_replace_local, local / item[0], data, item[1].mode)

        await _in_parallel(fetch, found)
    for directory, mode in reversed(modes):
        if mode:
            await asyncio.to_thread(directory.chmod, mode & 0o777)


def _checked_target(path: str, target: str, root: Path) -> str:
    if not link_stays_inside(path, target):
        raise PathInvalid(
            f"the link {path} in {root} points to {target!r:.200}, outside the directory;"
            " remove it or copy what it points to"
        )
    return target


def _join(base: str, path: str) -> str:
    if path == ".":
        return base
    return f"{base}{path}" if base.endswith("/") else f"{base}/{path}"


def _chunks(items: Sequence[str]) -> Iterable[Sequence[str]]:
    return (items[start : start + _ARGUMENTS] for start in range(0, len(items), _ARGUMENTS))


def _make_directory(path: Path) -> None:
    # Never through a link that was there before.
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        path.unlink()
    path.mkdir(exist_ok=True)
    path.chmod(path.stat().st_mode | 0o700)


def _make_link(path: Path, target: str) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    path.symlink_to(target)


def _replace_local(path: Path, data: bytes, mode: int) -> None:
    if path.is_symlink():
        path.unlink()
    _write_local(path, data, mode)


def _write_local(path: Path, data: bytes, mode: int) -> None:
    path.write_bytes(data)
    if mode:  # 0: the service does not tell modes
        path.chmod(mode & 0o777)


async def _in_parallel(work: Callable[[T], Awaitable[None]], items: Iterable[T]) -> None:
    """Do `work` for every item, some at once; the first error stops the rest and is raised as it is."""
    queue = iter(items)

    async def worker() -> None:
        for item in queue:
            await work(item)

    workers = [asyncio.ensure_future(worker()) for _ in range(_PARALLEL)]
    try:
        await asyncio.gather(*workers)
    finally:
        for each in workers:
            each.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
