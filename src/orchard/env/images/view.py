"""What an image shows at a path, its layers merged as overlayfs merges them, read without mounting anything."""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass

from orchard.env.images.model import ResolvedImage

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

#: Marks of an opaque directory; the second kind serves overlays that were mounted without privilege.
OPAQUE_XATTRS = ("trusted.overlay.opaque", "user.overlay.opaque")


def is_whiteout(info: os.stat_result) -> bool:
    """Whether this is the mark that hides a name in the layers below: a character device 0:0."""
    return stat.S_ISCHR(info.st_mode) and info.st_rdev == 0


def is_opaque(fd: int) -> bool:
    """Whether an open directory hides the whole directory of that name in the layers below."""
    for name in OPAQUE_XATTRS:
        try:
            if os.getxattr(fd, name) == b"y":
                return True
        except OSError:
            continue
    return False


def stat_at(fd: int, name: bytes) -> os.stat_result | None:
    """lstat in an open directory; None when there is nothing."""
    try:
        return os.stat(name, dir_fd=fd, follow_symlinks=False)
    except FileNotFoundError:
        return None


@dataclass(frozen=True, slots=True)
class Seen:
    """What the image shows under one name. holder: the open directory that it lies in (not owned).
    directories: the merged directories, open, topmost first, when it is one (owned by the receiver)."""

    info: os.stat_result
    holder: int
    directories: tuple[int, ...] = ()


class ImageView:
    """Lookups in a resolved image. Directories are stacks of descriptors, topmost layer first."""

    def __init__(self, image: ResolvedImage) -> None:
        self._image = image
        self.mount_points = {
            tuple(os.fsencode(part) for part in mount.target.strip("/").split("/")): mount.layers
            for mount in image.mounts
        }

    def root(self) -> tuple[int, ...]:
        """The root's stack; the caller closes it."""
        return _open_all(self._image.layers)

    def lookup(self, stack: tuple[int, ...], path: tuple[bytes, ...]) -> Seen | None:
        """The last component of `path` in the directory `stack`, which is that of the components before it."""
        name = path[-1]
        if (mounted := self.mount_points.get(path)) is not None:
            opened = _open_all(mounted)
            return Seen(os.fstat(opened[0]), opened[0], opened)
        found: list[int] = []
        try:
            return self._merge(stack, name, found)
        except BaseException:
            close_all(tuple(found))
            raise

    def _merge(self, stack: tuple[int, ...], name: bytes, found: list[int]) -> Seen | None:
        top: Seen | None = None
        for fd in stack:
            info = stat_at(fd, name)
            if info is None:
                continue
            if is_whiteout(info):
                break
            if not stat.S_ISDIR(info.st_mode):
                if top is None:
                    return Seen(info, fd)
                break
            top = top or Seen(info, fd)
            found.append(os.open(name, DIRECTORY, dir_fd=fd))
            if is_opaque(found[-1]):
                break
        return None if top is None else Seen(top.info, top.holder, tuple(found))


def _open_all(paths: tuple[os.PathLike[str], ...]) -> tuple[int, ...]:
    # A layer may be reached through a symbolic link in the operator's own path, hence no O_NOFOLLOW here.
    return tuple(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) for path in paths)


def close_all(fds: tuple[int, ...]) -> None:
    """Close every descriptor of a stack."""
    for fd in fds:
        os.close(fd)


def readlink_at(fd: int, name: bytes) -> bytes:
    """The target of a symbolic link in an open directory."""
    return os.readlink(name, dir_fd=fd)


def copy_xattrs(source: int, target: int) -> None:
    """Copy the extended attributes that belong to a file and not to an overlay, as far as this user may."""
    try:
        names = os.listxattr(source)
    except OSError as error:
        if error.errno == errno.ENOTSUP:
            return
        raise
    for name in filter(keep_xattr, names):
        try:
            os.setxattr(target, name, os.getxattr(source, name))
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENODATA):
                raise


def keep_xattr(name: str) -> bool:
    """Whether an image may carry this attribute: file capabilities and plain user attributes.

    Never those of overlayfs: an archive could point a file at another one with them.
    """
    return name == "security.capability" or (
        name.startswith("user.") and not name.startswith("user.overlay.")
    )


def set_opaque(parent_fd: int, name: bytes) -> None:
    """Mark the directory `name` so that nothing of the layers below shows through it."""
    fd = os.open(name, DIRECTORY, dir_fd=parent_fd)
    try:
        mark_opaque(fd)
    finally:
        os.close(fd)


def mark_opaque(fd: int) -> None:
    """The same for an open directory. Overlays mounted without privilege read the other attribute."""
    os.setxattr(fd, "trusted.overlay.opaque" if os.geteuid() == 0 else "user.overlay.opaque", b"y")
