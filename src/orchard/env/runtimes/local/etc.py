"""What a sandbox's /etc needs to say of its network: written by the newborn as the sandbox's root, inside it."""

from __future__ import annotations

import os
import stat

from orchard.env.agent.paths import make_directories

TYPE_CHECKING = False  # importing typing would cost every sandbox most of a megabyte
if TYPE_CHECKING:
    from orchard.env.runtimes.local.spec import NetworkSpec


def write_etc_files(sandbox_id: str, network: NetworkSpec | None) -> None:
    """hosts, hostname and resolv.conf, where the image has none; as the sandbox's root, inside it."""
    if network is None and _there("/etc/hosts"):
        return
    hosts = f"127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n127.0.1.1\t{sandbox_id}\n"
    nameservers = network.nameservers if network else []
    if not _there("/etc/hosts"):
        _etc("hosts", hosts, replace=False)
    if network is not None:
        _etc("resolv.conf", "".join(f"nameserver {server}\n" for server in nameservers), replace=True)


def _there(path: str) -> bool:
    try:
        info = os.stat(path)
    except OSError:
        return False
    return stat.S_ISREG(info.st_mode) and info.st_size > 0


def _etc(name: str, text: str, *, replace: bool) -> None:
    """Write /etc/`name`, unless the image has made that impossible: then it keeps what it has."""
    raw = name.encode()
    try:
        folder = make_directories(b"/etc")
    except OSError:
        return
    try:
        info = _stat_of(raw, folder)
        if info is not None and (stat.S_ISLNK(info.st_mode) or not stat.S_ISREG(info.st_mode)):
            if not replace:
                return
            os.unlink(raw, dir_fd=folder)
        elif info is not None and info.st_size > 0 and not replace:
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(raw, flags, 0o644, dir_fd=folder)
        os.write(fd, text.encode())
        os.close(fd)
    except OSError:
        return
    finally:
        os.close(folder)


def _stat_of(name: bytes, folder: int) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None
