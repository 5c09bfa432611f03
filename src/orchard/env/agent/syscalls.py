"""The few system calls that the standard library does not offer, through ctypes.

The library handle is opened at import, before any image is visible: nothing here may dlopen later.
"""

from __future__ import annotations

import ctypes
import errno
import os

# PyDLL keeps the interpreter lock: these calls do not block, and after a raw clone there must be no
# second thread's lock to take back.
_libc = ctypes.PyDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long
_prctl = _libc.prctl
_fallocate = _libc.fallocate
_inotify_init1 = _libc.inotify_init1
_inotify_add_watch = _libc.inotify_add_watch
_inotify_rm_watch = _libc.inotify_rm_watch

_RT_SIGACTION = {"x86_64": 13, "aarch64": 134}.get(os.uname().machine, -1)
SYS_OPENAT2 = 437
SYS_CLOSE_RANGE = 436

_RENAMEAT2 = {"x86_64": 316, "aarch64": 276}.get(os.uname().machine, -1)
RENAME_NOREPLACE = 1

RESOLVE_NO_MAGICLINKS = 0x02
RESOLVE_NO_SYMLINKS = 0x04
RESOLVE_BENEATH = 0x08

PR_SET_DUMPABLE = 4
PR_SET_NAME = 15
PR_CAPBSET_DROP = 24
PR_SET_NO_NEW_PRIVS = 38


def checked(result: int, what: str) -> int:
    """`result`, or OSError from errno when it is negative."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


def openat2(dir_fd: int, path: bytes, flags: int, mode: int = 0, resolve: int = 0) -> int:
    """openat2(2): a descriptor, or OSError."""
    how = _OpenHow(flags | os.O_CLOEXEC, mode, resolve)
    while True:
        fd = int(_syscall(SYS_OPENAT2, dir_fd, ctypes.c_char_p(path), ctypes.byref(how), ctypes.sizeof(how)))
        if fd >= 0:
            return fd
        number = ctypes.get_errno()
        # EAGAIN: a rename raced with the resolution; the kernel asks to try again.
        if number not in (errno.EAGAIN, errno.EINTR):
            raise OSError(number, os.strerror(number), os.fsdecode(path))


def rename_new(old: bytes, new: bytes, old_dir_fd: int, new_dir_fd: int) -> None:
    """renameat2(2) that replaces nothing: FileExistsError when the new name is taken."""
    arguments = (old_dir_fd, ctypes.c_char_p(old), new_dir_fd, ctypes.c_char_p(new), RENAME_NOREPLACE)
    checked(_syscall(_RENAMEAT2, *arguments), "renameat2")


def close_range(first: int, last: int = 0xFFFFFFFF) -> None:
    """Close every descriptor from `first` to `last`."""
    checked(_syscall(SYS_CLOSE_RANGE, first, last, 0), "close_range")


def punch_hole(fd: int, offset: int, size: int) -> None:
    """Free the blocks of a part of a file; a file system that cannot is left as it is."""
    keep_size_and_punch = 3
    _fallocate(fd, keep_size_and_punch, ctypes.c_int64(offset), ctypes.c_int64(size))


def inotify_init() -> int:
    """inotify_init1(2): a descriptor that does not block."""
    return checked(_inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK), "inotify_init1")


def inotify_add(fd: int, path: bytes, mask: int) -> int:
    """inotify_add_watch(2): the number of the watch."""
    return checked(_inotify_add_watch(fd, ctypes.c_char_p(path), mask), "inotify_add_watch")


def inotify_remove(fd: int, number: int) -> None:
    """inotify_rm_watch(2); one that is gone already is fine."""
    _inotify_rm_watch(fd, number)


def default_signals() -> None:
    """Give every signal its default effect: what the service's own parent ignored (such as nohup's SIGHUP) is not
    ignored by commands. By the bare call, since the C library keeps its two internal signals to itself."""
    for number in range(1, 65):
        _syscall(_RT_SIGACTION, number, bytes(32), None, 8)  # SIGKILL and SIGSTOP refuse, and need not


def prctl(option: int, arg2: int | bytes = 0, arg3: int = 0) -> int:
    """prctl(2) with integer arguments, or one byte string."""
    second = ctypes.c_char_p(arg2) if isinstance(arg2, bytes) else ctypes.c_ulong(arg2)
    return checked(
        _prctl(option, second, ctypes.c_ulong(arg3), ctypes.c_ulong(0), ctypes.c_ulong(0)), "prctl"
    )
