"""Entries of the sandbox's directories: looked at, made, moved and removed, by paths that the client chose."""

from __future__ import annotations

import errno
import os
import stat
import time

from orchard.env.agent import syscalls
from orchard.env.agent.files import described
from orchard.env.agent.job import AgentError
from orchard.env.agent.paths import BELOW, At, Places, failure

TYPE_CHECKING = False  # importing typing would cost every sandbox most of a megabyte
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_DEFAULT_MODE = 0o755
#: One removal holds the agent no longer than this; it is asked again.
_SLICE_S = 0.05
_MAX_DEPTH = 400
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NONBLOCK


class Entries:
    """Operations that touch no content. Every one raises `AgentError`."""

    def __init__(self, places: Places) -> None:
        self._places = places

    def operations(self) -> dict[str, Callable[..., None]]:
        """By their names of the wire protocol, as the server calls them."""
        by_name: dict[str, Callable[..., dict[str, Any]]] = {
            "stat": self.stat, "mkdir": self.mkdir, "symlink": self.symlink, "attributes": self.attributes,
            "move": self.move, "remove": self.remove,
        }  # fmt: skip

        def served(operation: Callable[..., dict[str, Any]]) -> Callable[..., None]:
            def serve(
                header: dict[str, Any], _payload: bytes, answer: Callable[..., None], _fail: Any
            ) -> None:
                arguments = {name: value for name, value in header.items() if name not in ("id", "op")}
                answer(operation(**arguments))

            return serve

        return {name: served(operation) for name, operation in by_name.items()}

    def stat(self, path: str, follow: bool = False) -> dict[str, Any]:
        """What is at `path`; a link itself unless `follow`."""
        try:
            fd = self._places.open(path, None, os.O_PATH | (0 if follow else os.O_NOFOLLOW))
            try:
                info = os.fstat(fd)
                target = os.readlink(b"", dir_fd=fd) if stat.S_ISLNK(info.st_mode) else None
            finally:
                os.close(fd)
        except OSError as error:
            raise failure(error, path) from None
        entry = described(info, None if target is None else os.fsdecode(target))
        entry["modified_ns"] = info.st_mtime_ns
        return entry

    def mkdir(
        self, path: str, parents: bool = False, mode: int | None = None, root: str | None = None
    ) -> dict[str, Any]:
        """A new directory; with `parents`, those above it too, and one that is there already is fine."""
        try:
            with self._places.parent(path, root, make=parents) as at:
                self._mkdir(at, path, parents, mode, root)
        except OSError as error:
            raise failure(error, path) from None
        return {}

    def _mkdir(self, at: At, path: str, existing: bool, mode: int | None, root: str | None) -> None:
        try:
            os.mkdir(at.name, 0o700, dir_fd=at.dir_fd)
        except FileExistsError:
            if not existing:
                raise AgentError("conflict", f"{path!r} exists; `parents` accepts a directory") from None
            os.close(self._places.open(path, root, _DIRECTORY))
            return
        fd = syscalls.openat2(at.dir_fd, at.name, _DIRECTORY, 0, BELOW)
        try:
            os.fchmod(fd, _DEFAULT_MODE if mode is None else mode & 0o7777)
        finally:
            os.close(fd)

    def symlink(
        self, path: str, target: str, modified_ns: int | None = None, root: str | None = None
    ) -> dict[str, Any]:
        """A link that replaces a file or link of its name in one step."""
        try:
            with self._places.parent(path, root, make=True) as at:
                temporary = b".orchard-%s" % os.urandom(8).hex().encode()
                os.symlink(os.fsencode(target), temporary, dir_fd=at.dir_fd)
                try:
                    if modified_ns is not None:
                        times = (modified_ns, modified_ns)
                        os.utime(temporary, ns=times, dir_fd=at.dir_fd, follow_symlinks=False)
                    os.rename(temporary, at.name, src_dir_fd=at.dir_fd, dst_dir_fd=at.dir_fd)
                except OSError:
                    os.unlink(temporary, dir_fd=at.dir_fd)
                    raise
        except OSError as error:
            raise failure(error, path) from None
        return {}

    def attributes(
        self, path: str, mode: int | None = None, modified_ns: int | None = None, root: str | None = None
    ) -> dict[str, Any]:
        """Set those of a directory that are given."""
        try:
            fd = self._places.open(path, root, _DIRECTORY)
            try:
                if mode is not None:
                    os.fchmod(fd, mode & 0o7777)
                if modified_ns is not None:
                    os.utime(fd, ns=(modified_ns, modified_ns))
            finally:
                os.close(fd)
        except OSError as error:
            raise failure(error, path) from None
        return {}

    def move(self, source: str, target: str, overwrite: bool = False) -> dict[str, Any]:
        """Rename in one step; links are moved, not followed. Directories on the way to `target` are made."""
        try:
            with self._places.parent(source, None) as old:
                os.stat(old.name, dir_fd=old.dir_fd, follow_symlinks=False)
                self._move(old, source, target, overwrite)
        except OSError as error:
            raise failure(error, source) from None
        return {}

    def _move(self, old: At, source: str, target: str, overwrite: bool) -> None:
        try:
            with self._places.parent(target, None, make=True) as new:
                if overwrite:
                    os.rename(old.name, new.name, src_dir_fd=old.dir_fd, dst_dir_fd=new.dir_fd)
                else:
                    syscalls.rename_new(old.name, new.name, old.dir_fd, new.dir_fd)
        except OSError as error:
            if error.errno == errno.EXDEV:
                text = f"{source!r} cannot become {target!r} in one step: it is a directory of the image, or they are on"
                raise AgentError(
                    "path_invalid", text + " different file systems; move it with a command"
                ) from None
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
                hint = "it is a directory that is not empty" if overwrite else "`overwrite` replaces it"
                raise AgentError("conflict", f"{target!r} exists; {hint}") from None
            raise failure(error, target) from None

    def remove(self, path: str, recursive: bool = False) -> dict[str, Any]:
        """A file or link (not what it points to), or a directory, with what is in it if `recursive`."""
        try:
            with self._places.parent(path, None) as at:
                return {"more": not self._remove(at, path, recursive, time.monotonic() + _SLICE_S)}
        except OSError as error:
            raise failure(error, path) from None

    def _remove(self, at: At, path: str, recursive: bool, deadline: float) -> bool:
        """Whether it is gone by now."""
        if _gone(at.name, at.dir_fd):
            return True
        if not recursive:
            raise AgentError("conflict", f"{path!r} is a directory that is not empty; `recursive` removes it")
        # From descriptor to descriptor and through no link: nothing that is swapped meanwhile leads elsewhere.
        open_fds: list[int] = []
        names = [at.name]
        try:
            while names:
                above = open_fds[-1] if open_fds else at.dir_fd
                if len(names) > _MAX_DEPTH:
                    text = (
                        f"{path!r} is nested deeper than {_MAX_DEPTH} directories; remove it with a command"
                    )
                    raise AgentError("path_invalid", text)
                fd = syscalls.openat2(above, names[-1], _DIRECTORY, 0, BELOW)
                open_fds.append(fd)
                inner = _emptied(fd, deadline)
                if inner is not None:
                    if not inner:
                        return False
                    names.append(inner)
                    continue
                os.close(open_fds.pop())
                # Filled again by somebody: then it is emptied again.
                if _gone(names[-1], above):
                    names.pop()
                    if open_fds:
                        os.close(open_fds.pop())
                if time.monotonic() > deadline:
                    return not names
            return True
        finally:
            for fd in open_fds:
                os.close(fd)


def _gone(name: bytes, dir_fd: int) -> bool:
    """Remove a file, link or empty directory; False when it is a directory that is not empty."""
    try:
        os.unlink(name, dir_fd=dir_fd)
        return True
    except IsADirectoryError:
        pass
    try:
        os.rmdir(name, dir_fd=dir_fd)
        return True
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False


def _emptied(fd: int, deadline: float) -> bytes | None:
    """Remove what is in a directory: None when it was all, the name of a directory that is not empty, or an empty
    name when the time is over."""
    with os.scandir(fd) as entries:
        for entry in entries:
            try:
                if not _gone(os.fsencode(entry.name), fd):
                    return os.fsencode(entry.name)
            except FileNotFoundError:
                continue
            if time.monotonic() > deadline:
                return b""
    return None
