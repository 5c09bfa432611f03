"""Files, patches and archives."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from orchard.env.contract.base import Answer, Base64, Request, Seconds, Text


class PatchRequest(Request):
    """POST /sandboxes/{id}/apply_patch. strip: leading path components to cut (default 1, as `patch -p1`)."""

    patch: Annotated[str, Field(min_length=1)]
    timeout_seconds: Seconds | None = None
    cwd: Annotated[Text, Field(min_length=1, max_length=4096)] | None = None
    strip: Annotated[int, Field(ge=0, le=64)] | None = None


class PatchResult(Answer):
    success: bool
    stdout: str = ""
    stderr: str = ""
    exit_code: int | None = None


FilePath = Annotated[Text, Field(min_length=1, max_length=4096)]
OctalMode = Annotated[str, Field(pattern=r"^0?[0-7]{3,4}$")]
FileMode = Annotated[int, Field(ge=0, le=0o7777)] | OctalMode


def mode_bits(mode: int | str | None) -> int | None:
    """Permission bits of a `FileMode`."""
    return int(mode, 8) if isinstance(mode, str) else mode


class WriteFile(Request):
    """POST /sandboxes/{id}/files. mode: octal text such as "0755", or an integer."""

    path: FilePath
    content: Base64
    mode: FileMode | None = None


class FileWritten(Answer):
    success: bool = True
    path: str
    size: int


class FileContent(Answer):
    path: str
    content: str
    size: int


class FileEntry(Answer):
    """type: file, directory, symlink or other. modified: Unix seconds. target: of a symlink."""

    name: str
    type: Literal["file", "directory", "symlink", "other"]
    size: int
    modified: float
    mode: int = 0
    target: str | None = None


class FileStat(Answer):
    """GET /sandboxes/{id}/files/stat: the fields of `FileEntry`, and the path that was asked for."""

    path: str
    type: Literal["file", "directory", "symlink", "other"]
    size: int
    modified: float
    mode: int = 0
    target: str | None = None


class FileChange(Answer):
    """One event of GET /sandboxes/{id}/files/watch. type: `open` (the watch stands: what happens from now on is told),
    `gap` (something may have been missed: look at `path` anew), `created`, `modified` (told once until it is read),
    `written` (closed by who wrote it), `attributes` (mode, owner or times), `removed`, `moved` (from `source`).
    message: why, where a `gap` is the last event."""

    type: Literal["open", "gap", "created", "modified", "written", "attributes", "removed", "moved"]
    path: str
    directory: bool = False
    source: str | None = None
    message: str | None = None


class MakeDirectory(Request):
    """POST /sandboxes/{id}/files/mkdir. parents: make those above it too, and accept a directory that is there already.
    mode: octal text such as "0755" (the default), or an integer."""

    path: FilePath
    parents: bool = False
    mode: FileMode | None = None


class MoveFile(Request):
    """POST /sandboxes/{id}/files/move. overwrite: replace a file, a link or an empty directory at `target`."""

    source: FilePath
    target: FilePath
    overwrite: bool = False


class FileRemoved(Answer):
    status: Literal["deleted"] = "deleted"
    path: str


class ArchiveWritten(Answer):
    """entries: how many were made, directories and links included. size: bytes of the files."""

    success: bool = True
    path: str
    entries: int
    size: int


class FileListing(Answer):
    path: str
    files: list[FileEntry]
