"""Watching a file or a tree for changes, through inotify.

A watch begins with its descriptors in place, so that nothing after the answer is missed. Directories are watched,
never files: a file of the image is copied when it is first written, and a watch of it would go on watching the old one.
"""

from __future__ import annotations

import errno
import os
import time
from collections import deque

from orchard.env.agent import syscalls
from orchard.env.agent.files import printable
from orchard.env.agent.inotify import (
    IN_ATTRIB,
    IN_CLOSE_WRITE,
    IN_CREATE,
    IN_DELETE,
    IN_DELETE_SELF,
    IN_EXCL_UNLINK,
    IN_IGNORED,
    IN_ISDIR,
    IN_MODIFY,
    IN_MOVE_SELF,
    IN_MOVED_FROM,
    IN_MOVED_TO,
    IN_ONLYDIR,
    IN_Q_OVERFLOW,
    IN_UNMOUNT,
    Node,
    explained,
    parsed,
)  # fmt: skip
from orchard.env.agent.job import AgentError
from orchard.env.agent.loop import READ
from orchard.env.agent.paths import BELOW, on_its_way, open_inside

TYPE_CHECKING = False  # importing typing would cost every sandbox most of a megabyte
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from orchard.env.agent.loop import Loop

    Change = dict[str, Any]
    Names = tuple[bytes, ...]

_MASK = (
    IN_MODIFY | IN_ATTRIB | IN_CLOSE_WRITE | IN_MOVED_FROM | IN_MOVED_TO | IN_CREATE | IN_DELETE | IN_DELETE_SELF
    | IN_MOVE_SELF | IN_ONLYDIR | IN_EXCL_UNLINK
)  # fmt: skip
_SIMPLE = {IN_MODIFY: "modified", IN_ATTRIB: "attributes", IN_CLOSE_WRITE: "written", IN_DELETE: "removed"}
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NONBLOCK | os.O_NOFOLLOW
#: A watched directory takes a kilobyte of the kernel's memory.
_MAX_DIRECTORIES = 8192
#: Changes that nobody has asked for yet; with more than these, they are dropped and a gap is told.
_MAX_PENDING = 8192
#: Scanning a tree holds the agent no longer than this at a time.
_SLICE_S = 0.03
#: The other half of a move comes at once, if it comes.
_PAIRING_S = 0.02


class Watch:
    """One watch. only: the one name below the root that counts, when it is of a file. ready: called once, when
    everything is watched, with None or what failed."""

    def __init__(self, loop: Loop, path: bytes, only: bytes | None, recursive: bool) -> None:
        self._loop = loop
        self._path = path.rstrip(b"/")
        self._only = only
        self._recursive = recursive
        self._fd = -1
        self._nodes: dict[int, Node] = {}
        self._root: Node | None = None
        self._unscanned: deque[tuple[Node, bool]] = deque()
        self._scanning = False
        self._moved: tuple[int, Node, bytes, bool] | None = None
        self._pending: list[Change] = []
        self._modified: set[Names] = set()
        self._ready: Callable[[AgentError | None], None] | None = None
        self._waiter: Callable[[], None] | None = None
        self.ended = False

    # ---------------------------------------------------------------------------------------------- set-up

    def start(self, ready: Callable[[AgentError | None], None]) -> None:
        """Watch everything; `ready` is called when that is so, maybe at once. Raises OSError or `AgentError`."""
        self._ready = ready
        self._begin()
        self._scan()

    def _begin(self) -> None:
        self._fd = syscalls.inotify_init()
        self._loop.watch(self._fd, READ, self._readable)
        # Not kept open: the kernel tells of the end of a directory when nobody holds it any more.
        fd = open_inside(self._path or b"/", _DIRECTORY & ~os.O_NOFOLLOW)
        try:
            self._root = self._add(b"", None, fd)
        finally:
            os.close(fd)
        if self._recursive:
            self._unscanned.append((self._root, False))

    def _add(self, name: bytes, parent: Node | None, dir_fd: int) -> Node:
        if len(self._nodes) >= _MAX_DIRECTORIES:
            raise AgentError(
                "invalid_request",
                f"the tree has more than {_MAX_DIRECTORIES} directories; watch a smaller one",
            )
        # By the descriptor's own name: whatever takes the directory's place meanwhile is not what is watched.
        wd = syscalls.inotify_add(self._fd, b"/proc/self/fd/%d" % dir_fd, _MASK)
        known = self._nodes.get(wd)
        if known is not None:
            return known
        node = Node(name, parent, wd)
        self._nodes[wd] = node
        if parent is not None:
            parent.children[name] = node
        return node

    def _scan(self) -> None:
        """Watch the directories below those that are not looked into yet; goes on later when it takes long."""
        self._scanning = False
        if self._fd < 0:
            return
        deadline = time.monotonic() + _SLICE_S
        try:
            while self._unscanned:
                if time.monotonic() > deadline:
                    self._scanning = True
                    self._loop.after(0, self._scan)
                    return
                node, tell = self._unscanned.popleft()
                self._scan_one(node, tell)
        except (OSError, AgentError) as error:
            self._failed(error)
            return
        if self._ready is not None:
            ready, self._ready = self._ready, None
            ready(None)

    def _scan_one(self, node: Node, tell: bool) -> None:
        if self._nodes.get(node.wd) is not node:
            return  # it has gone meanwhile
        fd = self._open(node)
        if fd < 0:
            return
        try:
            with os.scandir(fd) as entries:
                found = [(os.fsencode(entry.name), entry.is_dir(follow_symlinks=False)) for entry in entries]
            for name, directory in found:
                if tell and not on_its_way(name):
                    node.told.add(name)
                    self._tell("created", (*node.names(), name), directory)
                if directory and name not in node.children and not on_its_way(name):
                    self._watch_below(node, name, fd, tell)
        except (FileNotFoundError, NotADirectoryError):
            pass
        finally:
            os.close(fd)

    def _watch_below(self, node: Node, name: bytes, dir_fd: int, tell: bool) -> None:
        try:
            inner_fd = syscalls.openat2(dir_fd, name, _DIRECTORY, 0, BELOW)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES, errno.EXDEV):
                return  # it has gone or become something else; or nobody may look into it
            raise
        try:
            inner = self._add(name, node, inner_fd)
        finally:
            os.close(inner_fd)
        self._unscanned.append((inner, tell))

    def _open(self, node: Node) -> int:
        """A descriptor of it, or -1 when it is not there any more."""
        try:
            fd = open_inside(self._path or b"/", _DIRECTORY & ~os.O_NOFOLLOW)
        except OSError:
            return -1
        names = node.names()
        if not names:
            return fd
        try:
            return syscalls.openat2(fd, b"/".join(names), _DIRECTORY, 0, BELOW)
        except OSError:
            return -1
        finally:
            os.close(fd)

    def _failed(self, error: OSError | AgentError) -> None:
        """Of a tree that cannot be watched any more: at the start an answer, later its end after a gap."""
        if isinstance(error, OSError):
            error = explained(error, os.fsdecode(self._path) or "/")
        if self._ready is not None:
            ready, self._ready = self._ready, None
            ready(error)
            return
        self._pending.append({"type": "gap", "path": self._text(()), "message": error.detail})
        self._end()

    # ---------------------------------------------------------------------------------------------- events

    def _readable(self, _events: int) -> None:
        while self._fd >= 0:
            try:
                data = os.read(self._fd, 65536)
            except BlockingIOError:
                break
            for wd, mask, cookie, name in parsed(data):
                if mask & IN_Q_OVERFLOW:
                    self._overflowed()
                    break
                node = self._nodes.get(wd)
                if node is not None:
                    self._happened(node, mask, cookie, name)
        if self._unscanned and not self._scanning:
            self._scan()
        self._wake()

    def _happened(self, node: Node, mask: int, cookie: int, name: bytes) -> None:
        if mask & IN_IGNORED:
            self._forget(node)
        elif not name:
            if node is self._root and mask & (IN_DELETE_SELF | IN_MOVE_SELF | IN_UNMOUNT):
                self._tell("removed", (), True)
                self._end()
        elif mask & IN_MOVED_FROM:
            self._settle_move()
            self._moved = (cookie, node, name, bool(mask & IN_ISDIR))
            self._loop.after(_PAIRING_S, self._move_unpaired(self._moved))
        elif mask & IN_MOVED_TO:
            self._arrived(node, name, cookie, bool(mask & IN_ISDIR))
        elif mask & IN_CREATE:
            self._created(node, name, bool(mask & IN_ISDIR))
        else:
            if mask & IN_DELETE:
                node.told.discard(name)
            for bit, kind in _SIMPLE.items():
                if mask & bit and not on_its_way(name):
                    self._tell(kind, (*node.names(), name), bool(mask & IN_ISDIR))

    def _created(self, node: Node, name: bytes, directory: bool) -> None:
        if name in node.told:
            node.told.discard(name)
        elif not on_its_way(name):
            self._tell("created", (*node.names(), name), directory)
        if directory:
            self._take_in(node, name)

    def _take_in(self, node: Node, name: bytes) -> None:
        """Watch a directory that is new here, and tell what is in it already."""
        if not self._recursive or name in node.children or on_its_way(name):
            return
        fd = self._open(node)
        if fd < 0:
            return
        try:
            self._watch_below(node, name, fd, tell=True)
        except (OSError, AgentError) as error:
            self._failed(error)
        finally:
            os.close(fd)

    def _arrived(self, node: Node, name: bytes, cookie: int, directory: bool) -> None:
        held, self._moved = self._moved, None
        if held is not None and held[0] != cookie:
            self._moved = held
            self._settle_move()
            held = None
        if held is None:
            self._created(node, name, directory)
            return
        _, old_node, old_name, _ = held
        source = (*old_node.names(), old_name)
        child = old_node.children.pop(old_name, None)
        if child is not None:
            child.name, child.parent = name, node
            node.children[name] = child
        elif directory:
            self._take_in(node, name)
        if on_its_way(old_name):
            # An upload that has become whole: for whoever watches, the file was written.
            if not on_its_way(name):
                self._tell("created" if directory else "written", (*node.names(), name), directory)
        elif on_its_way(name):
            self._tell("removed", source, directory)
        elif self._only is None or (old_name == self._only) == (name == self._only):
            self._tell("moved", (*node.names(), name), directory, source)
        else:
            # Of one file: it went away, or something else took its place.
            self._tell("removed" if old_name == self._only else "created", (self._only,), directory)

    def _settle_move(self) -> None:
        """Something was moved to where nothing is watched."""
        if self._moved is None:
            return
        _, node, name, directory = self._moved
        self._moved = None
        child = node.children.get(name)
        if child is not None:
            self._unwatch(child)
        if not on_its_way(name):
            self._tell("removed", (*node.names(), name), directory)

    def _move_unpaired(self, held: tuple[int, Node, bytes, bool]) -> Callable[[], None]:
        def settle() -> None:
            if self._moved is held and not self.ended:
                self._settle_move()
                self._wake()

        return settle

    def _unwatch(self, node: Node) -> None:
        for inner in [*node.children.values()]:
            self._unwatch(inner)
        self._forget(node)
        syscalls.inotify_remove(self._fd, node.wd)

    def _forget(self, node: Node) -> None:
        self._nodes.pop(node.wd, None)
        if node.parent is not None and node.parent.children.get(node.name) is node:
            del node.parent.children[node.name]

    def _overflowed(self) -> None:
        """The kernel has dropped events, of new directories too: everything is looked at anew."""
        self._gap()
        self.close()
        self._nodes.clear()
        self._unscanned.clear()
        self._moved = None
        try:
            self._begin()
        except (OSError, AgentError) as error:
            self._failed(error)

    # --------------------------------------------------------------------------------------------- telling

    def _tell(self, kind: str, names: Names, directory: bool, source: Names | None = None) -> None:
        if self._only is not None and names not in ((), (self._only,)) and source != (self._only,):
            return
        if kind == "modified":
            # One is enough until it is read: a program that writes byte by byte makes thousands.
            if names in self._modified:
                return
            self._modified.add(names)
        else:
            self._modified.discard(names)
        change: Change = {"type": kind, "path": self._text(names)}
        if directory:
            change["directory"] = True
        if source is not None:
            change["source"] = self._text(source)
        self._pending.append(change)
        if len(self._pending) > _MAX_PENDING:
            self._gap()

    def _gap(self) -> None:
        self._pending = [{"type": "gap", "path": self._text(())}]
        self._modified.clear()

    def _text(self, names: Names) -> str:
        return printable(os.fsdecode(self._path + b"".join(b"/" + name for name in names)) or "/")

    def _wake(self) -> None:
        if self._waiter is not None and (self._pending or self.ended):
            waiter, self._waiter = self._waiter, None
            waiter()

    def when_changed(self, waiter: Callable[[], None] | None) -> None:
        """Call `waiter` once, when there is something to take; at once if there is."""
        self._waiter = waiter
        self._wake()

    def take(self) -> list[Change]:
        """What has happened since the last time."""
        taken, self._pending = self._pending, []
        self._modified.clear()
        return taken

    def _end(self) -> None:
        self.ended = True
        self._nodes.clear()
        self.close()
        self._wake()

    def close(self) -> None:
        """Let go of its descriptor; repeating is fine."""
        if self._fd >= 0:
            self._loop.unwatch(self._fd)
            os.close(self._fd)
            self._fd = -1
