"""The output of one stream of a command: what its record keeps of it, and what can still be streamed."""

from __future__ import annotations

import errno
import os

from orchard.env.agent import syscalls

TYPE_CHECKING = False  # importing typing would cost every sandbox most of a megabyte
if TYPE_CHECKING:
    from collections.abc import Callable

#: What a stream holds in memory; more goes to the spool. The agent's memory is not the sandbox's.
_MEMORY_BYTES = 256 << 10
#: Of all streams of a sandbox together, on the machine's disk.
_SPOOL_BYTES = 1 << 30


class Spool:
    """A sparse file on the machine's disk in which streams have regions; made when the first one needs it.

    folder_fd: the sandbox's own directory on the machine, opened before the image was visible. cap_bytes: of all
    regions together, so that commands side by side cannot fill the machine's disk. reclaim: makes room when that is
    reached; false when it cannot.
    """

    def __init__(self, folder_fd: int, cap_bytes: int = _SPOOL_BYTES) -> None:
        self._folder_fd = folder_fd
        self._cap_bytes = cap_bytes
        self._used_bytes = 0
        self._fd = -1
        self._end = 0
        # Regions given back, by size: offsets in a file end somewhere.
        self._free: dict[int, list[int]] = {}
        self.reclaim: Callable[[], bool] = lambda: False

    def reserve(self, size_bytes: int) -> int:
        """The offset of a new region. Raises OSError."""
        if self._fd < 0:
            flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
            self._fd = os.open("spool", flags, 0o600, dir_fd=self._folder_fd)
        free = self._free.get(size_bytes)
        if free:
            return free.pop()
        offset, self._end = self._end, self._end + size_bytes
        return offset

    def claim(self, size_bytes: int) -> None:
        """Count bytes that a region is about to hold more than before. Raises OSError when the spool is full."""
        while self._used_bytes + size_bytes > self._cap_bytes:
            if not self.reclaim():
                raise OSError(errno.EDQUOT, "the output of the sandbox's commands fills its spool")
        self._used_bytes += size_bytes

    def write(self, offset: int, data: bytes | memoryview) -> None:
        while data:
            written = os.pwrite(self._fd, data, offset)
            data = data[written:]
            offset += written

    def read(self, offset: int, size_bytes: int) -> bytes:
        return os.pread(self._fd, size_bytes, offset)

    def punch(self, offset: int, size_bytes: int) -> None:
        """Give the disk space of a part back."""
        if size_bytes > 0:
            syscalls.punch_hole(self._fd, offset, size_bytes)

    def unclaim(self, size_bytes: int) -> None:
        self._used_bytes -= size_bytes

    def release(self, offset: int, size_bytes: int) -> None:
        """Give a region back. What it claimed is told by `unclaim`."""
        self.punch(offset, size_bytes)
        self._free.setdefault(size_bytes, []).append(offset)


class Output:
    """What was written to one stream. `total` counts every byte.

    Of the record (`value`) at most `cap_bytes` are kept: the first half and the last half. For streaming (`read`) the
    last `spool_bytes` are kept, and that first half. In memory are at most 256 KiB; beyond that, all lies in a region
    of the spool: the first half of the record, then a ring with the newest bytes.
    """

    __slots__ = (
        "_cap", "_claimed", "_first", "_head_cap", "_lost_at", "_memory", "_offset", "_ring", "_spool", "_tail_cap",
        "total",
    )  # fmt: skip

    def __init__(self, cap_bytes: int, spool: Spool, spool_bytes: int) -> None:
        self.total = 0
        self._cap = cap_bytes
        self._head_cap = cap_bytes - cap_bytes // 2
        self._tail_cap = cap_bytes // 2
        self._ring = max(spool_bytes, cap_bytes, 1)
        self._memory = bytearray()
        self._spool = spool
        self._offset = -1  # of the region; -1: all is in memory
        self._claimed = 0
        self._first = 0  # where the ring begins, if it has been cut short
        self._lost_at = -1  # from here on nothing could be kept

    # ------------------------------------------------------------------------------------------ writing

    def write(self, data: bytes | memoryview) -> None:
        at = self.total
        self.total += len(data)
        if self._lost_at >= 0:
            return
        if self._offset < 0 and self.total <= _MEMORY_BYTES:
            self._memory += data
            return
        try:
            grown = min(self.total, self._head_cap) + min(self.total, self._ring) - self._claimed
            if grown > 0:
                self._spool.claim(grown)
                self._claimed += grown
            if self._offset < 0:
                self._offset = self._spool.reserve(self._head_cap + self._ring)
                self._put(0, bytes(self._memory))
                self._memory = bytearray()
            self._put(at, data)
        except OSError:
            # The disk or the spool is full: what is there is kept, the rest is counted and told as lost.
            self._lost_at = at

    def _put(self, at: int, data: bytes | memoryview) -> None:
        if at < self._head_cap:
            self._spool.write(self._offset + at, data[: self._head_cap - at])
        if len(data) > self._ring:
            at += len(data) - self._ring
            data = data[len(data) - self._ring :]
        start = self._offset + self._head_cap
        while data:
            place = at % self._ring
            piece = data[: self._ring - place]
            self._spool.write(start + place, piece)
            data = data[len(piece) :]
            at += len(piece)

    # ------------------------------------------------------------------------------------------ reading

    @property
    def _kept(self) -> int:
        """The end of what is kept."""
        return self.total if self._lost_at < 0 else self._lost_at

    def read(self, offset: int, limit_bytes: int) -> tuple[int, bytes]:
        """Up to `limit_bytes` from `offset` on, and where they begin: later than asked for where bytes are gone."""
        end = self._kept
        if offset >= end:
            return max(offset, self.total) if self._lost_at >= 0 else offset, b""
        if self._offset < 0:
            return offset, bytes(self._memory[offset : offset + limit_bytes])
        if offset < self._head_cap:
            size = min(limit_bytes, self._head_cap - offset, end - offset)
            return offset, self._spool.read(self._offset + offset, size)
        offset = max(offset, self._first, end - self._ring)
        return offset, self._ring_bytes(offset, min(limit_bytes, end - offset))

    def _ring_bytes(self, at: int, size: int) -> bytes:
        start, place = self._offset + self._head_cap, at % self._ring
        first = self._spool.read(start + place, min(size, self._ring - place))
        return first if len(first) >= size else first + self._spool.read(start, size - len(first))

    @property
    def truncated(self) -> bool:
        return self.total > self.size

    @property
    def size(self) -> int:
        """Length of `value()`."""
        if self._lost_at >= 0:
            return min(self._lost_at, self._head_cap)
        return min(self.total, self._cap)

    @property
    def memory_bytes(self) -> int:
        return len(self._memory)

    def value(self) -> bytes:
        """Everything when it fits, else head and tail joined."""
        end = self._kept
        if self._lost_at >= 0 or end <= self._head_cap:
            return self._head(min(end, self._head_cap))
        if end <= self._cap:
            return self._head(self._head_cap) + self._since(self._head_cap)
        return self._head(self._head_cap) + (self._since(end - self._tail_cap) if self._tail_cap else b"")

    def _head(self, size: int) -> bytes:
        return bytes(self._memory[:size]) if self._offset < 0 else self._spool.read(self._offset, size)

    def _since(self, at: int) -> bytes:
        return bytes(self._memory[at:]) if self._offset < 0 else self._ring_bytes(at, self.total - at)

    # ------------------------------------------------------------------------------------------- ending

    def shrink(self) -> bool:
        """Keep only what the record needs; whether that freed anything. For a command that has ended."""
        end = self._kept
        first = max(self._first, end - self._ring)
        needed = end - self._tail_cap if self._lost_at < 0 else end
        if self._offset < 0 or first >= needed:
            return False
        start, low, high = self._offset + self._head_cap, first % self._ring, needed % self._ring
        if low < high:
            self._spool.punch(start + low, high - low)
        else:
            self._spool.punch(start + low, self._ring - low)
            self._spool.punch(start, high)
        self._first = needed
        self._spool.unclaim(needed - first)
        self._claimed -= needed - first
        return True

    def release(self) -> None:
        """Nothing of it is needed any more."""
        if self._offset >= 0:
            self._spool.release(self._offset, self._head_cap + self._ring)
            self._offset = -1
        self._spool.unclaim(self._claimed)
        self._claimed = 0
        self._memory = bytearray()
