"""The directory that an image store owns: its locks, scratch space, atomic files and removal of trees.

    root/               0700
      .lock             held by writers, briefly: while names, images and layers change
      names/            one JSON file per name: the digest it stands for
      images/           one JSON file per digest
      layers/ID/        tree/ (the files) and layer.json (its size)
      host/             see `host.py`
      users/            see `usage.py`
      cache/            what pulls have fetched, see `pull.py`
      scratch/N/        an import on its way; N.lock is held as long as its process lives

Everything becomes visible by one rename, so a process killed at any moment leaves nothing but scratch space, which
the next one removes because its lock is free.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from orchard.env.errors import DiskFull, InfrastructureError, OrchardError, RuntimeRefused

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class StoreArea:
    """See the module's docstring."""

    def __init__(self, root: Path, *, durable: bool = True) -> None:
        self.root = root
        self.names = root / "names"
        self.images = root / "images"
        self.layers = root / "layers"
        self.host = root / "host"
        self.users = root / "users"
        self.cache = root / "cache"
        self._scratch = root / "scratch"
        self._durable = durable
        self._made = False

    def make(self) -> None:
        """Create the directories (0700) and clear what killed processes left; only the first call does work."""
        if self._made:
            return
        try:
            self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.root.chmod(0o700)
            for path in (
                self.names,
                self.images,
                self.layers,
                self.host,
                self.users,
                self.cache,
                self._scratch,
            ):
                path.mkdir(exist_ok=True, mode=0o700)
        except OSError as error:
            raise RuntimeRefused(
                f"The image store {str(self.root)!r} cannot be used: {error.strerror}. Run as the user it belongs to, "
                f"or choose another state directory."
            ) from error
        self._made = True
        self.clear_scratch()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Exclusive right to change names, images and layers, against threads and processes alike."""
        self.make()
        fd = os.open(self.root / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """A new empty directory on the store's file system, removed afterwards unless it was renamed away."""
        self.make()
        path = self._scratch / secrets.token_hex(8)
        # Made under the writers' lock, so that nobody takes it for a leftover before its own lock is held.
        with self.writing():
            fd = os.open(self._lock_of(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(fd, fcntl.LOCK_EX)
            path.mkdir(mode=0o700)
        try:
            yield path
        finally:
            remove_tree(path)
            self._lock_of(path).unlink(missing_ok=True)
            os.close(fd)

    def clear_scratch(self) -> int:
        """Remove scratch space whose process is gone; the bytes freed."""
        freed = 0
        with self.writing():
            for name in {entry.name.removesuffix(".lock") for entry in os.scandir(self._scratch)}:
                path = self._scratch / name
                fd = os.open(self._lock_of(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue  # an import at work
                else:
                    freed += tree_size(path) if path.is_dir() else 0
                    remove_tree(path)
                    self._lock_of(path).unlink(missing_ok=True)
                finally:
                    os.close(fd)
        return freed

    def write_file(self, path: Path, content: bytes) -> None:
        """Replace `path` whole; it is never seen half-written. Call it while `writing`."""
        temporary = path.with_name(f".{path.name[:64]}.{secrets.token_hex(4)}")
        try:
            with open(temporary, "xb") as file:
                os.fchmod(file.fileno(), 0o600)
                file.write(content)
                file.flush()
                if self._durable:
                    os.fsync(file.fileno())
            temporary.rename(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def settle(self, path: Path) -> None:
        """Have the disk hold everything below `path` before a rename announces it to readers."""
        if not self._durable:
            return
        fd = os.open(path, _DIRECTORY)
        try:
            if ctypes.CDLL(None, use_errno=True).syncfs(fd) != 0:
                code = ctypes.get_errno()
                raise InfrastructureError(f"The disk did not take the image: {os.strerror(code)}.")
        finally:
            os.close(fd)

    def _lock_of(self, scratch: Path) -> Path:
        return scratch.with_name(f"{scratch.name}.lock")


def remove_tree(path: Path) -> None:
    """Remove a directory with all it holds, whatever its modes; fine when it does not exist.

    Never follows a symbolic link and never leaves the tree.
    """
    try:
        parent = os.open(path.parent, _DIRECTORY)
    except FileNotFoundError:
        return
    try:
        remove_entry(parent, os.fsencode(path.name))
    finally:
        os.close(parent)


def remove_entry(parent_fd: int, name: bytes) -> None:
    """Remove `name` in the open directory, with all it holds if it is a directory; fine when it does not exist."""
    try:
        os.unlink(name, dir_fd=parent_fd)
        return
    except FileNotFoundError:
        return
    except (IsADirectoryError, PermissionError) as error:
        if not stat.S_ISDIR(os.stat(name, dir_fd=parent_fd, follow_symlinks=False).st_mode):
            raise error from None
    fd = open_listable(parent_fd, name)
    try:
        for child in os.listdir(fd):  # noqa: PTH208 - an open directory, not a path
            remove_entry(fd, os.fsencode(child))
    finally:
        os.close(fd)
    os.rmdir(name, dir_fd=parent_fd)


def open_listable(parent_fd: int, name: bytes) -> int:
    """Open a directory for listing and changing, giving its owner the rights where they are missing."""
    try:
        fd = os.open(name, _DIRECTORY, dir_fd=parent_fd)
    except PermissionError:
        os.chmod(name, 0o700, dir_fd=parent_fd)
        return os.open(name, _DIRECTORY, dir_fd=parent_fd)
    if os.geteuid() != 0 and os.fstat(fd).st_mode & 0o300 != 0o300:
        os.fchmod(fd, 0o700)
    return fd


def tree_size(path: Path) -> int:
    """Bytes of file content below `path`, hard links counted once."""
    total = 0
    seen: set[tuple[int, int]] = set()
    for directory, _, _, fd in os.fwalk(os.fsencode(path), onerror=None):
        del directory
        with os.scandir(fd) as entries:
            for entry in entries:
                info = entry.stat(follow_symlinks=False)
                if not stat.S_ISREG(info.st_mode):
                    continue
                if info.st_nlink > 1:
                    if (info.st_dev, info.st_ino) in seen:
                        continue
                    seen.add((info.st_dev, info.st_ino))
                total += info.st_size
    return total


@contextmanager
def explained(doing: str) -> Iterator[None]:
    """Turns what the file system refuses while `doing` something into DiskFull or InfrastructureError."""
    try:
        yield
    except OSError as error:
        if isinstance(error, OrchardError):
            raise
        if no_space(error):
            raise DiskFull(
                f"The disk is full ({doing}): free space, `orchard images prune` may help, and try again."
            ) from error
        raise InfrastructureError(f"The image store failed ({doing}): {error}.") from error


def no_space(error: OSError) -> bool:
    """Whether an error says that the disk, the quota or the inodes are used up."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)
