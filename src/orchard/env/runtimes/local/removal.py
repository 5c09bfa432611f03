"""Removing a sandbox's tree without root: by its owner, who may lack modes, and by the root of a user namespace, to whom
files of the sandbox's other users belong too. Standard library's `os` alone, since the zygote runs it."""

from __future__ import annotations

import os


def remove_all(path: str) -> None:
    """Remove a tree of any depth, if it is there. OSError (PermissionError above all) with what stands in the way."""
    while True:
        try:
            folders = _sweep(path)
        except FileNotFoundError:
            return
        if not folders:
            break
        # Every directory is first moved up beside the others, so that no path gets long.
        for folder in folders:
            for name in _sweep(f"{path}/{folder}"):
                # A name that no earlier attempt has left.
                os.rename(f"{path}/{folder}/{name}", f"{path}/.removing-{os.urandom(8).hex()}")
            os.rmdir(f"{path}/{folder}")
    os.rmdir(path)


def _sweep(folder: str) -> list[str]:
    """Remove what is no directory in `folder`; the names of the others, which can be moved then."""
    if os.lstat(folder).st_mode & 0o700 != 0o700:
        os.chmod(folder, 0o700)
    folders = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                # A directory without the right to write cannot be moved: its `..` changes.
                if entry.stat(follow_symlinks=False).st_mode & 0o700 != 0o700:
                    os.chmod(entry.path, 0o700)
                folders.append(entry.name)
            else:
                os.unlink(entry.path)
    return folders
