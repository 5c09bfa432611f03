"""Trials of what local sandboxes need: each in a child process of its own, so that nothing of it stays.

`probe` runs this module as a program in a fresh interpreter with one thread, which forks once for each trial.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from orchard.env.agent import syscalls
from orchard.env.runtimes.local import kernel, seccomp
from orchard.env.runtimes.local.cgroups import Cgroups
from orchard.env.runtimes.local.ordinary import Ordinary
from orchard.env.runtimes.local.spec import UIDS_PER_SANDBOX, base_uid
from orchard.env.runtimes.local.userns import become_root, check_proc

_TIMEOUT_S = 30.0
_NAMESPACES = {
    "mount": kernel.CLONE_NEWNS,
    "pid": kernel.CLONE_NEWPID,
    "ipc": kernel.CLONE_NEWIPC,
    "uts": kernel.CLONE_NEWUTS,
    "cgroup": kernel.CLONE_NEWCGROUP,
    "net": kernel.CLONE_NEWNET,
}


@dataclass
class Findings:
    """errors: what failed, by the trial's name. controllers: cgroup controller → the hierarchy that has it.
    scratch: where the overlay was tried."""

    errors: dict[str, str] = field(default_factory=dict)
    controllers: dict[str, str] = field(default_factory=dict)
    scratch: str = ""


def probe(state_dir: Path) -> Findings:
    """Try everything. Never raises: what cannot be tried is an error in the findings."""
    place = next(path for path in (state_dir.absolute(), *state_dir.absolute().parents) if path.exists())
    if not os.access(place, os.W_OK):
        place = Path(tempfile.gettempdir())
    findings = Findings(controllers=_controllers(), scratch=str(place))
    with tempfile.TemporaryDirectory(
        prefix=".orchard-doctor-", dir=place, ignore_cleanup_errors=True
    ) as scratch:
        try:
            done = subprocess.run(
                [sys.executable, "-m", __name__, scratch],
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
                check=True,
            )
            findings.errors = json.loads(done.stdout)
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            reason = getattr(error, "stderr", None) or str(error)
            findings.errors = dict.fromkeys(_trials(), f"could not be tried: {reason.strip()[-200:]}")
        # overlayfs leaves its work directory without any mode bits.
        for folder in Path(scratch).rglob("work"):
            with contextlib.suppress(OSError):
                folder.chmod(0o700)
    return findings


def _controllers() -> dict[str, str]:
    try:
        found = Cgroups.detect("doctor")
    except OSError:
        return {}
    return {
        **{name: f"cgroup v1 at {root}" for name, root in found.v1_roots.items()},
        **dict.fromkeys(found.v2_controllers, f"cgroup v2 at {found.v2_root}"),
    }


# ------------------------------------------------------------------------------------------------- the trials


def _try_namespaces(_scratch: str) -> None:
    for name, flag in _NAMESPACES.items():
        try:
            kernel.unshare(flag)
        except OSError as error:
            raise OSError(f"{name} namespace: {error.strerror}") from None


def _try_network_namespace(_scratch: str) -> None:
    kernel.unshare(kernel.CLONE_NEWNET)


def _try_user_namespaces(_scratch: str) -> None:
    os.close(_user_namespace())


def _user_namespace() -> int:
    """A user namespace with a sandbox's mapping, as a descriptor."""
    ready, made = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            kernel.unshare(kernel.CLONE_NEWUSER)
            os.write(made[1], b"1")
            os.read(ready[0], 1)
            code = 0
        finally:
            os._exit(code)
    os.close(made[1])
    try:
        if os.read(made[0], 1) != b"1":
            raise OSError("no user namespace can be made (unshare was refused)")
        for name in ("uid_map", "gid_map"):
            Path(f"/proc/{pid}/{name}").write_text(f"0 {base_uid(0)} {UIDS_PER_SANDBOX}\n")
        return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.write(ready[1], b"1")
        os.waitpid(pid, 0)


def _own_mounts(scratch: str) -> None:
    """A mount namespace, and the directories for an overlay in it."""
    kernel.unshare(kernel.CLONE_NEWNS)
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    for name in ("image", "layer", "upper", "work", "root"):
        Path(scratch, name).mkdir()
    Path(f"{scratch}/image/file").write_text("image")


def _try_overlay(scratch: str) -> None:
    userns_fd = _user_namespace()
    _own_mounts(scratch)
    for name in ("upper", "work"):
        os.chown(f"{scratch}/{name}", base_uid(0), base_uid(0))
    tree = kernel.open_tree(f"{scratch}/image")
    try:
        kernel.mount_setattr(tree, 0, userns_fd)
    except OSError as error:
        raise OSError(f"ids cannot be shifted on this file system: {error.strerror}") from None
    kernel.move_mount(tree, f"{scratch}/layer")
    upper, work = f"{scratch}/upper", f"{scratch}/work"
    options: list[tuple[str, str | None]] = [
        ("source", "orchard"), ("lowerdir+", f"{scratch}/layer"), ("upperdir", upper), ("workdir", work),
        ("volatile", None),
    ]  # fmt: skip
    kernel.move_mount(kernel.new_mount("overlay", options, kernel.MOUNT_ATTR_NODEV), f"{scratch}/root")
    owner = Path(scratch, "root/file").stat().st_uid
    if owner != base_uid(0):
        raise OSError(f"a shifted file belongs to uid {owner}, not {base_uid(0)}")
    # overlayfs mounts read-only, without a word, where it does not like the upper layer.
    Path(f"{scratch}/root/new").write_text("upper")


def _try_disk_limit(_scratch: str) -> None:
    kernel.unshare(kernel.CLONE_NEWNS)
    os.close(kernel.new_mount("tmpfs", [("size", "1048576"), ("nr_inodes", "64")]))


def _try_seccomp(_scratch: str) -> None:
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    kernel.SeccompFilter(seccomp.build()).install()
    try:
        kernel.unshare(kernel.CLONE_NEWUSER)  # which everybody may without a filter
    except OSError:
        return
    raise OSError("the filter loads but refuses nothing")


def _try_cgroup2(_scratch: str) -> None:
    groups = Cgroups.detect("doctor")
    if not os.access(groups.v2_root, os.W_OK):
        raise OSError(f"{groups.v2_root} is not writable")
    folder = Path(groups.v2_root, f"orchard-doctor-{os.getpid()}")
    folder.mkdir()
    try:
        pid = os.fork()
        if pid == 0:
            os.read(os.pipe()[0], 1)
            os._exit(0)
        try:
            (folder / "cgroup.procs").write_text(str(pid))
            (folder / "cgroup.kill").write_text("1")
        except FileNotFoundError:
            raise OSError("cgroup.kill is missing; it needs Linux 5.14") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
            os.waitpid(pid, 0)
    finally:
        _remove_group(folder)


def _try_limit(name: str) -> Callable[[str], None]:
    def attempt(_scratch: str) -> None:
        groups = Cgroups.detect("doctor")
        root = groups.v1_roots.get(name)
        if root is None:
            return  # version 2 (tried as a whole), or nowhere: the doctor says so
        folder = Path(root, f"orchard-doctor-{os.getpid()}")
        folder.mkdir()
        _remove_group(folder)

    return attempt


def _remove_group(folder: Path) -> None:
    # The kernel lets go of the last dead task a moment after it was reaped.
    for _ in range(1000):
        try:
            folder.rmdir()
            return
        except OSError:
            os.sched_yield()
    folder.rmdir()


def _try_open_network(_scratch: str) -> None:
    if shutil.which("nft") is None:
        raise OSError("nft is not installed")
    kernel.unshare(kernel.CLONE_NEWNET)
    _try_rules("table inet t {\n chain p {\n type nat hook postrouting priority 100;\n masquerade\n }\n}\n")
    try:
        from pyroute2 import IPRoute
    except ImportError:
        raise OSError("pyroute2 is not installed") from None
    with IPRoute() as links:
        for kind in ("bridge", "veth"):
            try:
                links.link("add", ifname=f"doctor-{kind}", kind=kind)
            except Exception as error:
                raise OSError(f"a {kind} cannot be made: {error}") from None


def _try_egress_lists(_scratch: str) -> None:
    if shutil.which("nft") is None:
        raise OSError("nft is not installed")
    from orchard.env.runtimes.local import firewall
    from orchard.env.runtimes.local.gateway.nflog import open_log

    kernel.unshare(kernel.CLONE_NEWNET)
    _try_rules(firewall.example())
    open_log(1)[0].close()


def _try_rules(rules: str) -> None:
    done = subprocess.run(["nft", "-f", "-"], input=rules, text=True, capture_output=True, check=False)
    if done.returncode != 0:
        raise OSError(f"nft: {done.stderr.strip().splitlines()[0] if done.stderr.strip() else 'refused'}")


_TRIALS: dict[str, Callable[[str], None]] = {
    "namespaces": _try_namespaces,
    "network namespace": _try_network_namespace,
    "user namespaces": _try_user_namespaces,
    "overlayfs": _try_overlay,
    "disk limit": _try_disk_limit,
    "seccomp": _try_seccomp,
    "cgroup2": _try_cgroup2,
    "memory limit": _try_limit("memory"),
    "pids limit": _try_limit("pids"),
    "cpu limit": _try_limit("cpu"),
    "open network": _try_open_network,
    "egress lists": _try_egress_lists,
}


# ------------------------------------------------------------------------- what differs for an ordinary user


def _try_ordinary_overlay(scratch: str) -> None:
    _own_mounts(scratch)
    options: list[tuple[str, str | None]] = [
        ("source", "orchard"), ("userxattr", None), ("lowerdir+", f"{scratch}/image"),
        ("upperdir", f"{scratch}/upper"), ("workdir", f"{scratch}/work"), ("volatile", None),
    ]  # fmt: skip
    kernel.move_mount(kernel.new_mount("overlay", options, kernel.MOUNT_ATTR_NODEV), f"{scratch}/root")
    with open(f"{scratch}/root/file", "a") as file:  # which copies it up
        file.write("upper")


def _try_more_ids(_scratch: str) -> None:
    if Ordinary.detect().ids == 1:
        raise OSError(
            "no users but root inside sandboxes: no range of ids belongs to this user, or no newuidmap"
        )


def _as_root_of_a_namespace(trial: Callable[[str], None]) -> Callable[[str], None]:
    def attempt(scratch: str) -> None:
        mine = Ordinary.detect()
        become_root(mine.uids, mine.gids)
        trial(scratch)

    return attempt


_ORDINARY_TRIALS: dict[str, Callable[[str], None]] = {
    "more ids": _try_more_ids,
    "seccomp": _try_seccomp,
    **{
        name: _as_root_of_a_namespace(trial)
        for name, trial in {
            "user namespaces": lambda _scratch: None,
            "namespaces": _try_namespaces,
            "network namespace": _try_network_namespace,
            "overlayfs": _try_ordinary_overlay,
            "proc": lambda _scratch: check_proc(),
            "disk limit": _try_disk_limit,
        }.items()
    },
}


def _trials() -> dict[str, Callable[[str], None]]:
    return _TRIALS if os.geteuid() == 0 else _ORDINARY_TRIALS


def _in_a_child(trial: Callable[[str], None], scratch: str) -> str | None:
    """What went wrong, or None."""
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(readable)
        try:
            trial(scratch)
        except BaseException as error:
            text = (error.strerror or str(error)) if isinstance(error, OSError) else repr(error)
            os.write(writable, text.encode()[:4000])
        finally:
            os._exit(0)
    os.close(writable)
    with open(readable, "rb") as pipe:
        text = pipe.read().decode(errors="replace")
    _, status = os.waitpid(pid, 0)
    if not text and status != 0:
        text = f"the trial died ({os.waitstatus_to_exitcode(status)})"
    return text or None


def main() -> None:
    """Try everything with the scratch directory of the first argument; errors as JSON on stdout."""
    scratch = sys.argv[1]
    found = {name: _in_a_child(trial, scratch) for name, trial in _trials().items()}
    json.dump({name: error for name, error in found.items() if error is not None}, sys.stdout)


if __name__ == "__main__":
    main()
