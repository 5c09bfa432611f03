"""What the local runtime reads and removes on this machine's disk, and of its memory."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import subprocess
from pathlib import Path


def log_tail(path: Path, lines: int = 50) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()[-lines:]
    except OSError:
        return []


def meminfo() -> dict[str, int]:
    found = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        found[name] = int(rest.split()[0]) * 1024
    return found


def nearly_empty(path: Path, limit: int = 24) -> bool:
    """Whether a tree holds only a few entries."""
    count = 0
    stack = [str(path)]
    while stack:
        try:
            with os.scandir(stack.pop()) as entries:
                for entry in entries:
                    count += 1
                    if count > limit:
                        return False
                    if entry.is_dir(follow_symlinks=False):
                        stack.append(entry.path)
        except PermissionError:
            continue
    return True


def remove_tree(path: Path) -> None:
    """Remove a sandbox's directory, if it is there, whatever user code made of it."""
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        return
    except (RecursionError, OSError) as error:
        if isinstance(error, OSError) and error.errno != errno.ENAMETOOLONG:
            raise
        _flatten_and_remove(path)


def _flatten_and_remove(path: Path) -> None:
    """Remove a tree of any depth: every directory is first moved up beside the others, so that no path gets long."""
    numbers = itertools.count()
    while True:
        folders = [entry for entry in os.scandir(path) if entry.is_dir(follow_symlinks=False)]
        if not folders:
            break
        for folder in folders:
            for entry in os.scandir(folder.path):
                if entry.is_dir(follow_symlinks=False):
                    os.rename(entry.path, path / f".removing-{next(numbers)}")
                else:
                    os.unlink(entry.path)
            os.rmdir(folder.path)
    shutil.rmtree(path)


def disk_use(path: Path) -> int | None:
    """Bytes on disk of a tree; None when it cannot be told. `du` copes with any depth and with files that vanish."""
    done = subprocess.run(["du", "-skx", str(path)], capture_output=True, text=True, check=False)
    size = done.stdout.split("\t")[0]
    return int(size) * 1024 if size.isdigit() else None
