"""Files of the sandbox, by paths that the client chose: opened as `paths` does, and only regular files are read or
replaced."""

from __future__ import annotations

import errno
import os
import stat

from orchard.env.agent.job import AgentError
from orchard.env.agent.paths import make_directories, open_inside
from orchard.env.agent.wire import CHUNK_BYTES

TYPE_CHECKING = False  # importing typing would cost every sandbox most of a megabyte
if TYPE_CHECKING:
    from typing import Any

_DEFAULT_MODE = 0o644
_TYPES = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "symlink"}

_CODES = {
    errno.ENOENT: "file_not_found",
    errno.ENOTDIR: "path_invalid",
    errno.EISDIR: "path_invalid",
    errno.ELOOP: "path_invalid",
    errno.ENAMETOOLONG: "path_invalid",
    errno.EXDEV: "path_invalid",
    errno.EACCES: "path_invalid",
    errno.EPERM: "path_invalid",
    errno.EROFS: "path_invalid",
    errno.ETXTBSY: "path_invalid",
    errno.ENXIO: "path_invalid",
    errno.EINVAL: "path_invalid",
    errno.ENOSPC: "disk_full",
    errno.EDQUOT: "disk_full",
}


def _failure(error: OSError, path: str) -> AgentError:
    number = error.errno or errno.EIO
    return AgentError(_CODES.get(number, "infrastructure_error"), f"{path!r}: {os.strerror(number)}")


def _encode(path: str) -> bytes:
    if not path or "\0" in path:
        raise AgentError("path_invalid", "the path is empty or holds a NUL byte; give an absolute path")
    try:
        return path.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise AgentError("path_invalid", "the path is not encodable as UTF-8") from None


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


class _At:
    """A directory descriptor and a name in it; closes the descriptor on exit."""

    def __init__(self, dir_fd: int, name: bytes) -> None:
        self.dir_fd = dir_fd
        self.name = name

    def __enter__(self) -> _At:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.dir_fd)


class _Upload:
    """A file being written under a temporary name beside its own."""

    __slots__ = ("dir_fd", "fd", "name", "size", "temporary")

    def __init__(self, fd: int, dir_fd: int, temporary: bytes, name: bytes) -> None:
        self.fd = fd
        self.dir_fd = dir_fd
        self.temporary = temporary
        self.name = name
        self.size = 0


class Files:
    """File operations; relative paths start at `base` (the sandbox's working directory)."""

    def __init__(self, uploads_limit: int = 256) -> None:
        self.base = "/"
        self._uploads: dict[str, _Upload] = {}
        self._uploads_limit = uploads_limit

    def _absolute(self, path: str) -> bytes:
        raw = _encode(path)
        return raw if raw.startswith(b"/") else _encode(self.base).rstrip(b"/") + b"/" + raw

    # ----------------------------------------------------------------------------------------------- read

    def read(self, path: str, offset: int, limit: int) -> tuple[dict[str, Any], bytes]:
        """A piece of a regular file: `{size, mode, eof}` and the bytes."""
        try:
            # O_NONBLOCK: a FIFO without a writer must not block the agent before it can be seen to be one.
            fd = open_inside(self._absolute(path), os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
        except OSError as error:
            raise _failure(error, path) from None
        try:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode):
                kind = _TYPES.get(stat.S_IFMT(info.st_mode), "special file")
                raise AgentError("path_invalid", f"{path!r} is a {kind}, not a regular file")
            data = _read_at(fd, offset, min(limit, CHUNK_BYTES))
            # Files of /proc and the like have size 0 and content all the same: the end is an empty read.
            eof = not data or (info.st_size > 0 and offset + len(data) >= info.st_size)
            return {"size": info.st_size, "mode": stat.S_IMODE(info.st_mode), "eof": eof}, data
        except OSError as error:
            raise _failure(error, path) from None
        finally:
            os.close(fd)

    def list(self, path: str) -> dict[str, Any]:
        """The entries of a directory, sorted by name; links are described, not followed."""
        try:
            fd = open_inside(self._absolute(path), os.O_RDONLY | os.O_DIRECTORY | os.O_NONBLOCK)
        except OSError as error:
            raise _failure(error, path) from None
        try:
            entries = [self._entry(fd, name) for name in sorted(os.listdir(fd))]
            return {"path": path, "files": [entry for entry in entries if entry is not None]}
        except OSError as error:
            raise _failure(error, path) from None
        finally:
            os.close(fd)

    def _entry(self, dir_fd: int, name: str) -> dict[str, Any] | None:
        try:
            info = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
            kind = _TYPES.get(stat.S_IFMT(info.st_mode), "other")
            target = os.readlink(name, dir_fd=dir_fd) if kind == "symlink" else None
        except OSError:
            return None  # it vanished between the listing and the look
        printable = name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        entry: dict[str, Any] = {
            "name": printable, "type": kind, "size": info.st_size, "modified": info.st_mtime,
            "mode": stat.S_IMODE(info.st_mode),
        }  # fmt: skip
        if target is not None:
            entry["target"] = target.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        return entry

    # ---------------------------------------------------------------------------------------------- write

    def write(
        self, path: str, upload: str, offset: int, data: bytes, last: bool, mode: int | None
    ) -> dict[str, Any]:
        """One chunk of an upload. The file appears, whole, with the last one; a failure leaves nothing."""
        state = self._uploads.get(upload)
        if state is None:
            if offset != 0:
                raise AgentError("conflict", f"upload {upload} is not known; begin again at offset 0")
            state = self._begin(path, upload)
        try:
            if offset != state.size:
                raise AgentError(
                    "conflict", f"upload {upload} is at byte {state.size}, not {offset}; begin again"
                )
            self._append(state, data)
            if last:
                self._commit(state, mode)
                del self._uploads[upload]
            return {"size": state.size}
        except OSError as error:
            self.abort(upload)
            raise _failure(error, path) from None
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

    def _begin(self, path: str, upload: str) -> _Upload:
        if len(self._uploads) >= self._uploads_limit:
            raise AgentError(
                "overloaded", f"more than {self._uploads_limit} uploads at once; finish some first"
            )
        full = self._absolute(path)
        if full.endswith(b"/"):
            raise AgentError("path_invalid", f"{path!r} names a directory; give the file's own path")
        try:
            with self._parent(full) as at:
                temporary = b".%s.orchard-%s" % (at.name[:128], os.urandom(6).hex().encode())
                fd = os.open(
                    temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=at.dir_fd
                )
                state = _Upload(fd, os.dup(at.dir_fd), temporary, at.name)
        except OSError as error:
            raise _failure(error, path) from None
        self._uploads[upload] = state
        return state

    def _parent(self, full: bytes) -> _At:
        """The directory that holds the file, made if missing; final symlinks are followed to their end."""
        for _ in range(40):
            folder, name = os.path.split(full)
            if name in (b"", b".", b".."):
                raise OSError(errno.EISDIR, "names a directory")
            dir_fd = make_directories(folder)
            try:
                info = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
            except FileNotFoundError:
                return _At(dir_fd, name)
            except OSError:
                os.close(dir_fd)
                raise
            if stat.S_ISREG(info.st_mode):
                return _At(dir_fd, name)
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

    def _commit(self, state: _Upload, mode: int | None) -> None:
        if mode is None:
            mode = self._existing_mode(state)
        os.fchmod(state.fd, mode)
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
