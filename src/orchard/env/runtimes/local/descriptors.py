"""Messages that carry descriptors. The standard library's functions bring a shared object of their own into every
sandbox, and read a message again to learn its size."""

from __future__ import annotations

import _socket
import errno
import os
import socket
import struct

_MAX_FDS = 64
_SPACE = socket.CMSG_SPACE(_MAX_FDS * 4)


def send_fds(sock: _socket.socket, data: bytes, fds: list[int]) -> None:
    """One message with `fds`."""
    if fds:
        sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(fds)}i", *fds))])
    else:
        sock.send(data)


def receive_fds(sock: _socket.socket, size: int) -> tuple[bytes, list[int]]:
    """One message of at most `size` bytes and its descriptors, which are closed on exec. Empty at the end.
    OSError when it was larger."""
    data, ancillary, flags, _ = sock.recvmsg(size, _SPACE, socket.MSG_CMSG_CLOEXEC)
    fds: list[int] = []
    for level, kind, body in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds += struct.unpack(f"{len(body) // 4}i", body)
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        for fd in fds:
            os.close(fd)
        raise OSError(
            errno.EMSGSIZE, f"a message is larger than {size} bytes or has more than {_MAX_FDS} descriptors"
        )
    return data, fds
