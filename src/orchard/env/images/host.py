"""The image `host`: a read-only view of this machine's system directories, nothing else of it.

Its root is a skeleton that the store keeps: empty directories, the machine's own top-level links (`bin -> usr/bin`)
and a reduced `/etc` (see `host_etc.py`). `/usr`, and `/bin`, `/lib` and the like where they are no links into it,
are the machine's own, live. A thin layer over them hides what not every user of the machine may read: the root of a
sandbox is the owner of root's files, so modes alone would not keep it out.

A skeleton is never changed once it is there: when the machine's /etc or programs change, a new one is made beside it,
named after its content, and running sandboxes keep theirs.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from orchard.env.images.area import StoreArea, explained
from orchard.env.images.host_etc import EtcBuilder
from orchard.env.images.model import ImageMount, ResolvedImage
from orchard.env.images.view import mark_opaque, stat_at

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
#: Parts of /usr that are often file systems of their own; an overlay does not see through such a border.
_PARTS = ("usr/local", "usr/lib", "usr/share")
#: Below the shown trees, but made for this machine's services: their content stays hidden.
_SERVICE_DATA = ("usr/etc", "usr/local/etc", "usr/local/var", "usr/local/srv", "usr/local/www")
_EMPTY = {
    "boot": 0o755, "dev": 0o755, "etc": 0o755, "home": 0o755, "media": 0o755, "mnt": 0o755, "opt": 0o755,
    "proc": 0o555, "root": 0o700, "run": 0o755, "run/lock": 0o1777, "srv": 0o755, "sys": 0o555, "tmp": 0o1777,
    "var": 0o755, "var/cache": 0o755, "var/lib": 0o755, "var/local": 0o755, "var/log": 0o755, "var/mail": 0o755,
    "var/opt": 0o755, "var/spool": 0o755, "var/tmp": 0o1777,
}  # fmt: skip
_LINKS = {"var/run": "/run", "var/lock": "/run/lock"}
#: When none of these changed, the skeleton is still right: files in /etc are replaced, not rewritten in place,
#: by every tool that keeps them, and the two that people edit are listed themselves.
_WATCHED = (
    "etc", "etc/passwd", "etc/group", "etc/ssl/certs", "etc/alternatives", "usr", "usr/bin", "usr/local",
    "usr/local/bin", "usr/local/lib",
)  # fmt: skip

Signature = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class _Ready:
    signature: Signature
    image: ResolvedImage


class HostImage:
    """Keeps the skeleton in `area.host` and resolves `host`. machine: the root of the machine's file system."""

    def __init__(self, area: StoreArea, machine: Path = Path("/")) -> None:
        self._area = area
        self._machine = machine
        self._ready: _Ready | None = None
        self._watched = [os.fspath(machine / name) for name in _WATCHED]

    def resolve(self) -> ResolvedImage:
        """The image as the machine is now; makes a new skeleton when the last one is out of date."""
        signature = self._signature()
        ready = self._ready
        if ready is None or ready.signature != signature:
            ready = self._ready = _Ready(signature, self._kept(signature) or self._make(signature))
        return ready.image

    def skeletons(self) -> Iterator[Path]:
        """Every skeleton on disk, by digest, the current one included."""
        for path in self._area.host.iterdir():
            if path.is_dir():
                yield path

    def _signature(self) -> Signature:
        found = []
        for path in self._watched:
            try:
                info = os.stat(path)  # noqa: PTH116 - on the way of every creation: a Path would double its cost
                found.append((info.st_ino, info.st_mtime_ns))
            except OSError:
                found.append((0, 0))
        return tuple(found)

    def _kept(self, signature: Signature) -> ResolvedImage | None:
        """The skeleton of an earlier process, if the machine has not changed since."""
        try:
            current = json.loads((self._area.host / "current.json").read_bytes())
            if current["signature"] != [list(pair) for pair in signature]:
                return None
            path = self._area.host / current["digest"]
            if not (path / "root").is_dir():
                return None
            return self._image(path)
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _make(self, signature: Signature) -> ResolvedImage:
        with explained("preparing the image `host`"), self._area.scratch() as scratch:
            draft = scratch / "host"
            mounts = _Skeleton(self._machine, draft).build()
            (draft / "mounts.json").write_text(json.dumps(mounts))
            digest = _tree_digest(draft)
            self._area.settle(draft)
            with self._area.writing():
                path = self._area.host / digest
                if not path.exists():
                    draft.rename(path)
                text = json.dumps({"digest": digest, "signature": signature})
                self._area.write_file(self._area.host / "current.json", text.encode())
        return self._image(path)

    def _image(self, path: Path) -> ResolvedImage:
        mounts = []
        for name in json.loads((path / "mounts.json").read_bytes()):
            mask = path / "mask" / name
            layers = (mask, self._machine / name) if mask.is_dir() else (self._machine / name,)
            mounts.append(ImageMount(f"/{name}", layers, read_only=True))
        return ResolvedImage(
            ref="host",
            digest=f"sha256:{path.name}",
            layers=(path / "root",),
            mounts=tuple(mounts),
            env={"PATH": PATH},
        )


class _Skeleton:
    """Builds one skeleton: `root`, and `mask` with a layer for each mount that needs one."""

    def __init__(self, machine: Path, target: Path) -> None:
        self._machine = machine
        self._root = target / "root"
        self._mask = target / "mask"

    def build(self) -> list[str]:
        """Make it; the names of the trees that are mounted over it, outer ones first."""
        for path in (self._root, self._mask):
            path.mkdir(parents=True)
            path.chmod(0o755)
        for name, mode in _EMPTY.items():
            (self._root / name).mkdir()
            (self._root / name).chmod(mode)
        for name, target in _LINKS.items():
            (self._root / name).symlink_to(target)
        mounts = []
        for name in _SYSTEM:
            path = self._machine / name
            if path.is_symlink():
                # `bin -> usr/bin`, absolute on some machines: kept when it stays among the shown trees.
                link = path.readlink()
                if os.path.normpath(Path("/") / link).split("/")[1] in _SYSTEM:
                    (self._root / name).symlink_to(link)
            elif path.is_dir():
                (self._root / name).mkdir()
                (self._root / name).chmod(0o755)
                mounts.append(name)
        mounts += [name for name in _PARTS if os.path.ismount(self._machine / name)]
        for name in mounts:
            self._hide_private(name)
        shown = tuple(f"/{name}" for name in (*mounts, *_SYSTEM))
        EtcBuilder(self._machine / "etc", self._root / "etc", shown).build()
        return mounts

    def _hide_private(self, name: str) -> None:
        """Whiteouts over everything in the tree `name` that is not for all eyes."""
        fd = os.open(self._machine / name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._scan(fd, (name,), os.fstat(fd).st_dev)
        finally:
            os.close(fd)

    def _scan(self, fd: int, path: tuple[str, ...], device: int) -> None:
        if "/".join(path) in _SERVICE_DATA:
            if os.listdir(fd):
                self._hide_content(path)
            return
        directories = []
        with os.scandir(fd) as entries:
            for entry in entries:
                if entry.is_symlink():
                    continue
                info = entry.stat(follow_symlinks=False)
                if not _is_public(info.st_mode):
                    self._hide(path, entry.name)
                elif stat.S_ISDIR(info.st_mode) and info.st_dev == device:
                    directories.append(entry.name)
        for name in directories:
            with suppress(FileNotFoundError, PermissionError):  # gone meanwhile; a border of permissions
                inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
                try:
                    self._scan(inner, (*path, name), device)
                finally:
                    os.close(inner)

    def _hide(self, path: tuple[str, ...], name: str) -> None:
        fd = self._mask_directory(path)
        try:
            os.mknod(name, 0o600 | stat.S_IFCHR, os.makedev(0, 0), dir_fd=fd)
        finally:
            os.close(fd)

    def _hide_content(self, path: tuple[str, ...]) -> None:
        fd = self._mask_directory(path)
        try:
            mark_opaque(fd)
        finally:
            os.close(fd)

    def _mask_directory(self, path: tuple[str, ...]) -> int:
        """The open directory of the mask for `path`, made with the looks of the machine's own on the way."""
        fd = os.open(self._mask, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        for index, name in enumerate(path):
            if stat_at(fd, os.fsencode(name)) is None:
                info = self._machine.joinpath(*path[: index + 1]).stat()
                os.mkdir(name, dir_fd=fd)
                os.chmod(name, stat.S_IMODE(info.st_mode), dir_fd=fd)
                if os.geteuid() == 0:
                    os.chown(name, info.st_uid, info.st_gid, dir_fd=fd)
            inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
            os.close(fd)
            fd = inner
        return fd


def _is_public(mode: int) -> bool:
    if stat.S_ISDIR(mode):
        return mode & 0o005 == 0o005
    return stat.S_ISREG(mode) and bool(mode & 0o004)


def _tree_digest(root: Path) -> str:
    """A digest of names, modes, links and content below `root`; not of times and owners."""
    digest = hashlib.sha256()
    for directory, subdirectories, files in os.walk(root):
        subdirectories.sort()
        for name in sorted([*subdirectories, *files]):
            path = Path(directory) / name
            mode = path.lstat().st_mode
            digest.update(os.fsencode(f"{os.path.relpath(path, root)}\0{mode:o}\0"))
            if stat.S_ISLNK(mode):
                digest.update(os.fsencode(path.readlink()))
            elif stat.S_ISREG(mode):
                digest.update(hashlib.sha256(path.read_bytes()).digest())
            digest.update(b"\n")
    return digest.hexdigest()
