"""Building an image's files from the entries of its layers.

One writer fills one directory. Without a base it flattens: a whiteout removes what an earlier layer put there. Over
a base it makes an overlayfs layer: a whiteout becomes the overlay's own mark where the base shows the name. Nothing
in an entry is trusted; `walk.py` keeps every name inside.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from orchard.env.errors import DiskFull, ImageInvalid, InfrastructureError, TooLarge
from orchard.env.images.area import no_space, remove_entry
from orchard.env.images.entries import Entry, components
from orchard.env.images.limits import ImportLimits
from orchard.env.images.view import (
    ImageView,
    close_all,
    copy_xattrs,
    is_whiteout,
    keep_xattr,
    mark_opaque,
    readlink_at,
    set_opaque,
    stat_at,
)
from orchard.env.images.walk import Path, Walker

_WHITEOUT = b".wh."
_OPAQUE = b".wh..wh..opq"
_AUFS = b".wh..wh."
_MAPPED_IDS = 65536
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

#: File-system refusals that the archive is to blame for.
_ARCHIVE_FAULTS = (
    errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL, errno.EMLINK, errno.EILSEQ, errno.ENOENT, errno.EFBIG,
    errno.ENOTDIR, errno.EISDIR, errno.EPERM,
)  # fmt: skip

Content = Callable[[], Iterator[tuple[int, bytes]]]


class TreeWriter:
    """See the module's docstring. root_fd: the open, empty target directory, taken over.

    keep_links: a directory entry whose name is a link to a directory leaves the link in place, as for plain tars
    laid over a base; in an image's layers it replaces the link. notes: what was left out, counted.
    """

    def __init__(
        self, root_fd: int, limits: ImportLimits, base: ImageView | None = None, *, keep_links: bool = False
    ) -> None:
        self._limits = limits
        self._base = base
        self._keep_links = keep_links
        self._walker = Walker(root_fd, base, limits.depth)
        self._root = os.geteuid() == 0
        self._layer = -1
        self._bytes = 0
        self._times: dict[Path, int] = {}
        self._modes: dict[Path, int] = {}  # to set at the end, where a real mode would lock out its owner
        self._touched: set[int] = set()  # hashes of the paths that the current layer made
        self.notes: Counter[str] = Counter()

    def close(self) -> None:
        self._walker.close()

    def add_layer(self, entries: Iterable[Entry], content: Content) -> None:
        """Apply one layer. Raises ImageInvalid, TooLarge, DiskFull or InfrastructureError, naming the entry."""
        self._layer += 1
        self._touched.clear()
        for entry in entries:
            try:
                self._put(entry, content)
            except OSError as error:
                raise _explained(entry, error) from error

    def finish(self) -> None:
        """Set what had to wait until all files exist: times of directories and modes without owner rights."""
        self._times = {**self._walker.copied, **self._times}
        for path in sorted({*self._times, *self._modes}, reverse=True):
            # A directory that a later entry replaced is skipped: its path is gone or leads elsewhere.
            if not self._walker.enter(path, create=False) or self._walker.path != path:
                continue
            fd = self._walker.here.fd
            if fd < 0:
                continue
            if path in self._modes:
                os.fchmod(fd, self._modes[path])
            if path in self._times:
                os.utime(fd, ns=(self._times[path],) * 2)

    def _put(self, entry: Entry, content: Content) -> None:
        parts = components(entry.name, self._limits.depth)
        if not parts:
            if entry.kind == "directory":
                self._walker.enter((), create=True)
                self._describe_directory(entry)
            return
        parent, name = parts[:-1], parts[-1]
        if name == _OPAQUE:
            self._hide_all(parent)
        elif _AUFS in entry.name and any(part.startswith(_AUFS) for part in parts):
            self.notes["files of aufs bookkeeping left out"] += 1
        elif name.startswith(_WHITEOUT):
            self._hide(parent, name.removeprefix(_WHITEOUT))
        elif entry.kind in ("device", "other"):
            what = "device nodes" if entry.kind == "device" else "entries of unknown types"
            self.notes[f"{what} left out"] += 1
        elif entry.kind == "directory":
            self._directory(parent, name, entry)
        elif entry.kind == "hardlink":
            self._hard_link(parent, name, components(entry.link, self._limits.depth))
        else:
            self._walker.enter(parent, create=True)
            self._refuse_over_mount((*self._walker.path, name))
            try:
                self._create(name, entry, content)
            except FileExistsError:
                remove_entry(self._walker.here.fd, name)
                self._create(name, entry, content)
            self._touch(name)
        if self._walker.made > self._limits.directories:
            raise TooLarge(f"The image has more than the allowed {self._limits.directories} directories.")

    # -- entries -------------------------------------------------------------------------------------------

    def _directory(self, parent: Path, name: bytes, entry: Entry) -> None:
        walker = self._walker
        if self._keep_links and self._follows_link(parent, name):
            return
        walker.enter(parent, create=True)
        own = stat_at(walker.here.fd, name)
        if own is None or not stat.S_ISDIR(own.st_mode):
            if own is not None:
                remove_entry(walker.here.fd, name)
            os.mkdir(name, 0o700, dir_fd=walker.here.fd)
            walker.made += 1
            if own is not None and walker.base_shows(name, directory=True):
                set_opaque(walker.here.fd, name)  # what stood here hid the base's directory: it stays hidden
        self._touch(name)
        walker.push(name)
        self._describe_directory(entry)

    def _follows_link(self, parent: Path, name: bytes) -> bool:
        """Whether `name` is a link to a directory."""
        walker = self._walker
        if not walker.enter(parent, create=False):
            return False
        real = (*walker.path, name)
        return walker.enter((*parent, name), create=False) and walker.path != real

    def _describe_directory(self, entry: Entry) -> None:
        fd, path = self._walker.here.fd, self._walker.path
        self._own(fd, entry)
        locked = not self._root and entry.mode & 0o700 != 0o700
        os.fchmod(fd, entry.mode | 0o700 if locked else entry.mode)
        self._modes.pop(path, None)
        if locked:
            self._modes[path] = entry.mode
        self._set_xattrs(fd, entry)
        self._times[path] = entry.mtime_ns

    def _create(self, name: bytes, entry: Entry, content: Content) -> None:
        fd = self._walker.here.fd
        if entry.kind == "file":
            self._file(fd, name, entry, content)
            return
        if entry.kind == "symlink":
            os.symlink(entry.link, name, dir_fd=fd)
        else:
            os.mkfifo(name, 0o600, dir_fd=fd)
        self._count_owner(entry)
        if self._root:
            os.chown(name, entry.uid, entry.gid, dir_fd=fd, follow_symlinks=False)
        if entry.kind == "fifo":
            os.chmod(name, entry.mode, dir_fd=fd)
        os.utime(name, ns=(entry.mtime_ns,) * 2, dir_fd=fd, follow_symlinks=False)

    def _file(self, parent_fd: int, name: bytes, entry: Entry, content: Content) -> None:
        fd = os.open(name, _NEW_FILE, 0o600, dir_fd=parent_fd)
        try:
            self._bytes += entry.size
            if self._bytes > self._limits.unpacked_bytes:
                raise TooLarge(f"The image's files exceed the allowed {self._limits.unpacked_bytes} bytes.")
            for offset, data in content():
                _write_at(fd, data, offset)
            if entry.segments is not None:
                os.ftruncate(fd, entry.size)
            self._own(fd, entry)
            os.fchmod(fd, entry.mode)  # after the owner: a change of owner clears setuid
            self._set_xattrs(fd, entry)
            os.utime(fd, ns=(entry.mtime_ns,) * 2)
        finally:
            os.close(fd)

    def _hard_link(self, parent: Path, name: bytes, target: Path) -> None:
        walker = self._walker
        source = self._link_source(target)
        try:
            walker.enter(parent, create=True)
            own = stat_at(walker.here.fd, name)
            there = os.stat(target[-1], dir_fd=source, follow_symlinks=False)
            if own is None or (own.st_dev, own.st_ino) != (there.st_dev, there.st_ino):
                self._refuse_over_mount((*walker.path, name))
                remove_entry(walker.here.fd, name)
                os.link(target[-1], name, src_dir_fd=source, dst_dir_fd=walker.here.fd, follow_symlinks=False)
            self._touch(name)
        finally:
            os.close(source)

    def _link_source(self, target: Path) -> int:
        """The open directory that holds the target of a hard link, which is copied from the base if need be."""
        walker = self._walker
        if target and walker.enter(target[:-1], create=False):
            fd = walker.here.fd
            own = stat_at(fd, target[-1]) if fd >= 0 else None
            if own is None and (seen := walker.below(target[-1])) is not None:
                close_all(seen.directories)
                if not seen.directories:
                    walker.materialise()
                    self._copy_up(target[-1], seen.holder, seen.info)
                    self._touch(target[-1])
                    return os.dup(walker.here.fd)
            elif own is not None and not stat.S_ISDIR(own.st_mode) and not is_whiteout(own):
                return os.dup(fd)
        text = os.fsdecode(b"/".join(target))
        raise ImageInvalid(f"The archive holds a hard link to {text!r}, which is no file in the image.")

    def _copy_up(self, name: bytes, holder: int, info: os.stat_result) -> None:
        """Copy a file or link of the base into the current directory, as overlayfs does before a change."""
        here = self._walker.here.fd
        if stat.S_ISLNK(info.st_mode):
            os.symlink(readlink_at(holder, name), name, dir_fd=here)
            if self._root:
                os.chown(name, info.st_uid, info.st_gid, dir_fd=here, follow_symlinks=False)
            os.utime(name, ns=(info.st_mtime_ns,) * 2, dir_fd=here, follow_symlinks=False)
            return
        if not stat.S_ISREG(info.st_mode):
            raise ImageInvalid(f"The archive holds a hard link to {os.fsdecode(name)!r}, a special file.")
        source = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=holder)
        try:
            info = os.fstat(source)
            target = os.open(name, _NEW_FILE, 0o600, dir_fd=here)
            try:
                offset = 0
                while sent := os.sendfile(target, source, offset, 1 << 24):
                    offset += sent
                if self._root:
                    os.fchown(target, info.st_uid, info.st_gid)
                os.fchmod(target, stat.S_IMODE(info.st_mode))
                copy_xattrs(source, target)
                os.utime(target, ns=(info.st_mtime_ns,) * 2)
            finally:
                os.close(target)
        finally:
            os.close(source)

    # -- hiding --------------------------------------------------------------------------------------------

    def _hide(self, parent: Path, name: bytes) -> None:
        """A whiteout: what lower layers have under `name` is gone."""
        if name in (b"", b".", b".."):
            raise ImageInvalid(f"The archive holds a whiteout of {os.fsdecode(name)!r}, which names no file.")
        walker = self._walker
        if not walker.enter(parent, create=False):
            return
        self._refuse_over_mount((*walker.path, name))
        fd = walker.here.fd
        own = stat_at(fd, name) if fd >= 0 else None
        shown = walker.base_shows(name)
        if own is not None and not is_whiteout(own):
            if self._is_touched((*walker.path, name)):
                # Whiteouts speak of lower layers only: what this layer put there stays.
                if stat.S_ISDIR(own.st_mode):
                    walker.push(name)
                    self._hide_all_here()
                return
            remove_entry(fd, name)
            own = None
        if shown and own is None:
            walker.materialise()
            os.mknod(name, 0o600 | stat.S_IFCHR, os.makedev(0, 0), dir_fd=walker.here.fd)

    def _hide_all(self, parent: Path) -> None:
        """An opaque mark: of the directory's content only what this layer has remains."""
        if self._walker.enter(parent, create=False):
            self._hide_all_here()

    def _hide_all_here(self) -> None:
        walker = self._walker
        self._refuse_over_mount(walker.path)
        if not walker.path and self._base is not None:
            raise ImageInvalid("The archive hides its whole base; import it without one.")
        if walker.here.fd >= 0:
            self._drop_untouched(walker.here.fd, walker.path)
        if walker.here.base:
            walker.materialise()
            mark_opaque(walker.here.fd)
            walker.cut_base()

    def _drop_untouched(self, fd: int, path: Path) -> None:
        for child in os.listdir(fd):
            name = os.fsencode(child)
            if not self._is_touched((*path, name)):
                remove_entry(fd, name)
                continue
            info = os.stat(name, dir_fd=fd, follow_symlinks=False)
            if stat.S_ISDIR(info.st_mode):
                inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
                try:
                    self._drop_untouched(inner, (*path, name))
                finally:
                    os.close(inner)

    # -- helpers -------------------------------------------------------------------------------------------

    def _refuse_over_mount(self, path: Path) -> None:
        if self._walker.covers_mount(path):
            text = os.fsdecode(b"/".join(path))
            raise ImageInvalid(
                f"The archive removes or replaces {'/' + text!r}, which the base image takes from this machine; "
                f"import it without a base, or leave that directory in place."
            )

    def _touch(self, name: bytes) -> None:
        if self._layer == 0 and self._base is None:
            return  # nothing lies below, so nobody will ask
        path = (*self._walker.path, name)
        while path and hash(path) not in self._touched:
            self._touched.add(hash(path))
            path = path[:-1]

    def _is_touched(self, path: Path) -> bool:
        return hash(path) in self._touched

    def _own(self, fd: int, entry: Entry) -> None:
        self._count_owner(entry)
        if self._root:
            os.fchown(fd, entry.uid, entry.gid)

    def _count_owner(self, entry: Entry) -> None:
        if not self._root and (entry.uid, entry.gid) != (os.geteuid(), os.getegid()):
            self.notes["owners not kept (only root can)"] += 1
        if max(entry.uid, entry.gid) >= _MAPPED_IDS:
            self.notes["owners above 65535, which sandboxes see as nobody"] += 1

    def _set_xattrs(self, fd: int, entry: Entry) -> None:
        for name, value in entry.xattrs.items():
            try:
                if not keep_xattr(name):
                    raise OSError(errno.ENOTSUP, "left out")
                os.setxattr(fd, name, value)
            except (OSError, ValueError) as error:
                if isinstance(error, OSError) and no_space(error):
                    raise
                self.notes["extended attributes left out"] += 1


def _write_at(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def _explained(entry: Entry, error: OSError) -> Exception:
    name = os.fsdecode(entry.name)
    if no_space(error):
        return DiskFull(
            f"The disk is full at {name!r}: free space (`orchard images prune` may help) and import again."
        )
    if error.errno in _ARCHIVE_FAULTS:
        return ImageInvalid(f"The archive's entry {name!r} cannot be created: {error.strerror}.")
    return InfrastructureError(f"The image store failed at {name!r}: {error.strerror}.")
