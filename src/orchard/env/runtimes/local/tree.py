"""The file tree of a sandbox: built in its own mount namespace, as real root, and made the root of all that is there."""

from __future__ import annotations

import errno
import os
import stat

from orchard.env.runtimes.local import kernel

TYPE_CHECKING = False  # importing typing would cost every sandbox most of a megabyte
if TYPE_CHECKING:
    from orchard.env.runtimes.local.spec import LaunchSpec

#: nosuid changes nothing that no_new_privs would not, but lets programs with file capabilities run, without them.
_IMAGE_ATTRIBUTES = kernel.MOUNT_ATTR_NODEV | kernel.MOUNT_ATTR_NOSUID
_SHM_BYTES = 1 << 30
_DISK_INODES_PER_MIB = 64


class _Site:
    """Where a tree is built. The links name directories by descriptor: that is what /proc/mounts shows the sandbox of
    its layers, instead of this machine's paths."""

    def __init__(self, scratch: str, home: str, spec: LaunchSpec, userns_fd: int) -> None:
        self.scratch = scratch
        self.spec = spec
        self.userns_fd = userns_fd
        # Opened here, since an overlay takes only what lies in the mount namespace that it is made in.
        self.fds = [os.open(path, os.O_PATH | os.O_CLOEXEC) for path in (home, scratch)]
        self.home_link, self.scratch_link = (f"/proc/self/fd/{fd}" for fd in self.fds)


def _shifted(site: _Site, layer: str, attributes: int = 0) -> int:
    """A detached copy of the mount at `layer` whose owners are shifted to the sandbox's ids, where that is possible."""
    if site.spec.ids:
        return _bound(layer, attributes)
    tree = kernel.open_tree(layer)
    kernel.mount_setattr(tree, attributes, site.userns_fd)
    return tree


def _bound(layer: str, attributes: int) -> int:
    """The same for an ordinary user, for whom owners stay as they are."""
    try:
        tree = kernel.open_tree(layer)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        raise OSError(
            error.errno,
            f"{layer} has other file systems mounted below it: an ordinary user's sandboxes cannot have it without"
            " them; use an imported image, or run the service as root",
        ) from None
    kernel.mount_setattr(tree, attributes)
    return tree


def _overlay(site: _Site, layers: list[str], first_layer: int, upper_name: str | None) -> int:
    """A detached overlay over `layers`, topmost first; writable in a directory of its own if `upper_name` is given."""
    options: list[tuple[str, str | None]] = [("source", "orchard")]
    if site.spec.ids:
        options.append(("userxattr", None))  # marks in "trusted" attributes are for real root
    for number, layer in enumerate(layers, first_layer):
        kernel.attach(_shifted(site, layer), f"{site.scratch}/l{number}")
        options.append(("lowerdir+", f"{site.scratch_link}/l{number}"))
    if upper_name is None:
        return kernel.new_mount("overlay", options, _IMAGE_ATTRIBUTES | kernel.MOUNT_ATTR_RDONLY)
    spec = site.spec
    upper_home = f"{site.scratch_link}/disk" if spec.disk_bytes is not None else site.home_link
    upper, work = f"{upper_home}/{upper_name}", f"{upper_home}/{upper_name}.work"
    os.mkdir(upper, 0o755)
    os.mkdir(work, 0o700)
    info = os.stat(layers[0])
    if info.st_mode & 0o7777 != 0o755:
        os.chmod(upper, info.st_mode & 0o7777)
    if not spec.ids:
        os.chown(upper, spec.base_uid + info.st_uid % 65536, spec.base_uid + info.st_gid % 65536)
    # volatile: no sync of the whole disk when a sandbox ends; its files end with it anyway.
    options += [("upperdir", upper), ("workdir", work), ("volatile", None)]
    return kernel.new_mount("overlay", options, _IMAGE_ATTRIBUTES)


def _disk(site: _Site, size_bytes: int) -> None:
    """A bounded place for the upper directories: ENOSPC at the limit, in blocks and in inodes."""
    inodes = max(4096, (size_bytes >> 20) * _DISK_INODES_PER_MIB)
    fd = kernel.new_mount("tmpfs", [("size", str(size_bytes)), ("nr_inodes", str(inodes)), ("mode", "0700")])
    kernel.move_mount(fd, f"{site.scratch}/disk")
    os.close(fd)


def _mount_point(root: str, name: str) -> str:
    """A directory of the new root to mount on; never through a link that the image planted."""
    path = f"{root}/{name}"
    try:
        info = os.lstat(path)
    except FileNotFoundError:
        os.mkdir(path, 0o755)
    else:
        if not stat.S_ISDIR(info.st_mode):
            raise OSError(f"the image's /{name} is not a directory")
    return path


def build_tree(scratch: str, home: str, spec: LaunchSpec, userns_fd: int) -> None:
    """Mount everything below `scratch/root` and make it the root, for this process and the newborn.

    home: the sandbox's directory, for what it writes. `scratch/proc` holds the newborn's /proc.
    """
    site = _Site(scratch, home, spec, userns_fd)
    # Mount points that images lack are made by and for the sandbox's root.
    old_mask = os.umask(0)
    try:
        _mount_all(site)
        os.chdir(f"{scratch}/root")
        kernel.pivot_root_here()
    finally:
        os.umask(old_mask)
        for fd in site.fds:
            os.close(fd)


def _mount_all(site: _Site) -> None:
    spec, root, base = site.spec, f"{site.scratch}/root", site.spec.base_uid
    if spec.disk_bytes is not None:
        _disk(site, spec.disk_bytes)
    kernel.attach(_overlay(site, spec.layers, 0, "upper"), root)
    used = len(spec.layers)
    for number, (target, layers, read_only) in enumerate(spec.mounts):
        if read_only and len(layers) == 1:
            attributes = _IMAGE_ATTRIBUTES | kernel.MOUNT_ATTR_RDONLY
            kernel.attach(_shifted(site, layers[0], attributes), f"{root}{target}")
        else:
            upper = None if read_only else f"upper.{number}"
            kernel.attach(_overlay(site, layers, used, upper), f"{root}{target}")
            used += len(layers)
    kernel.relocate(f"{site.scratch}/proc", _mount_point(root, "proc"))
    # For an ordinary user, devices are mounts themselves.
    dev = kernel.open_tree(f"{site.scratch}/dev", recursive=spec.ids > 0)
    kernel.mount_setattr(dev, kernel.MOUNT_ATTR_RDONLY | kernel.MOUNT_ATTR_NOSUID | kernel.MOUNT_ATTR_NOEXEC)
    target = _mount_point(root, "dev")
    kernel.attach(dev, target)
    pts: list[tuple[str, str | None]] = [("newinstance", None), ("ptmxmode", "0666"), ("mode", "0620")]
    if spec.ids != 1:
        pts.append(("gid", str(base + 5)))
    attributes = kernel.MOUNT_ATTR_NOSUID | kernel.MOUNT_ATTR_NOEXEC
    kernel.attach(kernel.new_mount("devpts", pts, attributes), f"{target}/pts")
    size = _SHM_BYTES if spec.memory_bytes is None else min(_SHM_BYTES, spec.memory_bytes // 2)
    shm: list[tuple[str, str | None]] = [
        ("size", str(size)), ("mode", "1777"), ("uid", str(base)), ("gid", str(base)),
    ]  # fmt: skip
    attributes = kernel.MOUNT_ATTR_NOSUID | kernel.MOUNT_ATTR_NODEV
    kernel.attach(kernel.new_mount("tmpfs", shm, attributes), f"{target}/shm")
