"""Opening paths that somebody else chose (a client, an image, user code) without leaving the sandbox.

The agent's root is the sandbox's root, so `..` and symlinks stay inside. What could lead out are the magic links
of /proc: `/proc/self` is the agent here, and its descriptors belong to the machine.
"""

from __future__ import annotations

import errno
import os

from orchard.env.agent import syscalls

AT_FDCWD = -100


def open_inside(path: bytes, flags: int, dir_fd: int = AT_FDCWD) -> int:
    """A descriptor, by a path that uses no magic link and does not end in the agent's own part of /proc.

    Raises OSError: ELOOP for a magic link, EACCES for the agent's own files.
    """
    fd = syscalls.openat2(dir_fd, path, flags, 0, syscalls.RESOLVE_NO_MAGICLINKS)
    own = b"/proc/%d" % os.getpid()
    real = os.readlink(b"/proc/self/fd/%d" % fd)
    if real == own or real.startswith(own + b"/"):
        os.close(fd)
        raise OSError(errno.EACCES, "belongs to the agent")
    return fd


def make_directories(folder: bytes) -> int:
    """A descriptor of `folder`, made with its parents (mode 0755) where they are missing."""
    try:
        return open_inside(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        upper, name = os.path.split(folder.rstrip(b"/"))
        if name in (b"", b".", b".."):
            raise
        dir_fd = make_directories(upper or b"/")
        try:
            try:
                os.mkdir(name, 0o755, dir_fd=dir_fd)
            except FileExistsError:
                pass  # a dangling link or a race: the open below tells
            return open_inside(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd)
        finally:
            os.close(dir_fd)
