"""Bounded output of one stream of a command: all of it up to a cap, else its head and its tail."""

from __future__ import annotations


class OutputWindow:
    """Keeps at most `cap_bytes`: the first half and the last half of what was written.

    `total` counts every byte. Memory stays within twice the cap however much is written.
    """

    __slots__ = ("_head", "_head_cap", "_tail", "_tail_cap", "total")

    def __init__(self, cap_bytes: int) -> None:
        self.total = 0
        self._head_cap = cap_bytes - cap_bytes // 2
        self._tail_cap = cap_bytes // 2
        self._head = bytearray()
        self._tail = bytearray()

    def write(self, data: bytes) -> None:
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

    @property
    def truncated(self) -> bool:
        return self.total > self._head_cap + self._tail_cap

    @property
    def size(self) -> int:
        """Length of `value()`."""
        return min(self.total, self._head_cap + self._tail_cap)

    def value(self) -> bytes:
        """Everything when it fits, else head and tail joined."""
        tail = self._tail
        if len(tail) > self._tail_cap:
            return bytes(self._head) + bytes(tail[len(tail) - self._tail_cap :])
        return bytes(self._head) + bytes(tail) if tail else bytes(self._head)
