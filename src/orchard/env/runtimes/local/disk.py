"""What the local runtime reads and removes on this machine's disk, and of its memory."""

from __future__ import annotations

import os
import shutil
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
    """Remove a sandbox's directory, if it is there."""
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        return


def tree_bytes(path: Path) -> int:
    """Disk use of a tree, as `du` counts."""
    total = 0
    stack = [str(path)]
    while stack:
        try:
            with os.scandir(stack.pop()) as entries:
                for entry in entries:
                    info = entry.stat(follow_symlinks=False)
                    total += info.st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        stack.append(entry.path)
        except (FileNotFoundError, PermissionError):
            continue
    return total
