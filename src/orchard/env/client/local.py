"""Files and trees written on this machine from what a sandbox sends, which may be hostile: nothing is ever written
outside the place that was asked for."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from orchard.env import tars
from orchard.env.errors import ArchiveInvalid


class LocalFile:
    """A file that appears whole with `finish`; `abandon` drops it, and is fine after that. What is there and no
    regular file (a terminal, a pipe) is written to as it is."""

    def __init__(self, path: Path, mode: int, modified_ns: int | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A link that the caller named himself is written through.
        self._path = Path(os.path.realpath(path))
        self._mode = mode & 0o777
        self._modified_ns = modified_ns
        self._temporary: Path | None = None
        if not self._path.exists() or self._path.is_file():
            self._temporary = self._path.with_name(f".{self._path.name[:60]}.orchard-{os.urandom(6).hex()}")
            self._file = open(self._temporary, "xb", buffering=0)  # noqa: SIM115 - closed by finish or abandon
        else:
            self._file = open(self._path, "wb", buffering=0)  # noqa: SIM115

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]

    def finish(self) -> None:
        if self._temporary is not None:
            os.fchmod(self._file.fileno(), self._mode)
            if self._modified_ns is not None:
                os.utime(self._file.fileno(), ns=(self._modified_ns, self._modified_ns))
            self._temporary.replace(self._path)
            self._temporary = None
        self._file.close()

    def abandon(self) -> None:
        self._file.close()
        if self._temporary is not None:
            with suppress(FileNotFoundError):
                self._temporary.unlink()
            self._temporary = None


class LocalTree:
    """An archive being unpacked into the directory `root`: `feed` its pieces, then `finish`. Raises `ArchiveInvalid`,
    and OSError of this machine. Links that were there before are replaced, never followed."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._reader = tars.Reader()
        self._file: LocalFile | None = None
        self._left = 0
        self._checked: set[str] = {""}
        self._directories: dict[str, tars.Entry] = {}
        root.mkdir(parents=True, exist_ok=True)

    def feed(self, data: bytes) -> None:
        for event in self._reader.feed(data):
            if isinstance(event, tars.Entry):
                self._begin(event)
            elif self._file is not None:
                self._file.write(event)
                self._left -= len(event)
                self._end_file()

    def finish(self) -> None:
        """Gives the directories their modes and times, which had to wait until they were filled."""
        self._reader.finish()
        for name, entry in reversed(self._directories.items()):
            path = self._root / name
            path.chmod(entry.mode & 0o777)
            if entry.modified_ns is not None:
                os.utime(path, ns=(entry.modified_ns, entry.modified_ns))

    def abandon(self) -> None:
        """Drop the file under way, if any."""
        if self._file is not None:
            self._file.abandon()

    def _begin(self, entry: tars.Entry) -> None:
        parent, _, _ = entry.name.rpartition("/")
        self._make_directory(parent)
        path = self._root / entry.name
        if entry.kind == "directory":
            self._make_directory(entry.name)
            self._directories[entry.name] = entry
        elif entry.kind == "symlink":
            tars.check_link(entry)
            if path.is_symlink() or path.is_file():
                path.unlink()
            path.symlink_to(entry.target)
            if entry.modified_ns is not None:
                os.utime(path, ns=(entry.modified_ns, entry.modified_ns), follow_symlinks=False)
        elif entry.kind == "file":
            _remove_other_than_file(path)
            self._file = LocalFile(path, entry.mode, entry.modified_ns)
            self._left = entry.size
            self._end_file()
        else:
            raise ArchiveInvalid(
                f"the sandbox sends a hard link, {entry.name!r:.200}, where a file is expected"
            )

    def _end_file(self) -> None:
        if self._left == 0 and self._file is not None:
            self._file.finish()
            self._file = None

    def _make_directory(self, name: str) -> None:
        """A real directory at `name`, and all the way to it."""
        if name in self._checked:
            return
        self._make_directory(name.rpartition("/")[0])
        path = self._root / name
        if path.is_symlink() or (path.exists() and not path.is_dir()):
            path.unlink()
        path.mkdir(exist_ok=True)
        path.chmod(path.stat().st_mode | 0o700)
        self._checked.add(name)


def _remove_other_than_file(path: Path) -> None:
    """What is there is replaced and not written through: a link, a pipe or a device."""
    with suppress(FileNotFoundError):
        mode = path.lstat().st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            path.unlink()
