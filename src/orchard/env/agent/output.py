"""Bounded output of one stream of a command: all of it up to a cap, else its head and its tail."""

from __future__ import annotations

import errno
import os

from orchard.env.agent import syscalls

#: What a window holds in memory; more goes to the spool. The agent's memory is not the sandbox's.
_MEMORY_BYTES = 256 << 10
_SPOOL_BYTES = 1 << 30


class Spool:
    """A sparse file on the machine's disk in which windows have regions; made when the first one needs it.

    folder_fd: the sandbox's own directory on the machine, opened before the image was visible. cap_bytes: of all
    regions together, so that commands side by side cannot fill the machine's disk.
    """

    def __init__(self, folder_fd: int, cap_bytes: int = _SPOOL_BYTES) -> None:
        self._folder_fd = folder_fd
        self._cap_bytes = cap_bytes
        self._used_bytes = 0
        self._fd = -1
        self._end = 0

    def reserve(self, size_bytes: int) -> int:
        """The offset of a new region. Raises OSError."""
        if self._fd < 0:
            flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
            self._fd = os.open("spool", flags, 0o600, dir_fd=self._folder_fd)
        offset, self._end = self._end, self._end + size_bytes
        return offset

    def claim(self, size_bytes: int) -> None:
        """Count bytes that a region is about to hold more than before. Raises OSError when the spool is full."""
        if self._used_bytes + size_bytes > self._cap_bytes:
            raise OSError(errno.EDQUOT, "the output of the sandbox's commands fills its spool")
        self._used_bytes += size_bytes

    def write(self, offset: int, data: bytes | memoryview) -> None:
        while data:
            written = os.pwrite(self._fd, data, offset)
            data = data[written:]
            offset += written

    def read(self, offset: int, size_bytes: int) -> bytes:
        return os.pread(self._fd, size_bytes, offset)

    def release(self, offset: int, size_bytes: int, claimed_bytes: int) -> None:
        """Give the disk space of a region back."""
        self._used_bytes -= claimed_bytes
        syscalls.punch_hole(self._fd, offset, size_bytes)


class OutputWindow:
    """Keeps at most `cap_bytes`: the first half and the last half of what was written.

    `total` counts every byte. In memory are at most twice `cap_bytes` or 256 KiB, whichever is less.
    """

    __slots__ = (
        "_cap",
        "_claimed",
        "_head",
        "_head_cap",
        "_lost_at",
        "_offset",
        "_spool",
        "_tail",
        "_tail_cap",
        "total",
    )

    def __init__(self, cap_bytes: int, spool: Spool | None = None) -> None:
        self.total = 0
        self._cap = cap_bytes
        self._head_cap = cap_bytes - cap_bytes // 2
        self._tail_cap = cap_bytes // 2
        self._head = bytearray()
        self._tail = bytearray()
        self._spool = spool if cap_bytes > _MEMORY_BYTES else None
        self._offset = -1
        self._claimed = 0
        self._lost_at = -1

    def write(self, data: bytes | memoryview) -> None:
        if self._spool is not None:
            self._write_spooled(self._spool, data)
            return
        self.total += len(data)
        room = self._head_cap - len(self._head)
        if room >= len(data):
            self._head += data
            return
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        cap = self._tail_cap
        if cap == 0:
            return
        if len(data) >= cap:
            self._tail[:] = data[-cap:]
            return
        self._tail += data
        # Cut only now and then: moving the tail for every write would be quadratic.
        if len(self._tail) > 2 * cap:
            del self._tail[: len(self._tail) - cap]

    def _write_spooled(self, spool: Spool, data: bytes | memoryview) -> None:
        """In memory at first; then in a region of the spool: the head, and behind it the tail as a ring."""
        at = self.total
        self.total += len(data)
        if self._lost_at >= 0:
            return
        if self._offset < 0 and self.total <= _MEMORY_BYTES:
            self._head += data
            return
        try:
            grown = min(self.total, self._cap) - self._claimed
            if grown:
                spool.claim(grown)
                self._claimed += grown
            if self._offset < 0:
                offset = spool.reserve(self._cap)
                spool.write(offset, bytes(self._head))
                self._offset = offset
                self._head = bytearray()
            self._write_region(spool, at, data)
        except OSError:
            # The disk or the spool is full: what is there is kept, the rest is counted and told as truncated.
            self._lost_at = at

    def _write_region(self, spool: Spool, at: int, data: bytes | memoryview) -> None:
        if at < self._head_cap:
            piece = data[: self._head_cap - at]
            spool.write(self._offset + at, piece)
            data = data[len(piece) :]
            at += len(piece)
        if len(data) > self._tail_cap:
            at += len(data) - self._tail_cap
            data = data[len(data) - self._tail_cap :]
        while data:
            place = (at - self._head_cap) % self._tail_cap
            piece = data[: self._tail_cap - place]
            spool.write(self._offset + self._head_cap + place, piece)
            data = data[len(piece) :]
            at += len(piece)

    @property
    def truncated(self) -> bool:
        return self.total > self.size

    @property
    def size(self) -> int:
        """Length of `value()`."""
        if self._lost_at >= 0:
            return min(self._lost_at, self._head_cap) if self._offset >= 0 else len(self._head)
        return min(self.total, self._cap)

    @property
    def memory_bytes(self) -> int:
        return len(self._head) + len(self._tail)

    def value(self) -> bytes:
        """Everything when it fits, else head and tail joined."""
        if self._offset >= 0 and self._spool is not None:
            size = self.size
            if self.total <= self._cap or self._lost_at >= 0:
                return self._spool.read(self._offset, size)
            ring = self._offset + self._head_cap
            place = (self.total - self._head_cap) % self._tail_cap
            read = self._spool.read
            return b"".join(
                (
                    read(self._offset, self._head_cap),
                    read(ring + place, self._tail_cap - place),
                    read(ring, place),
                )
            )
        tail = self._tail
        if len(tail) > self._tail_cap:
            return bytes(self._head) + bytes(tail[len(tail) - self._tail_cap :])
        return bytes(self._head) + bytes(tail) if tail else bytes(self._head)

    def release(self) -> None:
        """The value is not needed any more."""
        if self._offset >= 0 and self._spool is not None:
            self._spool.release(self._offset, self._cap, self._claimed)
            self._offset = -1
        self._head = bytearray()
        self._tail = bytearray()
