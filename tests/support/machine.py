"""What the machine shows from outside the sandboxes: processes, mounts, control groups, network devices."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterable
from pathlib import Path

from tests.support.waiting import eventually

PROC = Path("/proc")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def pids() -> list[int]:
    return [int(path.name) for path in PROC.iterdir() if path.name.isdigit()]


def status_field(pid: int, name: str) -> str | None:
    """A field of /proc/PID/status, or None when the process is gone."""
    found = re.search(
        rf"^{name}:\s*(.*)$", _read(PROC / str(pid) / "status").decode(errors="replace"), re.MULTILINE
    )
    return found[1] if found else None


def runs(pid: int) -> bool:
    """The process exists and is no zombie."""
    state = status_field(pid, "State")
    return state is not None and state[0] not in "ZX"


def children(pid: int) -> list[int]:
    """Direct children that run."""
    return [p for p in pids() if status_field(p, "PPid") == str(pid) and runs(p)]


def descendants(pid: int) -> list[int]:
    """Every process below `pid`, parents first."""
    parents: dict[int, list[int]] = {}
    for p in pids():
        parent = status_field(p, "PPid")
        if parent is not None and runs(p):
            parents.setdefault(int(parent), []).append(p)
    found, front = [], [pid]
    while front:
        front = [child for parent in front for child in parents.get(parent, [])]
        found += front
    return found


def pids_with_argument(argument: str) -> list[int]:
    """Processes that have `argument` as one of their arguments, seen from outside."""
    wanted = argument.encode()
    return [p for p in pids() if wanted in _read(PROC / str(p) / "cmdline").split(b"\0") and runs(p)]


def pid_namespace(pid: int) -> str | None:
    try:
        return str((PROC / str(pid) / "ns/pid").readlink())
    except OSError:
        return None


def namespace_init(pid: int) -> int:
    """The outside pid of process 1 in the pid namespace of `pid`."""
    wanted = pid_namespace(pid)
    for p in pids():
        if pid_namespace(p) == wanted and (status_field(p, "NSpid") or "").split()[-1:] == ["1"]:
            return p
    raise AssertionError(f"no process 1 in the pid namespace of {pid}")


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def resident_bytes(pid: int) -> int:
    value = status_field(pid, "VmRSS")
    return int(value.split()[0]) * 1024 if value else 0


class Growth:
    """How far the resident memory of a process has risen above what it was at the beginning, at its highest."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        # The kernel begins anew to note the highest.
        (PROC / str(pid) / "clear_refs").write_text("5")
        self._before = resident_bytes(pid)

    @property
    def bytes(self) -> int:
        value = status_field(self._pid, "VmHWM")
        assert value is not None, f"process {self._pid} is gone"
        return int(value.split()[0]) * 1024 - self._before


def network_devices() -> set[str]:
    return {path.name for path in Path("/sys/class/net").iterdir()}


def mounts() -> list[str]:
    return _read(PROC / "self/mountinfo").decode(errors="replace").splitlines()


def control_groups() -> set[str]:
    """Every control group directory of every hierarchy."""
    return {folder for folder, _, _ in os.walk("/sys/fs/cgroup")}


class Leftovers:
    """What is left on the machine of a service: by its mark, its state directory, its sandboxes' ids, and the
    tags that its runtime puts into the names of groups, network devices and packet filter tables."""

    def __init__(
        self, mark: str, state_dir: Path, sandbox_ids: Iterable[str], tags: Iterable[str] = ()
    ) -> None:
        self._mark = f"ORCHARD_TEST_MARK={mark}".encode()
        self._state_dir = str(state_dir)
        self._ids = set(sandbox_ids)
        self._tags = tuple(tags)

    def _is_ours(self, pid: int) -> bool:
        folder = PROC / str(pid)
        return runs(pid) and (
            self._mark in _read(folder / "environ").split(b"\0")
            or self._state_dir.encode() in _read(folder / "mountinfo")
            or self._state_dir.encode() in _read(folder / "cmdline")
        )

    def processes(self) -> list[str]:
        return [
            f"process {pid}: {_read(PROC / str(pid) / 'cmdline').decode(errors='replace')!r}"
            for pid in pids()
            if pid != os.getpid() and self._is_ours(pid)
        ]

    def mounts(self) -> list[str]:
        return [f"mount {line}" for line in mounts() if self._state_dir in line]

    def control_groups(self) -> list[str]:
        names = (*self._ids, *self._tags)
        return [f"control group {path}" for path in control_groups() if any(name in path for name in names)]

    def network(self) -> list[str]:
        found = [f"device {name}" for name in network_devices() if any(tag[:6] in name for tag in self._tags)]
        tables = subprocess.run(["nft", "list", "tables"], capture_output=True, text=True, check=False).stdout
        return found + [
            f"table {line}" for line in tables.splitlines() if any(tag in line for tag in self._tags)
        ]

    def directories(self) -> list[str]:
        # The service's own levels only: trees that sandboxes made may be of any depth.
        return [
            f"path {path}"
            for pattern in ("*", "*/*", "*/*/*")
            for path in Path(self._state_dir).glob(pattern)
            if path.name.split(".")[0] in self._ids
        ]

    def all(self) -> list[str]:
        return self.processes() + self.mounts() + self.control_groups() + self.network() + self.directories()

    def check(self, within_s: float = 20.0) -> None:
        """AssertionError that names what is left after `within_s`."""
        try:
            eventually(lambda: not self.all(), "nothing is left", within_s)
        except AssertionError:
            if left := self.all():
                raise AssertionError("left behind:\n" + "\n".join(left)) from None
