"""Opening paths that somebody else chose (a client, an image, user code) without leaving the sandbox.

The agent's root is the sandbox's root, so `..` and symlinks stay inside. What could lead out are the magic links
of /proc: `/proc/self` is the agent here, and its descriptors belong to the machine. Paths below a `root` that was
named apart stay below it: they use no link at all.
"""

from __future__ import annotations

import errno
import os

from orchard.env.agent import syscalls
from orchard.env.agent.job import AgentError

AT_FDCWD = -100
#: How a path that stands for itself is resolved, and one that must stay below the descriptor it starts at.
ANYWHERE = syscalls.RESOLVE_NO_MAGICLINKS
BELOW = syscalls.RESOLVE_NO_MAGICLINKS | syscalls.RESOLVE_NO_SYMLINKS | syscalls.RESOLVE_BENEATH

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NONBLOCK

_CODES = {
    errno.ENOENT: "file_not_found",
    errno.ENOTDIR: "path_invalid",
    errno.EISDIR: "path_invalid",
    errno.ELOOP: "path_invalid",
    errno.ENAMETOOLONG: "path_invalid",
    errno.EXDEV: "path_invalid",
    errno.EACCES: "path_invalid",
    errno.EPERM: "path_invalid",
    errno.EROFS: "path_invalid",
    errno.ETXTBSY: "path_invalid",
    errno.ENXIO: "path_invalid",
    errno.EINVAL: "path_invalid",
    errno.EBUSY: "path_invalid",
    errno.EEXIST: "conflict",
    errno.ENOTEMPTY: "conflict",
    errno.ENOSPC: "disk_full",
    errno.EDQUOT: "disk_full",
}


def failure(error: OSError, path: str) -> AgentError:
    """What a failed system call on a client's path is for the client."""
    number = error.errno or errno.EIO
    return AgentError(_CODES.get(number, "infrastructure_error"), f"{path!r}: {os.strerror(number)}")


def encode(path: str) -> bytes:
    """A client's path as the kernel takes it. Raises `AgentError` (path_invalid)."""
    if not path or "\0" in path:
        raise AgentError("path_invalid", "the path is empty or holds a NUL byte; give an absolute path")
    try:
        return path.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise AgentError("path_invalid", "the path is not encodable as UTF-8") from None


def open_inside(path: bytes, flags: int, dir_fd: int = AT_FDCWD, resolve: int = ANYWHERE) -> int:
    """A descriptor, by a path that uses no magic link and does not end in the agent's own part of /proc.

    Raises OSError: ELOOP for a magic link, EACCES for the agent's own files.
    """
    fd = syscalls.openat2(dir_fd, path, flags, 0, resolve)
    own = b"/proc/%d" % os.getpid()
    real = os.readlink(b"/proc/self/fd/%d" % fd)
    if real == own or real.startswith(own + b"/"):
        os.close(fd)
        raise OSError(errno.EACCES, "belongs to the agent")
    return fd


def make_directories(folder: bytes, dir_fd: int = AT_FDCWD, resolve: int = ANYWHERE) -> int:
    """A descriptor of `folder`, made with its parents (mode 0755) where they are missing."""
    missing = []
    while True:
        try:
            fd = open_inside(folder or b".", _DIRECTORY, dir_fd, resolve)
            break
        except FileNotFoundError:
            upper, name = os.path.split(folder.rstrip(b"/"))
            if name in (b"", b".", b".."):
                raise
            missing.append(name)
            folder = upper
    while missing:
        name = missing.pop()
        try:
            try:
                os.mkdir(name, 0o755, dir_fd=fd)
            except FileExistsError:
                pass  # a dangling link or a race: the open below tells
            inner = open_inside(name, _DIRECTORY, fd, resolve)
        finally:
            os.close(fd)
        fd = inner
    return fd


class At:
    """A directory descriptor and a name in it; closes the descriptor on exit."""

    def __init__(self, dir_fd: int, name: bytes) -> None:
        self.dir_fd = dir_fd
        self.name = name

    def __enter__(self) -> At:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.dir_fd)


class Places:
    """Client paths: relative ones start at `base` (the sandbox's working directory), or lie below a `root`."""

    def __init__(self) -> None:
        self.base = "/"

    def absolute(self, path: str) -> bytes:
        raw = encode(path)
        return raw if raw.startswith(b"/") else encode(self.base).rstrip(b"/") + b"/" + raw

    def open(self, path: str, root: str | None, flags: int) -> int:
        """A descriptor of `path`; below `root` if one is given, through no link then."""
        if root is None:
            return open_inside(self.absolute(path), flags)
        with self._root(root) as top:
            return open_inside(encode(path), flags, top.dir_fd, BELOW)

    def parent(self, path: str, root: str | None, make: bool = False) -> At:
        """The directory that holds the last name of `path`, which is not followed; `make`: with its parents."""
        raw = self.absolute(path) if root is None else encode(path)
        folder, name = os.path.split(raw.rstrip(b"/"))
        if name in (b"", b".", b".."):
            raise AgentError("path_invalid", f"{path!r} does not end in a name; give the entry's own path")
        if root is None:
            return At(make_directories(folder) if make else open_inside(folder, _DIRECTORY), name)
        with self._root(root) as top:
            if make:
                return At(make_directories(folder, top.dir_fd, BELOW), name)
            return At(open_inside(folder or b".", _DIRECTORY, top.dir_fd, BELOW), name)

    def _root(self, root: str) -> At:
        return At(open_inside(self.absolute(root), _DIRECTORY), b"")


def on_its_way(name: bytes) -> bool:
    """Whether it is a temporary name of an upload or a new link: nobody's until it has its own."""
    _, mark, tail = name.rpartition(b".orchard-")
    return (
        bool(mark) and name.startswith(b".") and len(tail) in (12, 16) and not tail.strip(b"0123456789abcdef")
    )
