"""Sandboxes where no control group can be had: found by the process that each began with, which ends all others.

It has the methods of `Cgroups` that the runtime and the zygote call; there are no groups and no limits behind them.
"""

from __future__ import annotations

import json
import os
import signal

TYPE_CHECKING = False  # importing typing would cost every sandbox most of a megabyte
if TYPE_CHECKING:
    from typing import Any

    from orchard.env.runtimes.local.spec import LaunchSpec

_START_TIME, _STATE = 19, 0


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the state on, or None when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return None


def process_name(pid: int) -> str:
    """What tells this process from any other since the machine started. Raises ProcessLookupError."""
    fields = _stat(pid)
    if fields is None:
        raise ProcessLookupError(f"process {pid} is gone")
    return f"{pid} {fields[_START_TIME]}"


class Processes:
    """The sandboxes below a state directory; each has a note of its first process (`Midwife` writes it)."""

    def __init__(self, state_dir: str) -> None:
        self._sandboxes = f"{state_dir}/sandboxes"

    def enforced(self) -> set[str]:
        """Which of cpu, memory and pids are limited by control groups."""
        return set()

    # ------------------------------------------------------------------------------------- from the zygote

    def prepare(self) -> None:
        """There is nothing to prepare."""

    def favour_moves(self) -> bool:
        return False

    def create(self, limits: LaunchSpec) -> None:
        """There is nothing to create."""

    def settle(self, sandbox_id: str, pid: int) -> None:
        """There is nowhere to settle."""

    def own_group(self) -> str:
        raise OSError("there are no control groups")

    def open_containment(self, sandbox_id: str, opened: list[int]) -> list[str]:
        del sandbox_id, opened
        return []

    # ------------------------------------------------------------------------------------ from the service

    def sandboxes(self) -> set[str]:
        """Ids that have something outside the state directory."""
        return set()

    def kill(self, sandbox_id: str) -> None:
        """SIGKILL to its first process, with which the kernel ends all of its PID namespace."""
        pid = self._first_process(sandbox_id)
        if pid:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                return

    def empty(self, sandbox_id: str) -> bool:
        # The first process is a zombie only after all others of its namespace are gone.
        return not self._first_process(sandbox_id)

    def _first_process(self, sandbox_id: str) -> int:
        """Its pid, or 0 when it has ended or never was."""
        try:
            with open(f"{self._sandboxes}/{sandbox_id}/sandbox.json", "rb") as file:
                name = str(json.loads(file.read())["process"])
            pid = int(name.split()[0])
        except (OSError, ValueError, KeyError, IndexError):
            return 0
        fields = _stat(pid)
        if fields is None or f"{pid} {fields[_START_TIME]}" != name or fields[_STATE] in "ZX":
            return 0
        return pid

    def remove(self, sandbox_id: str) -> None:
        """There is nothing to remove."""

    def remove_instance(self) -> None:
        """There is nothing to remove."""

    def peak_memory_bytes(self, sandbox_id: str) -> int | None:
        del sandbox_id
        return None

    def usage(self, sandbox_id: str) -> dict[str, Any]:
        """The fields of `orchard.env.runtimes.base.Usage`; these can be told by control groups only."""
        del sandbox_id
        names = ("cpu_seconds", "memory_bytes", "peak_memory_bytes", "memory_limit_bytes", "pids", "pids_limit",
                 "oom_kills")  # fmt: skip
        return dict.fromkeys(names)
