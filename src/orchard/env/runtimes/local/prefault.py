"""Pages of memory given to a process before it asks for them.

A forked process shares its parent's memory; each page that it writes to is copied first, at the cost of a fault. An
agent writes to much the same pages as the one before it. What one wrote to is read from the kernel, and processes that
are forked in an idle moment get those pages then.
"""

from __future__ import annotations

import ctypes
import os
import struct

from orchard.env.runtimes.local.kernel import madvise

TYPE_CHECKING = False  # importing typing would cost every sandbox most of a megabyte
if TYPE_CHECKING:
    from collections.abc import Sequence

_PAGE = os.sysconf("SC_PAGE_SIZE")
_MADV_POPULATE_WRITE = 23
#: Of an entry in /proc/PID/pagemap: present; of a file; mapped by this process alone.
_PRESENT, _FILE, _EXCLUSIVE = 1 << 63, 1 << 61, 1 << 56
#: More than any agent needs: something else was going on there.
_MAX_PAGES = 1024


def written_pages(pid: int) -> list[tuple[int, int]]:
    """Address and length in bytes of what a child has written to of the memory that it got from this process.

    Empty when that cannot be learned. Raises OSError when the child is gone.
    """
    found: list[tuple[int, int]] = []
    pages = 0
    with open(f"/proc/{pid}/pagemap", "rb", buffering=0) as pagemap:
        for start, end in _own_memory():
            count = (end - start) // _PAGE
            data = os.pread(pagemap.fileno(), 8 * count, start // _PAGE * 8)
            for index, (entry,) in enumerate(struct.iter_unpack("<Q", data)):
                if entry & _PRESENT and entry & _EXCLUSIVE and not entry & _FILE:
                    address = start + index * _PAGE
                    pages += 1
                    if found and sum(found[-1]) == address:
                        found[-1] = (found[-1][0], found[-1][1] + _PAGE)
                    else:
                        found.append((address, _PAGE))
    return found if pages <= _MAX_PAGES else []


def _own_memory() -> list[tuple[int, int]]:
    """Start and end of this process' private, writable memory."""
    areas = []
    with open("/proc/self/maps") as maps:
        for line in maps:
            addresses, access = line.split(" ", 2)[:2]
            if access == "rw-p":
                start, _, end = addresses.partition("-")
                areas.append((int(start, 16), int(end, 16)))
    return areas


def give_pages(pages: Sequence[tuple[int, int]]) -> None:
    """Have this process' own copies of `pages` made now. Where the kernel cannot, they are made when needed."""
    for address, length in pages:
        madvise(ctypes.c_void_p(address), length, _MADV_POPULATE_WRITE)
