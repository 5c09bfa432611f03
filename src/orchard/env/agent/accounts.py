"""Users and groups of the image, read from its own files.

`pwd` and `grp` would dlopen the image's libnss modules into the agent: they are never used.
"""

from __future__ import annotations

import os
import stat

from orchard.env.agent.paths import open_inside

_MAX_FILE_BYTES = 4 << 20
_MAX_KNOWN = 64


class UnknownUser(Exception):
    """No such user or group in the image."""


class Account:
    """A resolved user: numeric ids, supplementary groups, name and home."""

    __slots__ = ("gid", "groups", "home", "name", "uid")

    def __init__(self, uid: int, gid: int, groups: tuple[int, ...], name: str, home: str) -> None:
        self.uid = uid
        self.gid = gid
        self.groups = groups
        self.name = name
        self.home = home


def _lines(path: bytes) -> list[list[str]]:
    """The fields of each line; none if it is not a readable regular file, whatever the image made of it."""
    try:
        fd = open_inside(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:
        return []
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return []
        data = os.read(fd, _MAX_FILE_BYTES)
    except OSError:
        return []
    finally:
        os.close(fd)
    return [line.split(":") for line in data.decode("utf-8", "surrogateescape").splitlines()]


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 10 else None


_Stamp = tuple[int, int, int]


def _stamp(path: str) -> _Stamp:
    """Changes whenever the file does."""
    try:
        info = os.stat(path)
    except OSError:
        return (0, 0, 0)
    return (info.st_ino, info.st_size, info.st_ctime_ns)


class Accounts:
    """Looks users up, and remembers the answers for as long as the image's files stay as they are."""

    def __init__(self) -> None:
        self._known: dict[str, Account] = {}
        self._stamps: tuple[_Stamp, _Stamp] | None = None

    def lookup(self, user: str) -> Account:
        """As the function of this name."""
        stamps = (_stamp("/etc/passwd"), _stamp("/etc/group"))
        if stamps != self._stamps or len(self._known) > _MAX_KNOWN:
            self._stamps = stamps
            self._known.clear()
        account = self._known.get(user)
        if account is None:
            account = self._known[user] = lookup(user)
        return account


class FewAccounts(Accounts):
    """Where only the ids from 0 to `ids` - 1 exist. Raises `UnknownUser` for the others."""

    def __init__(self, ids: int) -> None:
        super().__init__()
        self._ids = ids

    def lookup(self, user: str) -> Account:
        account = super().lookup(user)
        if account.uid >= self._ids or account.gid >= self._ids:
            raise UnknownUser(
                f"user {user!r} (uid {account.uid}, gid {account.gid}) cannot exist here: the service runs as an ordinary"
                f" user with {self._ids} id(s) for its sandboxes; give it a range in /etc/subuid and /etc/subgid and"
                " install newuidmap (package uidmap), or use root"
            )
        if self._ids == 1:
            # Groups cannot be set without a range: a process keeps those that it has.
            account.groups = tuple(os.getgroups())
        else:
            account.groups = tuple(group for group in account.groups if group < self._ids)
        return account


def lookup(user: str) -> Account:
    """The account for `name`, `uid`, `name:group` or `uid:gid`. Raises `UnknownUser`.

    A numeric uid without an entry is allowed, as in `docker run --user`.
    """
    who, _, group = user.partition(":")
    uid = _number(who)
    entry = None
    for fields in _lines(b"/etc/passwd"):
        if len(fields) >= 7 and (fields[0] == who or (uid is not None and _number(fields[2]) == uid)):
            entry = fields
            break
    if entry is None and uid is None:
        if who != "root":
            raise UnknownUser(
                f"user {who!r} is not in the image's /etc/passwd; use a numeric uid or create the user"
            )
        uid = 0
    if entry is not None:
        uid = _number(entry[2])
        gid = _number(entry[3])
        name, home = entry[0], entry[5] or "/"
    else:
        gid, name, home = (0, "root", "/root") if uid == 0 else (0, who, "/")
    if uid is None or gid is None or uid > 65535 or gid > 65535:
        raise UnknownUser(f"user {who!r}: ids must be numbers from 0 to 65535")
    groups = {gid}
    if group:
        gid = _group(group)
        groups = {gid}
    else:
        groups.update(_memberships(name))
    return Account(uid, gid, tuple(sorted(groups)), name, home)


def _group(group: str) -> int:
    number = _number(group)
    for fields in _lines(b"/etc/group"):
        if len(fields) >= 3 and fields[0] == group:
            number = _number(fields[2])
            break
    if number is None or number > 65535:
        raise UnknownUser(
            f"group {group!r} is not in the image's /etc/group; use a numeric gid from 0 to 65535"
        )
    return number


def _memberships(name: str) -> list[int]:
    found = []
    for fields in _lines(b"/etc/group"):
        if len(fields) >= 4 and name in fields[3].strip().split(","):
            gid = _number(fields[2])
            if gid is not None and gid <= 65535:
                found.append(gid)
    return found
