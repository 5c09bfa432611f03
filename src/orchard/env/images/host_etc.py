"""The `/etc` of the image `host`: an allowlist of this machine's harmless files, and a few written afresh.

Copied are regular files that anyone may read, and links that stay within what the image shows. Accounts are reduced
to those that every installation has; who works on this machine and which services run on it stays unknown.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

#: Names below /etc; directories with all they hold. A `*` in the last part matches as in a shell.
ALLOWED = (
    "alternatives", "bash.bashrc", "bashrc", "bindresvport.blacklist", "ca-certificates", "ca-certificates.conf",
    "crypto-policies/back-ends", "debian_version", "alpine-release", "arch-release", "fedora-release",
    "redhat-release", "system-release", "lsb-release", "os-release", "ethertypes", "fonts", "gai.conf", "groff",
    "host.conf", "inputrc", "java*", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "locale.alias", "locale.conf",
    "localtime", "login.defs", "magic", "magic.mime", "manpath.config", "mime.types", "netconfig", "perl",
    "pki/ca-trust/extracted", "pki/java", "pki/tls/cert.pem", "pki/tls/certs", "pki/tls/ct_log_list.cnf",
    "pki/tls/openssl.cnf", "profile", "profile.d", "protocols", "python*", "rpc", "services", "shells", "skel",
    "ssl/cert.pem", "ssl/certs", "ssl/openssl.cnf", "terminfo", "timezone", "zoneinfo",
)  # fmt: skip

#: Never copied, wherever they lie: a second fence behind the allowlist.
_REFUSED_NAME = re.compile(
    rb"^private$|\.key$|passw(or)?d|secret|credential|shadow|netrc$|pgpass$|^\.(ssh|aws|docker|kube|gnupg)$",
    re.IGNORECASE,
)
_PRIVATE_KEY = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----")
#: Settings that people put into shell profiles and that are no business of a sandbox.
_CREDENTIAL = re.compile(
    rb"^[^#\n]*(?:\b\w*(?:TOKEN|PASSWORD|PASSWD|SECRET|API_?KEY|CREDENTIALS?)\w*\s*=|://[^\s/@:]+:[^\s/@]+@)",
    re.IGNORECASE | re.MULTILINE,
)
_SHELL_FILES = ("profile", "profile.d", "bash.bashrc", "bashrc", "skel")
_MAX_FILE = 64 << 20

#: The first accounts of every distribution have fixed numbers below this; services installed later lie above.
#: Among the groups, 100 is `users` everywhere.
_FIXED_UIDS = range(100)
_FIXED_GIDS = range(101)
_NOBODY = 65534

_NSSWITCH = b"""\
passwd: files
group: files
shadow: files
hosts: files dns
networks: files
protocols: files
services: files
ethers: files
rpc: files
"""
_HOSTS = b"127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n"


class EtcBuilder:
    """Fills `target`, an empty directory, from `source` (the machine's /etc).

    shown: absolute directories that the image shows besides /etc; links may point there.
    """

    def __init__(self, source: Path, target: Path, shown: tuple[str, ...]) -> None:
        self._source = source
        self._target = target
        self._shown = shown

    def build(self) -> None:
        for pattern in ALLOWED:
            for path in sorted(self._source.glob(pattern)):
                relative = path.relative_to(self._source)
                # A linked parent would lead the walk out of the allowlist.
                if not any((self._source / parent).is_symlink() for parent in relative.parents[:-1]):
                    self._take(relative)
        self._write("passwd", _passwd(self._read("passwd")))
        self._write("group", _group(self._read("group")))
        self._write("nsswitch.conf", _NSSWITCH)
        self._write("hosts", _HOSTS)
        self._write("hostname", b"localhost\n")
        self._write("resolv.conf", b"")
        self._write("fstab", b"")
        mtab = self._target / "mtab"
        if not mtab.is_symlink():
            mtab.symlink_to("/proc/self/mounts")

    def _take(self, relative: Path) -> None:
        source, target = self._source / relative, self._target / relative
        try:
            info = source.lstat()
            if _REFUSED_NAME.search(os.fsencode(relative.name)):
                return
            if stat.S_ISLNK(info.st_mode):
                self._take_link(relative)
            elif stat.S_ISDIR(info.st_mode):
                if info.st_mode & 0o005 == 0o005:
                    self._make_directory(target)
                    for child in sorted(source.iterdir()):
                        self._take(relative / child.name)
            elif stat.S_ISREG(info.st_mode) and info.st_mode & 0o004 and info.st_size <= _MAX_FILE:
                self._take_file(relative, info)
        except (FileNotFoundError, PermissionError):
            return  # it changed while we looked, or is not for us to read

    def _take_link(self, relative: Path) -> None:
        text = (self._source / relative).readlink()
        # Where the link leads as the sandbox sees it: the source stands for /etc.
        meant = os.path.normpath(Path("/etc") / relative.parent / text)
        inside = meant.startswith("/etc/") and self._is_allowed(Path(meant).relative_to("/etc"))
        if inside or any(meant == place or meant.startswith(place + "/") for place in self._shown):
            target = self._target / relative
            self._make_directory(target.parent)
            target.symlink_to(text)

    def _is_allowed(self, relative: Path) -> bool:
        return any(
            candidate.match(pattern) and len(candidate.parts) == len(Path(pattern).parts)
            for candidate in (relative, *relative.parents)
            for pattern in ALLOWED
        )

    def _take_file(self, relative: Path, info: os.stat_result) -> None:
        fd = os.open(self._source / relative, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            content = file.read()
        shell = relative.parts[0] in _SHELL_FILES
        if _PRIVATE_KEY.search(content) or (shell and _CREDENTIAL.search(content)):
            return
        target = self._target / relative
        self._make_directory(target.parent)
        target.write_bytes(content)
        target.chmod(0o755 if info.st_mode & 0o111 else 0o644)
        os.utime(target, ns=(info.st_mtime_ns, info.st_mtime_ns))

    def _make_directory(self, target: Path) -> None:
        missing = [path for path in (target, *target.parents) if path.is_relative_to(self._target)]
        for path in reversed(missing):
            path.mkdir(exist_ok=True)
            path.chmod(0o755)

    def _write(self, name: str, content: bytes) -> None:
        target = self._target / name
        target.unlink(missing_ok=True)
        target.write_bytes(content)
        target.chmod(0o644)

    def _read(self, name: str) -> bytes:
        try:
            return (self._source / name).read_bytes()
        except OSError:
            return b""


def _passwd(text: bytes) -> bytes:
    """Root, nobody and the distribution's fixed accounts, without names and homes of people."""
    lines = [b"root:x:0:0:root:/root:/bin/sh"]
    shell = b"/bin/sh"
    seen = {b"root"}
    for fields in _fields(text, 7):
        name, _, uid, gid, _, home, own_shell = fields
        if uid == b"0":
            shell = own_shell if name == b"root" and own_shell.endswith(b"sh") else shell
        elif name not in seen and _is_in(uid, _FIXED_UIDS) and _is_in(gid, _FIXED_GIDS):
            kept = home if home.startswith((b"/bin", b"/sbin", b"/usr/", b"/dev")) else b"/nonexistent"
            lines.append(b":".join((name, b"x", uid, gid, b"", kept, own_shell)))
            seen.add(name)
    lines[0] = b"root:x:0:0:root:/root:" + shell
    if not any(line.split(b":")[2] == b"%d" % _NOBODY for line in lines):
        lines.append(b"nobody:x:%d:%d::/nonexistent:/usr/sbin/nologin" % (_NOBODY, _NOBODY))
    return b"\n".join(lines) + b"\n"


def _group(text: bytes) -> bytes:
    """The same for groups; nobody is a member of any."""
    lines = [b"root:x:0:"]
    seen = {b"0"}
    for name, _, gid, _ in _fields(text, 4):
        if gid not in seen and _is_in(gid, _FIXED_GIDS):
            lines.append(b":".join((name, b"x", gid, b"")))
            seen.add(gid)
    if b"%d" % _NOBODY not in seen:
        lines.append(b"nogroup:x:%d:" % _NOBODY)
    return b"\n".join(lines) + b"\n"


def _fields(text: bytes, count: int) -> list[list[bytes]]:
    rows = [
        line.split(b":") for line in text.splitlines() if line and not line.startswith((b"#", b"+", b"-"))
    ]
    return [row for row in rows if len(row) == count and row[0]]


def _is_in(number: bytes, fixed: range) -> bool:
    return number.isdigit() and (int(number) in fixed or int(number) == _NOBODY)
