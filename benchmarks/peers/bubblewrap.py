"""bubblewrap + subprocess: one `bwrap` for each command, as tools without a service do it.

All namespaces, another user, read-only system directories, a tmpfs to write to; no cgroup limits, no seccomp
filter, nothing that stays between commands.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable

from benchmarks.samples import Metrics, latency, memory_available, memory_each, run_threads
from benchmarks.scale import Scale

NAME = "bubblewrap"
SANDBOX = [
    "--unshare-all", "--unshare-user", "--uid", "1000", "--gid", "1000", "--die-with-parent", "--new-session",
    "--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin", "--symlink", "usr/lib", "/lib",
    "--symlink", "usr/lib64", "/lib64", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp",
    "--chdir", "/tmp",
]  # fmt: skip


def missing() -> str | None:
    """Why it cannot be measured here, or None."""
    if not (path := shutil.which("bwrap")):
        return "no bwrap on this machine (Debian: apt-get install bubblewrap)"
    trial = subprocess.run([path, *SANDBOX, "true"], capture_output=True, text=True)
    return f"bwrap does not work here: {trial.stderr.strip()}" if trial.returncode else None


def describe() -> str:
    return subprocess.run(["bwrap", "--version"], capture_output=True, text=True).stdout.strip()


def measure(scale: Scale) -> Metrics:
    """Create and first exec are one `bwrap`; so is every later exec."""

    def once(_: int) -> None:
        subprocess.run(["bwrap", *SANDBOX, "true"], check=True)

    run_threads(20, 2, once)
    sequential = run_threads(scale.sequential, 1, once)
    metrics: Metrics = {
        "create_first_exec": sequential,
        "exec_c1": sequential,
        "creates_c8": run_threads(scale.creates, 8, once),
        "exec_c8": run_threads(scale.execs, 8, once),
        "exec_c64": run_threads(scale.execs, 64, once),
    }
    metrics |= _idle(scale.idle)
    metrics["lifecycle"] = {**run_threads(scale.lifecycles, 64, lambda _: _four(once)), "success_rate": 1.0}
    return metrics


def _four(once: Callable[[int], None]) -> None:
    for number in range(4):
        once(number)


def _idle(count: int) -> Metrics:
    before = memory_available()
    command = ["bwrap", *SANDBOX, "sh", "-c", "echo up; exec sleep infinity"]
    idle = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(count)]
    for process in idle:
        assert process.stdout is not None
        process.stdout.readline()
    after = memory_available()

    def end(number: int) -> None:
        idle[number].kill()
        idle[number].wait()

    deletes = run_threads(count, 1, end)
    return {
        "idle_memory": memory_each(before, after, count),
        "delete": {key: deletes[key] for key in latency([0.0])},
    }
