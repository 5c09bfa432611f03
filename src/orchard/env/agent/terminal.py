"""Terminals of commands: a pseudo-terminal of the sandbox's own, of which the agent holds the other end."""

from __future__ import annotations

import errno
import fcntl
import os
import struct

_TTY_GROUP = 5
# Of <asm-generic/ioctls.h>: the module `termios` would be another shared object in every sandbox.
_TIOCSCTTY, _TIOCSWINSZ = 0x540E, 0x5414


def open_terminal(rows: int, cols: int, uid: int) -> tuple[int, int]:
    """Our end and the command's, which belongs to `uid`. Raises OSError."""
    ours, theirs = os.openpty()
    try:
        resize(ours, rows, cols)
        try:
            os.fchown(theirs, uid, _TTY_GROUP)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # The sandbox of an ordinary user has no such group.
            os.fchown(theirs, uid, -1)
        os.fchmod(theirs, 0o620)
    except OSError:
        os.close(ours)
        os.close(theirs)
        raise
    return ours, theirs


def resize(fd: int, rows: int, cols: int) -> None:
    """Set the size in characters; what runs in the foreground gets SIGWINCH."""
    fcntl.ioctl(fd, _TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))


def take_terminal() -> None:
    """In a new process that leads a session: what is its standard input becomes its controlling terminal."""
    fcntl.ioctl(0, _TIOCSCTTY, 0)
