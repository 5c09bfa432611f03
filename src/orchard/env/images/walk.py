"""Walking inside an image under construction, so that no name in an archive leads anywhere else.

Every component is opened by itself, relative to the directory before it and never through a symbolic link; links
are read and followed here, with the image's root as the ceiling of `..` and of absolute targets. A layer that is
built over a base sees the base's directories and links on its way, and gets a copy of each base directory that it
puts something into, as overlayfs would make it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence

from orchard.env.errors import ImageInvalid
from orchard.env.images.view import (
    DIRECTORY,
    ImageView,
    Seen,
    close_all,
    copy_xattrs,
    is_opaque,
    is_whiteout,
    readlink_at,
    set_opaque,
    stat_at,
)

_MAX_LINKS = 40
_NOWHERE = -1

Path = tuple[bytes, ...]


class Level:
    """One directory on the way. fd: in the layer, or -1 while only the base has it. base: its merged
    directories below the layer, topmost first."""

    __slots__ = ("base", "fd", "name")

    def __init__(self, name: bytes, fd: int, base: tuple[int, ...]) -> None:
        self.name = name
        self.fd = fd
        self.base = base

    def close(self) -> None:
        if self.fd != _NOWHERE:
            os.close(self.fd)
        close_all(self.base)
        self.fd, self.base = _NOWHERE, ()


class Walker:
    """A position in the tree below the open directory `root_fd`, which it takes over."""

    def __init__(self, root_fd: int, base: ImageView | None, depth: int) -> None:
        self._view = base
        self._depth = depth
        self._levels = [Level(b"", root_fd, base.root() if base else ())]
        #: Directories that were made on the way with the base's time: path → nanoseconds.
        self.copied: dict[Path, int] = {}
        self.made = 0

    def close(self) -> None:
        for level in self._levels:
            level.close()

    @property
    def here(self) -> Level:
        """The current directory."""
        return self._levels[-1]

    @property
    def path(self) -> Path:
        """Its real path, free of links."""
        return tuple(level.name for level in self._levels[1:])

    def enter(self, parts: Sequence[bytes], *, create: bool) -> bool:
        """Make `parts` the current directory, following links inside the root.

        With create, missing directories are made (0755, root's) and True is returned; without, False when it does
        not exist or is no directory, and the position is then anywhere. Raises ImageInvalid for link loops, depth,
        and with create for a component that is no directory.
        """
        shared = 0
        while shared < min(len(parts), len(self._levels) - 1):
            if self._levels[shared + 1].name != parts[shared]:
                break
            shared += 1
        self._leave(shared)
        pending = list(reversed(parts[shared:]))
        links = 0
        while pending:
            name = pending.pop()
            if name == b"..":
                self._leave(max(0, len(self._levels) - 2))
            elif name not in (b"", b"."):
                link = self._step(name, create=create)
                if link is None:
                    return False
                if link:
                    links += 1
                    if links > _MAX_LINKS or len(pending) > 4 * self._depth:
                        raise ImageInvalid(f"{_text((*self.path, name))}: too many symbolic links.")
                    if link.startswith(b"/"):
                        self._leave(0)
                    pending.extend(reversed(link.split(b"/")))
        if create:
            self.materialise()
        return True

    def materialise(self) -> None:
        """Give the layer every directory of the current path that only the base had."""
        for index in range(1, len(self._levels)):
            level = self._levels[index]
            if level.fd == _NOWHERE:
                level.fd = self._copy_up(index)

    def below(self, name: bytes) -> Seen | None:
        """What the base shows under `name` here, whatever the layer has; its directories are the caller's."""
        if self._view is None:
            return None
        return self._view.lookup(self.here.base, (*self.path, name))

    def base_shows(self, name: bytes, *, directory: bool = False) -> bool:
        """Whether the base has `name` here (as a directory)."""
        seen = self.below(name)
        if seen is None:
            return False
        close_all(seen.directories)
        return bool(seen.directories) or not directory

    def push(self, name: bytes) -> None:
        """Step into the layer's own directory `name`, which exists."""
        if len(self._levels) > self._depth:
            raise ImageInvalid(f"{_text(self.path)}: nested deeper than {self._depth} directories.")
        fd = os.open(name, DIRECTORY, dir_fd=self.here.fd)
        try:
            seen = None if self._view is None or is_opaque(fd) else self.below(name)
        except BaseException:
            os.close(fd)
            raise
        self._levels.append(Level(name, fd, seen.directories if seen else ()))

    def cut_base(self) -> None:
        """The current directory shows nothing of the base any more."""
        close_all(self.here.base)
        self.here.base = ()

    def covers_mount(self, path: Path) -> bool:
        """Whether a tree that is mounted into the image lies at `path` or below."""
        points = self._view.mount_points if self._view else {}
        return any(point[: len(path)] == path for point in points)

    def _step(self, name: bytes, *, create: bool) -> bytes | None:
        """Into `name`: b"" when done, the target when it is a link, None when it is missing."""
        here = self.here
        own = stat_at(here.fd, name) if here.fd != _NOWHERE else None
        if own is None:
            return self._step_below(name, create=create)
        if stat.S_ISDIR(own.st_mode):
            self.push(name)
            return b""
        if stat.S_ISLNK(own.st_mode):
            return readlink_at(here.fd, name) or None
        if not create:
            return None
        if not is_whiteout(own):
            raise self._not_a_directory(name)
        os.unlink(name, dir_fd=here.fd)
        self._make(name)
        set_opaque(here.fd, name)
        self.push(name)
        return b""

    def _step_below(self, name: bytes, *, create: bool) -> bytes | None:
        seen = self.below(name)
        if seen is None:
            if not create:
                return None
            self.materialise()
            self._make(name)
            self.push(name)
            return b""
        if seen.directories:
            if len(self._levels) > self._depth:
                close_all(seen.directories)
                raise ImageInvalid(f"{_text(self.path)}: nested deeper than {self._depth} directories.")
            self._levels.append(Level(name, _NOWHERE, seen.directories))
            return b""
        if stat.S_ISLNK(seen.info.st_mode):
            return readlink_at(seen.holder, name) or None
        if create:
            raise self._not_a_directory(name)
        return None

    def _make(self, name: bytes) -> None:
        os.mkdir(name, 0o755, dir_fd=self.here.fd)
        os.chmod(name, 0o755, dir_fd=self.here.fd)  # whatever the umask is
        self.made += 1

    def _copy_up(self, index: int) -> int:
        """Make the layer's copy of a base directory: its owner, mode, attributes and time, not its content."""
        level, parent = self._levels[index], self._levels[index - 1]
        info = os.fstat(level.base[0])
        os.mkdir(level.name, 0o700, dir_fd=parent.fd)
        fd = os.open(level.name, DIRECTORY, dir_fd=parent.fd)
        root = os.geteuid() == 0
        if root:
            os.fchown(fd, info.st_uid, info.st_gid)
        os.fchmod(fd, stat.S_IMODE(info.st_mode) | (0 if root else 0o700))
        copy_xattrs(level.base[0], fd)
        self.made += 1
        self.copied[tuple(each.name for each in self._levels[1 : index + 1])] = info.st_mtime_ns
        return fd

    def _leave(self, count: int) -> None:
        """Go back up until `count` levels below the root are left."""
        while len(self._levels) > count + 1:
            self._levels.pop().close()

    def _not_a_directory(self, name: bytes) -> ImageInvalid:
        return ImageInvalid(
            f"The archive puts files below {_text((*self.path, name))}, which is no directory in the image."
        )


def _text(path: Path) -> str:
    return repr("/" + os.fsdecode(b"/".join(path)))
