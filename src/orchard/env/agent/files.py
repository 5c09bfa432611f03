"""Files of the sandbox, by paths that the client chose: opened as `paths` does, and only regular files are read or
replaced."""

from __future__ import annotations

import errno
import os
import stat

from orchard.env.agent.job import AgentError
from orchard.env.agent.paths import At, Places, failure, make_directories
from orchard.env.agent.wire import CHUNK_BYTES

TYPE_CHECKING = False  # importing typing would cost every sandbox most of a megabyte
if TYPE_CHECKING:
    from typing import Any

_DEFAULT_MODE = 0o644
TYPES = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "symlink"}


def _read_at(fd: int, offset: int, limit: int) -> bytes:
    """Up to `limit` bytes; less only at the end. Files of /proc come a page at a time: they are read on."""
    data = os.pread(fd, limit, offset)
    if not data or len(data) == limit:
        return data
    parts = [data]
    size = len(data)
    while size < limit and (data := os.pread(fd, limit - size, offset + size)):
        parts.append(data)
        size += len(data)
    return b"".join(parts)


class _Upload:
    """A file being written under a temporary name beside its own."""

    __slots__ = ("dir_fd", "fd", "name", "size", "temporary")

    def __init__(self, fd: int, dir_fd: int, temporary: bytes, name: bytes) -> None:
        self.fd = fd
        self.dir_fd = dir_fd
        self.temporary = temporary
        self.name = name
        self.size = 0


def printable(name: str) -> str:
    """A name with its undecodable bytes replaced."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def described(info: os.stat_result, target: str | None, raw: bool = False) -> dict[str, Any]:
    """The fields that tell of an entry, but for its name."""
    kind = TYPES.get(stat.S_IFMT(info.st_mode), "other")
    entry: dict[str, Any] = {
        "type": kind, "size": info.st_size, "modified": info.st_mtime, "mode": stat.S_IMODE(info.st_mode),
    }  # fmt: skip
    if raw:
        entry["modified_ns"] = info.st_mtime_ns
    if target is not None:
        entry["target"] = target if raw else printable(target)
    return entry


class Files:
    """Content of files and of directories. Where a `root` is given, paths are below it and use no links."""

    def __init__(self, places: Places, uploads_limit: int = 256) -> None:
        self._places = places
        self._uploads: dict[str, _Upload] = {}
        self._uploads_limit = uploads_limit

    # ----------------------------------------------------------------------------------------------- read

    def read(
        self, path: str, offset: int, limit: int, root: str | None = None, identity: str | None = None
    ) -> tuple[dict[str, Any], bytes]:
        """A piece of a regular file: `{size, mode, eof, identity}` and the bytes.

        identity: what the answer for an earlier piece told; another file under this name is `conflict`.
        """
        try:
            # O_NONBLOCK: a FIFO without a writer must not block the agent before it can be seen to be one.
            fd = self._places.open(path, root, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
        except OSError as error:
            raise failure(error, path) from None
        try:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode):
                kind = TYPES.get(stat.S_IFMT(info.st_mode), "special file")
                raise AgentError("path_invalid", f"{path!r} is a {kind}, not a regular file")
            found = f"{info.st_dev}:{info.st_ino}"
            if identity not in (None, found):
                raise AgentError("conflict", f"{path!r} was replaced while it was read; read it again")
            data = _read_at(fd, offset, min(limit, CHUNK_BYTES))
            # Files of /proc and the like have size 0 and content all the same: the end is an empty read.
            eof = not data or (info.st_size > 0 and offset + len(data) >= info.st_size)
            mode = stat.S_IMODE(info.st_mode)
            return {"size": info.st_size, "mode": mode, "eof": eof, "identity": found}, data
        except OSError as error:
            raise failure(error, path) from None
        finally:
            os.close(fd)

    def list(
        self,
        path: str,
        root: str | None = None,
        raw: bool = False,
        after: str = "",
        limit: int | None = None,
    ) -> dict[str, Any]:
        """The entries of a directory, sorted by name; links are described, not followed.

        raw: names and targets keep undecodable bytes as lone surrogates. after, limit: at most so many, of the
        names that follow `after`; `more` tells that there are others.
        """
        try:
            fd = self._places.open(path, root, os.O_RDONLY | os.O_DIRECTORY | os.O_NONBLOCK)
        except OSError as error:
            raise failure(error, path) from None
        try:
            names = sorted(name for name in os.listdir(fd) if name > after)
            entries = [self._entry(fd, name, raw) for name in names[:limit]]
            found = [entry for entry in entries if entry is not None]
            more = limit is not None and len(names) > limit
            # The last name may have vanished: where to go on is told apart from the entries.
            return {"path": path, "files": found, **({"more": names[limit - 1]} if more and limit else {})}
        except OSError as error:
            raise failure(error, path) from None
        finally:
            os.close(fd)

    def _entry(self, dir_fd: int, name: str, raw: bool) -> dict[str, Any] | None:
        try:
            info = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
            target = os.readlink(name, dir_fd=dir_fd) if stat.S_ISLNK(info.st_mode) else None
        except OSError:
            return None  # it vanished between the listing and the look
        entry = described(info, target, raw)
        entry["name"] = name if raw else printable(name)
        return entry

    # ---------------------------------------------------------------------------------------------- write

    def write(
        self,
        path: str,
        upload: str,
        offset: int,
        data: bytes,
        last: bool,
        mode: int | None,
        root: str | None = None,
        modified_ns: int | None = None,
    ) -> dict[str, Any]:
        """One chunk of an upload. The file appears, whole, with the last one; a failure leaves nothing.

        A link at `path` is followed to the file, but replaced itself below a `root`.
        """
        state = self._uploads.get(upload)
        if state is None:
            if offset != 0:
                raise AgentError("conflict", f"upload {upload} is not known; begin again at offset 0")
            state = self._begin(path, upload, root)
        try:
            if offset != state.size:
                raise AgentError(
                    "conflict", f"upload {upload} is at byte {state.size}, not {offset}; begin again"
                )
            self._append(state, data)
            if last:
                self._commit(state, mode, modified_ns)
                del self._uploads[upload]
            return {"size": state.size}
        except OSError as error:
            self.abort(upload)
            raise failure(error, path) from None
        except AgentError:
            self.abort(upload)
            raise

    def abort(self, upload: str) -> None:
        """Drop an upload and its temporary file; unknown ones are fine."""
        state = self._uploads.pop(upload, None)
        if state is None:
            return
        try:
            os.unlink(state.temporary, dir_fd=state.dir_fd)
        except OSError:
            pass  # its directory may be gone already; then so is the file
        os.close(state.fd)
        os.close(state.dir_fd)

    def abort_all(self) -> None:
        """Drop every upload: nobody is left who could go on with one."""
        for upload in [*self._uploads]:
            self.abort(upload)

    def _begin(self, path: str, upload: str, root: str | None) -> _Upload:
        if len(self._uploads) >= self._uploads_limit:
            raise AgentError(
                "overloaded", f"more than {self._uploads_limit} uploads at once; finish some first"
            )
        if path.endswith("/"):
            raise AgentError("path_invalid", f"{path!r} names a directory; give the file's own path")
        try:
            with self._followed(path) if root is None else self._places.parent(path, root, make=True) as at:
                temporary = b".%s.orchard-%s" % (at.name[:128], os.urandom(6).hex().encode())
                fd = os.open(
                    temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=at.dir_fd
                )
                state = _Upload(fd, os.dup(at.dir_fd), temporary, at.name)
        except OSError as error:
            raise failure(error, path) from None
        self._uploads[upload] = state
        return state

    def _followed(self, path: str) -> At:
        """The directory that holds the file, made if missing; final symlinks are followed to their end."""
        full = self._places.absolute(path)
        for _ in range(40):
            folder, name = os.path.split(full)
            if name in (b"", b".", b".."):
                raise OSError(errno.EISDIR, "names a directory")
            dir_fd = make_directories(folder)
            try:
                info = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
            except FileNotFoundError:
                return At(dir_fd, name)
            except OSError:
                os.close(dir_fd)
                raise
            if stat.S_ISREG(info.st_mode):
                return At(dir_fd, name)
            try:
                if not stat.S_ISLNK(info.st_mode):
                    raise OSError(
                        errno.EISDIR if stat.S_ISDIR(info.st_mode) else errno.EINVAL, "not a regular file"
                    )
                target = os.readlink(name, dir_fd=dir_fd)
            finally:
                os.close(dir_fd)
            full = target if target.startswith(b"/") else folder + b"/" + target
        raise OSError(errno.ELOOP, "too many links")

    def _append(self, state: _Upload, data: bytes) -> None:
        view = memoryview(data)
        while view:
            sent = os.write(state.fd, view)
            view = view[sent:]
            state.size += sent

    def _commit(self, state: _Upload, mode: int | None, modified_ns: int | None) -> None:
        if mode is None:
            mode = self._existing_mode(state)
        os.fchmod(state.fd, mode)
        if modified_ns is not None:
            os.utime(state.fd, ns=(modified_ns, modified_ns))
        os.rename(state.temporary, state.name, src_dir_fd=state.dir_fd, dst_dir_fd=state.dir_fd)
        os.close(state.fd)
        os.close(state.dir_fd)

    def _existing_mode(self, state: _Upload) -> int:
        """A replaced file keeps its mode and owner, as when written in place."""
        try:
            info = os.stat(state.name, dir_fd=state.dir_fd, follow_symlinks=False)
        except FileNotFoundError:
            return _DEFAULT_MODE
        os.fchown(state.fd, info.st_uid, info.st_gid)
        return stat.S_IMODE(info.st_mode)
