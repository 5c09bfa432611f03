"""What inotify(7) tells: its flags, the form of its events, what its errors mean; and the tree of what is watched."""

from __future__ import annotations

import errno

from orchard.env.agent.job import AgentError
from orchard.env.agent.paths import failure

TYPE_CHECKING = False  # importing typing would cost every sandbox most of a megabyte
if TYPE_CHECKING:
    from collections.abc import Iterator

IN_MODIFY, IN_ATTRIB, IN_CLOSE_WRITE = 0x2, 0x4, 0x8
IN_MOVED_FROM, IN_MOVED_TO = 0x40, 0x80
IN_CREATE, IN_DELETE = 0x100, 0x200
IN_DELETE_SELF, IN_MOVE_SELF = 0x400, 0x800
IN_UNMOUNT, IN_Q_OVERFLOW, IN_IGNORED = 0x2000, 0x4000, 0x8000
IN_ONLYDIR, IN_EXCL_UNLINK, IN_ISDIR = 0x1000000, 0x4000000, 0x40000000

_HEADER_BYTES = 16


class Node:
    """A watched directory. told: names that a scan has told as created already, whose events may still come."""

    __slots__ = ("children", "name", "parent", "told", "wd")

    def __init__(self, name: bytes, parent: Node | None, wd: int) -> None:
        self.name = name
        self.parent = parent
        self.wd = wd
        self.children: dict[bytes, Node] = {}
        self.told: set[bytes] = set()

    def names(self) -> tuple[bytes, ...]:
        """Its path below the root."""
        found: list[bytes] = []
        node: Node = self
        while node.parent is not None:
            found.append(node.name)
            node = node.parent
        return tuple(reversed(found))


def parsed(data: bytes) -> Iterator[tuple[int, int, int, bytes]]:
    """Watch number, mask, cookie and name of each event."""
    at = 0
    while at < len(data):
        size = int.from_bytes(data[at + 12 : at + 16], "little")
        name = data[at + _HEADER_BYTES : at + _HEADER_BYTES + size].rstrip(b"\0")
        wd = int.from_bytes(data[at : at + 4], "little", signed=True)
        yield (
            wd,
            int.from_bytes(data[at + 4 : at + 8], "little"),
            int.from_bytes(data[at + 8 : at + 12], "little"),
            name,
        )
        at += _HEADER_BYTES + size


def explained(error: OSError, path: str) -> AgentError:
    """What a failed system call of a watch is for the client."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        text = "this machine allows no more watches (fs.inotify.max_user_instances); end some, or ask for a higher limit"
        return AgentError("overloaded", text)
    if error.errno == errno.ENOSPC:
        text = "this machine allows no more watched directories (fs.inotify.max_user_watches); watch a smaller tree"
        return AgentError("overloaded", text)
    return failure(error, path)
