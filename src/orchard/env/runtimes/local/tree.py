"""The file tree of a sandbox: built by the newborn in its own mount namespace, as real root, and moved into."""

from __future__ import annotations

import os

from orchard.env.runtimes.local import kernel

TYPE_CHECKING = False  # importing typing would cost every sandbox most of a megabyte
if TYPE_CHECKING:
    from orchard.env.runtimes.local.birth import Birth
    from orchard.env.runtimes.local.spec import NetworkSpec

#: nosuid changes nothing that no_new_privs would not, but lets programs with file capabilities run, without them.
_IMAGE_ATTRIBUTES = kernel.MOUNT_ATTR_NODEV | kernel.MOUNT_ATTR_NOSUID
_SHM_BYTES = 1 << 30
_DISK_INODES_PER_MIB = 64


def _shifted(birth: Birth, layer: str, attributes: int = 0) -> int:
    """A detached copy of the mount at `layer` whose owners are shifted to the sandbox's ids."""
    tree = kernel.open_tree(layer)
    kernel.mount_setattr(tree, attributes, birth.userns_fd)
    return tree


def _overlay(birth: Birth, layers: list[str], first_layer: int, upper_name: str | None) -> int:
    """A detached overlay over `layers`, topmost first; writable in a directory of its own if `upper_name` is given."""
    options: list[tuple[str, str | None]] = [("source", "orchard")]
    for number, layer in enumerate(layers, first_layer):
        _attach(_shifted(birth, layer), f"{birth.scratch}/l{number}")
        options.append(("lowerdir+", f"{birth.scratch_link}/l{number}"))
    if upper_name is None:
        return kernel.new_mount("overlay", options, _IMAGE_ATTRIBUTES | kernel.MOUNT_ATTR_RDONLY)
    spec = birth.spec
    upper_home = f"{birth.scratch_link}/disk" if spec.disk_bytes is not None else birth.home_link
    upper, work = f"{upper_home}/{upper_name}", f"{upper_home}/{upper_name}.work"
    os.mkdir(upper, 0o755)
    os.mkdir(work, 0o700)
    info = os.stat(layers[0])
    os.chmod(upper, info.st_mode & 0o7777)
    os.chown(upper, spec.base_uid + info.st_uid % 65536, spec.base_uid + info.st_gid % 65536)
    # volatile: no sync of the whole disk when a sandbox ends; its files end with it anyway.
    options += [("upperdir", upper), ("workdir", work), ("volatile", None)]
    return kernel.new_mount("overlay", options, _IMAGE_ATTRIBUTES)


def _disk(birth: Birth, size_bytes: int) -> None:
    """A bounded place for the upper directories: ENOSPC at the limit, in blocks and in inodes."""
    inodes = max(4096, (size_bytes >> 20) * _DISK_INODES_PER_MIB)
    fd = kernel.new_mount("tmpfs", [("size", str(size_bytes)), ("nr_inodes", str(inodes)), ("mode", "0700")])
    kernel.move_mount(fd, f"{birth.scratch}/disk")
    os.close(fd)


def _attach(fd: int, target: str) -> None:
    kernel.move_mount(fd, target)
    os.close(fd)


def _mount_point(root: str, name: str) -> str:
    """A directory of the new root to mount on; never through a link that the image planted."""
    path = f"{root}/{name}"
    try:
        os.mkdir(path, 0o755)
    except FileExistsError:
        if os.path.islink(path) or not os.path.isdir(path):
            raise OSError(f"the image's /{name} is not a directory") from None
    return path


def build_tree(birth: Birth) -> None:
    """Mount everything below `scratch/root` and make it this process' root."""
    spec = birth.spec
    base = spec.base_uid
    root = f"{birth.scratch}/root"
    # /proc/mounts shows the sandbox how its layers were named: by descriptor, not by this machine's paths.
    scratch_fd = os.open(birth.scratch, os.O_PATH | os.O_CLOEXEC)
    birth.home_link, birth.scratch_link = f"/proc/self/fd/{birth.home_fd}", f"/proc/self/fd/{scratch_fd}"
    # Mount points that images lack are made by and for the sandbox's root.
    old_mask = os.umask(0)
    if spec.disk_bytes is not None:
        _disk(birth, spec.disk_bytes)
    _attach(_overlay(birth, spec.layers, 0, "upper"), root)
    used = len(spec.layers)
    for number, (target, layers, read_only) in enumerate(spec.mounts):
        if read_only and len(layers) == 1:
            attributes = _IMAGE_ATTRIBUTES | kernel.MOUNT_ATTR_RDONLY
            _attach(_shifted(birth, layers[0], attributes), f"{root}{target}")
        else:
            _attach(
                _overlay(birth, layers, used, None if read_only else f"upper.{number}"), f"{root}{target}"
            )
            used += len(layers)
    nosuid = kernel.MOUNT_ATTR_NOSUID | kernel.MOUNT_ATTR_NODEV | kernel.MOUNT_ATTR_NOEXEC
    proc = _mount_point(root, "proc")
    _attach(kernel.new_mount("proc", [], nosuid), proc)
    _set_network_sysctls(f"{proc}/sys/net", spec.network)
    sysctl = kernel.open_tree(f"{proc}/sys")
    kernel.mount_setattr(sysctl, kernel.MOUNT_ATTR_RDONLY | nosuid)
    _attach(sysctl, f"{proc}/sys")
    dev = kernel.open_tree(f"{birth.scratch}/dev")
    kernel.mount_setattr(dev, kernel.MOUNT_ATTR_RDONLY | kernel.MOUNT_ATTR_NOSUID | kernel.MOUNT_ATTR_NOEXEC)
    target = _mount_point(root, "dev")
    _attach(dev, target)
    pts: list[tuple[str, str | None]] = [
        ("newinstance", None),
        ("ptmxmode", "0666"),
        ("mode", "0620"),
        ("gid", str(base + 5)),
    ]
    _attach(
        kernel.new_mount("devpts", pts, kernel.MOUNT_ATTR_NOSUID | kernel.MOUNT_ATTR_NOEXEC), f"{target}/pts"
    )
    size = _SHM_BYTES if spec.memory_bytes is None else min(_SHM_BYTES, spec.memory_bytes // 2)
    shm: list[tuple[str, str | None]] = [
        ("size", str(size)),
        ("mode", "1777"),
        ("uid", str(base)),
        ("gid", str(base)),
    ]
    _attach(
        kernel.new_mount("tmpfs", shm, kernel.MOUNT_ATTR_NOSUID | kernel.MOUNT_ATTR_NODEV), f"{target}/shm"
    )
    os.umask(old_mask)
    os.chdir(root)
    kernel.pivot_root_here()
    os.close(scratch_fd)


def _set_network_sysctls(net: str, network: NetworkSpec | None) -> None:
    """Low ports and ping for everyone, no IPv6 on eth0. `net` lies in the sandbox's own /proc: in the machine's,
    one name has an entry for every network namespace, and looking it up takes time in their number."""
    # The namespace belongs to the machine: capabilities inside do not count for ports below 1024.
    kernel.write_control(f"{net}/ipv4/ip_unprivileged_port_start", "0")
    kernel.write_control(f"{net}/ipv4/ping_group_range", "0 2147483647")
    if network is not None and os.path.exists(f"{net}/ipv6/conf/eth0/disable_ipv6"):
        kernel.write_control(f"{net}/ipv6/conf/eth0/disable_ipv6", "1")
