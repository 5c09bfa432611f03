"""What this machine can and cannot do for local sandboxes, found out by trying, and how to get the rest."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import resource
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from orchard.env.images.skopeo import HOW_TO_INSTALL
from orchard.env.runtimes.local.cgroups import Cgroups
from orchard.env.runtimes.local.ordinary import HOW_TO_GET_A_RANGE, HOW_TO_GET_LIMITS, Ordinary
from orchard.env.runtimes.local.probes import Findings, probe

Status = Literal["ok", "weak", "missing"]

_SERVER_MODULES = ("fastapi", "uvicorn", "uvloop", "httptools", "prometheus_client", "pyroute2", "dns")
_ARCHITECTURES = ("x86_64", "aarch64")
#: The first kernel whose overlayfs takes layers one by one, over shifted mounts.
_KERNEL = (6, 8)
_MANY_SANDBOXES = 1000
_DESCRIPTORS_PER_SANDBOX = 4
_LITTLE_DISK_BYTES = 5 << 30
_NO_DISK_BYTES = 200 << 20


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. required: without it the local runtime cannot work. hint: how to get what is missing."""

    name: str
    status: Status
    detail: str
    hint: str = ""
    required: bool = False

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


def examine(state_dir: Path) -> list[Check]:
    """Everything that matters here, most basic first. Leaves nothing behind."""
    findings = probe(state_dir)
    checks: list[Check] = []
    root = os.geteuid() == 0
    limits = (_limits, _network) if root else (_ordinary_isolation, _ordinary_limits)
    for group in (_basics, _isolation, *limits, _images, _room):
        checks.extend(group(state_dir, findings))
    return checks


def _basics(state_dir: Path, findings: Findings) -> Iterator[Check]:
    del state_dir, findings
    version = platform.python_version()
    fine = sys.version_info >= (3, 11)
    yield Check("python", "ok" if fine else "missing", version, "install Python 3.11 or newer", required=True)
    absent = [name for name in _SERVER_MODULES if importlib.util.find_spec(name) is None]
    yield Check(
        "server packages",
        "missing" if absent else "ok",
        f"not installed: {', '.join(absent)}" if absent else "installed",
        "pip install 'orchard-agents[server]'",
        required=True,
    )
    system, machine, release = platform.system(), platform.machine(), platform.release()
    known = system == "Linux" and machine in _ARCHITECTURES
    yield Check(
        "machine",
        "ok" if known else "missing",
        f"{system} {machine}",
        f"local sandboxes need Linux on {' or '.join(_ARCHITECTURES)}",
        required=True,
    )
    numbers = tuple(int(part) for part in re.findall(r"\d+", release)[:2])
    yield Check(
        "kernel",
        "ok" if numbers >= _KERNEL else "weak",
        release,
        f"{'.'.join(map(str, _KERNEL))} or newer is what sandboxes are made for; the trials below decide",
    )
    root = os.geteuid() == 0
    yield Check(
        "root",
        "ok" if root else "weak",
        "running as root" if root else f"running as uid {os.geteuid()}: sandboxes live in its user namespace",
        "as root (sudo orchard serve) each sandbox has ids of its own, limits, and a network where it is allowed",
    )


def _isolation(state_dir: Path, findings: Findings) -> Iterator[Check]:
    yield _tried(
        findings,
        "namespaces",
        "mount, pid, net, ipc, uts and cgroup namespaces",
        "the kernel or a container around this program forbids namespaces: run it privileged or on the host",
    )
    yield _tried(
        findings,
        "user namespaces",
        "a range of 65,536 ids can be mapped" if os.geteuid() == 0 else "an ordinary user can make them",
        "sysctl user.max_user_namespaces=65536; in a container, run it privileged"
        if os.geteuid() == 0
        else "sysctl user.max_user_namespaces=65536 kernel.unprivileged_userns_clone=1"
        " kernel.apparmor_restrict_unprivileged_userns=0 (those that this kernel has); or run the service as root",
    )
    limit = _number("/proc/sys/user/max_user_namespaces")
    few = limit is not None and limit < _MANY_SANDBOXES
    yield Check(
        "namespace limit",
        "weak" if few else "ok",
        f"at most {limit} user namespaces, one for each sandbox",
        f"for more sandboxes at once: sysctl user.max_user_namespaces={_MANY_SANDBOXES * 10}",
    )
    yield _tried(
        findings,
        "overlayfs",
        f"over a{' shifted' if os.geteuid() == 0 else 'n own'} image, with its upper layer in"
        f" {findings.scratch or state_dir}",
        "needs Linux 6.8 with overlayfs, and --state-dir on ext4, xfs, btrfs or tmpfs, not overlayfs or NFS",
    )
    yield _tried(
        findings,
        "seccomp",
        "the sandboxes' filter loads and refuses",
        "the kernel needs CONFIG_SECCOMP_FILTER",
    )


def _limits(state_dir: Path, findings: Findings) -> Iterator[Check]:
    del state_dir
    yield _tried(
        findings,
        "cgroup2",
        "groups can be made and killed",
        "mount it writable: mount -t cgroup2 none /sys/fs/cgroup/unified; in a container, run it privileged",
    )
    try:
        enforced = Cgroups.detect("doctor").enforced()
    except OSError:
        enforced = set()
    for name in ("memory", "pids", "cpu"):
        there = name in enforced
        version = "" if not there else findings.controllers.get(name, "")
        error = findings.errors.get(f"{name} limit")
        yield Check(
            f"{name} limit",
            "ok" if there and error is None else "weak",
            error or (f"enforced by {version}" if there else "no controller: the limit is not enforced"),
            f"enable the controller: boot with cgroup_enable={name} or systemd.unified_cgroup_hierarchy=1",
        )
    yield _tried(
        findings, "disk limit", "by a bounded tmpfs", "the kernel needs CONFIG_TMPFS", required=False
    )


def _ordinary_isolation(state_dir: Path, findings: Findings) -> Iterator[Check]:
    del state_dir
    yield _tried(
        findings,
        "proc",
        "a sandbox can have its own /proc",
        "a container around this program hides parts of /proc: run it on the host, or privileged",
    )
    ids = Ordinary.detect().ids
    yield _tried(findings, "more ids", f"{ids} users inside each sandbox", HOW_TO_GET_A_RANGE, required=False)
    status, detail = _verdict(findings, "network namespace", "loopback only")
    yield Check("blocked network", status, detail, "the kernel needs CONFIG_NET_NS", required=True)
    yield Check("open network", "weak", "block_network=false is refused", "run the service as root")


def _ordinary_limits(state_dir: Path, findings: Findings) -> Iterator[Check]:
    mine = Ordinary.detect()
    enforced = mine.cgroups("doctor", str(state_dir)).enforced()
    yield Check(
        "control group",
        "ok" if mine.group else "weak",
        f"{mine.group} is this user's"
        if mine.group
        else "none is this user's: commands are told apart by a mark",
        HOW_TO_GET_LIMITS,
    )
    for name in ("memory", "pids", "cpu"):
        there = name in enforced
        without = (
            "by RLIMIT_NPROC, for each user of a sandbox by itself" if name == "pids" else "asking is refused"
        )
        yield Check(
            f"{name} limit",
            "ok" if there else "weak",
            f"enforced by {mine.group}" if there else without,
            HOW_TO_GET_LIMITS,
        )
    yield _tried(
        findings, "disk limit", "by a bounded tmpfs", "the kernel needs CONFIG_TMPFS", required=False
    )


def _network(state_dir: Path, findings: Findings) -> Iterator[Check]:
    del state_dir
    status, detail = _verdict(findings, "network namespace", "loopback only")
    yield Check("blocked network", status, detail, "the kernel needs CONFIG_NET_NS", required=True)
    if shutil.which("nft") is None:
        yield Check(
            "open network",
            "weak",
            "nft is not installed",
            "apt-get install nftables, for block_network=false and allow_egress",
        )
        return
    yield _tried(
        findings,
        "open network",
        "bridge, veth and masquerading rules work",
        "for block_network=false the kernel needs bridge, veth, nf_tables and nft_masq (modprobe them)",
        required=False,
    )
    yield _tried(
        findings,
        "egress lists",
        "allow_egress can be enforced",
        "for allow_egress the kernel also needs nft_reject, nft_redir, nft_socket, nft_fib, nft_log, nf_tables_bridge and"
        " nfnetlink_log (modprobe them)",
        required=False,
    )


def _images(state_dir: Path, findings: Findings) -> Iterator[Check]:
    del state_dir, findings
    there = shutil.which("skopeo") is not None
    yield Check(
        "image registries",
        "ok" if there else "weak",
        "skopeo is installed" if there else "skopeo is not installed",
        f"{HOW_TO_INSTALL}, for `orchard images pull`; archives can be imported without it",
    )


def _room(state_dir: Path, findings: Findings) -> Iterator[Check]:
    del findings
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _MANY_SANDBOXES * _DESCRIPTORS_PER_SANDBOX
    unlimited = hard == resource.RLIM_INFINITY
    yield Check(
        "open files",
        "ok" if unlimited or hard >= needed else "weak",
        f"soft limit {soft}, hard limit {'none' if unlimited else hard}",
        f"for {_MANY_SANDBOXES} sandboxes at once: ulimit -n {needed}, or LimitNOFILE= in the unit",
    )
    place = next(path for path in (state_dir.absolute(), *state_dir.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    status: Status = "ok" if free >= _LITTLE_DISK_BYTES else "weak" if free >= _NO_DISK_BYTES else "missing"
    yield Check(
        "disk space",
        status,
        f"{free / 2**30:.1f} GiB free in {place}",
        "choose another place with --state-dir",
    )
    memory = _meminfo("MemAvailable")
    yield Check(
        "memory",
        "ok" if memory is None or memory >= 1 << 30 else "weak",
        "unknown" if memory is None else f"{memory / 2**30:.1f} GiB available",
        "each sandbox takes a few MiB, and what its commands use",
    )


def _verdict(findings: Findings, name: str, detail: str, bad: Status = "missing") -> tuple[Status, str]:
    error = findings.errors.get(name)
    return ("ok", detail) if error is None else (bad, error)


def _tried(findings: Findings, name: str, detail: str, hint: str, *, required: bool = True) -> Check:
    """The check of something that was really tried."""
    status, text = _verdict(findings, name, detail, "missing" if required else "weak")
    return Check(name, status, text, hint, required=required)


def _number(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return None


def _meminfo(name: str) -> int | None:
    try:
        found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None
