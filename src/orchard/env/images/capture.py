"""What a sandbox has written, as the one layer of an OCI layout.

The sandbox's own code made these files and may still run: no name is followed out of the directory, and every file is
read by the descriptor that was looked at.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import stat
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from orchard.env.errors import InfrastructureError
from orchard.env.images import documents
from orchard.env.images.view import is_opaque, is_whiteout

_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_UIDS_PER_SANDBOX = 65536
#: What a runtime puts there itself, for each sandbox anew.
_NOT_OURS = frozenset({"proc", "dev", "etc/hosts", "etc/hostname", "etc/resolv.conf"})
#: Marks of overlayfs for which the files alone do not tell what the sandbox saw.
_INDIRECT = ("trusted.overlay.redirect", "trusted.overlay.metacopy")


@dataclass(frozen=True, slots=True)
class Upper:
    """An upper directory of an overlay, and where it was mounted (`""` for the root, else `usr` and the like)."""

    path: Path
    place: str = ""


def sandbox_uppers(home: Path, mounts: Sequence[str]) -> list[Upper]:
    """The upper directories below a local sandbox's own. mounts: where its image mounts further trees, in order."""
    found = [Upper(home / "upper")]
    for number, target in enumerate(mounts):
        if (path := home / f"upper.{number}").is_dir():
            found.append(Upper(path, target.strip("/")))
    return found


def write_layout(
    layout: Path,
    uppers: Sequence[Upper],
    *,
    env: Mapping[str, str],
    working_dir: str | None,
    user: str | None,
) -> None:
    """Write an OCI layout to the new directory `layout`, whose configuration has nothing but what is given here.

    Raises InfrastructureError when the files changed while they were read, cannot be told from the upper layer, or may
    not be read.
    """
    blobs = layout / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    draft = blobs / "layer"
    with draft.open("wb") as file:
        hashed = _Hashed(file)
        with tarfile.open(fileobj=hashed, mode="w|", format=tarfile.PAX_FORMAT) as archive:  # type: ignore[call-overload]
            for upper in uppers:
                try:
                    _Layer(archive, upper).write()
                except PermissionError as error:
                    raise InfrastructureError(
                        f"{error.filename} cannot be read by uid {os.geteuid()}: give everybody the right to read what the"
                        " steps make, at the end of the recipe, or build as root"
                    ) from error
    digits = hashed.digest.hexdigest()
    draft.rename(blobs / digits)
    layer = {"digest": f"sha256:{digits}", "size": (blobs / digits).stat().st_size}
    run: dict[str, object] = {"Env": [f"{name}={value}" for name, value in env.items()]}
    run |= {"WorkingDir": working_dir} if working_dir else {}
    run |= {"User": user} if user else {}
    config = {
        "architecture": documents.machine_architecture(),
        "os": "linux",
        "config": run,
        "rootfs": {"type": "layers", "diff_ids": [layer["digest"]]},
    }
    kind = "application/vnd.oci.image."
    described = {"mediaType": f"{kind}config.v1+json", **_put(blobs, config)}
    layers = [{"mediaType": f"{kind}layer.v1.tar", **layer}]
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{kind}manifest.v1+json",
        "config": described,
        "layers": layers,
    }
    entry = {"mediaType": f"{kind}manifest.v1+json", **_put(blobs, manifest)}
    (layout / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [entry]}))
    (layout / "oci-layout").write_text(json.dumps({"imageLayoutVersion": "1.0.0"}))


def _put(blobs: Path, document: object) -> dict[str, object]:
    text = json.dumps(document).encode()
    digits = hashlib.sha256(text).hexdigest()
    (blobs / digits).write_bytes(text)
    return {"digest": f"sha256:{digits}", "size": len(text)}


class _Hashed:
    """A file that is only written, and the digest of what was."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.digest = hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        return self._file.write(data)


@dataclass(slots=True)
class _Layer:
    """Writes one upper directory into a tar."""

    archive: tarfile.TarFile
    upper: Upper
    _linked: dict[int, str] = field(default_factory=dict)

    def write(self) -> None:
        for directory, folders, files, fd in os.fwalk(self.upper.path, onerror=_fail):
            inside = os.path.relpath(directory, self.upper.path)
            place = os.path.normpath(os.path.join(self.upper.place, inside))  # noqa: PTH118 - a name in the tar
            place = "" if place == "." else place
            self._check(fd, place)
            if place:
                self._add(place, os.fstat(fd), fd)
            if is_opaque(fd):
                self._mark(f"{place}/.wh..wh..opq")
            folders[:] = sorted(name for name in folders if not self._is_skipped(place, name))
            links = [name for name in folders if stat.S_ISLNK(_lstat(fd, name).st_mode)]
            for name in sorted({*files, *links}):
                if not self._is_skipped(place, name):
                    self._file(fd, place, name)

    def _is_skipped(self, place: str, name: str) -> bool:
        return _joined(place, name) in _NOT_OURS

    def _file(self, folder: int, place: str, name: str) -> None:
        info, path = _lstat(folder, name), _joined(place, name)
        if is_whiteout(info):
            self._mark(_joined(place, f".wh.{name}"))
        elif info.st_nlink > 1 and info.st_ino in self._linked:
            member = tarfile.TarInfo(path)
            member.type, member.linkname = tarfile.LNKTYPE, self._linked[info.st_ino]
            self.archive.addfile(member)
        elif stat.S_ISLNK(info.st_mode):
            self._add(path, info, link=os.readlink(name, dir_fd=folder))
        elif stat.S_ISFIFO(info.st_mode):
            self._add(path, info)
        elif stat.S_ISREG(info.st_mode):
            fd = os.open(name, _FILE, dir_fd=folder)
            try:
                self._check(fd, path)
                self._add(path, os.fstat(fd), fd)
            finally:
                os.close(fd)
            if info.st_nlink > 1:
                self._linked[info.st_ino] = path

    def _add(self, path: str, info: os.stat_result, fd: int | None = None, link: str = "") -> None:
        member = tarfile.TarInfo(path)
        kinds = {stat.S_IFDIR: tarfile.DIRTYPE, stat.S_IFLNK: tarfile.SYMTYPE, stat.S_IFIFO: tarfile.FIFOTYPE}
        member.type = kinds.get(stat.S_IFMT(info.st_mode), tarfile.REGTYPE)
        member.mode, member.linkname = stat.S_IMODE(info.st_mode), link
        # The sandbox's ids are shifted by a multiple of their number.
        member.uid, member.gid = info.st_uid % _UIDS_PER_SANDBOX, info.st_gid % _UIDS_PER_SANDBOX
        member.mtime = info.st_mtime_ns / 1e9
        if fd is not None:
            member.pax_headers = {f"SCHILY.xattr.{name}": value for name, value in _own_xattrs(fd)}
        if member.type != tarfile.REGTYPE or fd is None:
            self.archive.addfile(member)
            return
        member.size = info.st_size
        with io.open(os.dup(fd), "rb") as content:  # noqa: UP020 - a descriptor, not a path
            try:
                self.archive.addfile(member, content)
            except OSError as error:
                if error.errno is not None:
                    raise
                raise InfrastructureError(
                    f"/{path} shrank while it was read: a process that a step has left running writes to it; end it in "
                    f"the recipe."
                ) from error

    def _mark(self, path: str) -> None:
        self.archive.addfile(tarfile.TarInfo(path.lstrip("/")))

    def _check(self, fd: int, path: str) -> None:
        names = os.listxattr(fd)
        if any(name in names for name in _INDIRECT):
            raise InfrastructureError(
                f"/{path} is a directory or file that this kernel's overlayfs keeps only a reference to; load the module "
                f"with redirect_dir=off and metacopy=off, and build again."
            )


def _fail(error: OSError) -> None:
    raise error


def _own_xattrs(fd: int) -> Iterator[tuple[str, str]]:
    for name in os.listxattr(fd):
        if name.startswith("user.") and not name.startswith("user.overlay."):
            yield name, os.getxattr(fd, name).decode("utf-8", "surrogateescape")


def _lstat(folder: int, name: str) -> os.stat_result:
    return os.stat(name, dir_fd=folder, follow_symlinks=False)


def _joined(place: str, name: str) -> str:
    return f"{place}/{name}" if place else name
