"""crun, Debian's OCI runtime: one container for each sandbox, `crun exec` for each command in it.

Namespaces as for our sandboxes but the user's; a memory and pids cgroup; the root file system is busybox,
read-only, with a tmpfs at /tmp. No seccomp filter.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.samples import Metrics, latency, memory_available, memory_each, run_threads
from benchmarks.scale import QUICK, Scale

NAME = "crun"
HYBRID = Path("/sys/fs/cgroup/unified")
#: crun refuses to work where cgroup v2 is mounted beside v1: it gets a view of the machine without v2.
WITHOUT_HYBRID = (
    "unshare",
    "--mount",
    "--propagation",
    "private",
    "sh",
    "-c",
    f'umount {HYBRID}; exec "$@"',
    "sh",
)


def missing() -> str | None:
    """Why it cannot be measured here, or None."""
    if not shutil.which("crun"):
        return "no crun on this machine (Debian: apt-get install crun)"
    if not shutil.which("busybox"):
        return "no busybox for its root file system (Debian: apt-get install busybox-static)"
    if os.geteuid() != 0:
        return "it needs root here"
    trial = _apart(dataclasses.replace(QUICK, sequential=3, idle=1, execs=8, lifecycles=1))
    return f"crun does not work here: {trial.stderr.strip()[-300:]}" if trial.returncode else None


def describe() -> str:
    return subprocess.run(["crun", "--version"], capture_output=True, text=True).stdout.partition("\n")[0]


def measure(scale: Scale) -> Metrics:
    result = _apart(scale)
    if result.returncode:
        raise RuntimeError(f"crun failed:\n{result.stderr.strip()[-3000:]}")
    metrics: Metrics = json.loads(result.stdout)
    return metrics


def _apart(scale: Scale) -> subprocess.CompletedProcess[str]:
    """Measures in a process of its own, which sees what crun must see."""
    view = WITHOUT_HYBRID if HYBRID.is_mount() else ()
    command = [*view, sys.executable, "-m", "benchmarks.peers.crun", json.dumps(dataclasses.asdict(scale))]
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)


class Crun:
    """A bundle, and the containers started from it."""

    def __init__(self, folder: Path) -> None:
        self._bundle = folder / "bundle"
        self._crun = ["crun", "--root", str(folder / "state"), "--cgroup-manager", "cgroupfs"]
        binaries = self._bundle / "rootfs" / "bin"
        binaries.mkdir(parents=True)
        shutil.copy(shutil.which("busybox") or "busybox", binaries / "busybox")
        for name in ("true", "sleep", "sh"):
            (binaries / name).symlink_to("busybox")
        for name in ("proc", "sys", "dev", "tmp"):
            (self._bundle / "rootfs" / name).mkdir()
        subprocess.run(["crun", "spec"], cwd=self._bundle, check=True, capture_output=True)
        config = self._bundle / "config.json"
        config.write_text(json.dumps(self._spec(json.loads(config.read_text()))))

    @staticmethod
    def _spec(spec: dict[str, Any]) -> dict[str, Any]:
        spec["process"] |= {"terminal": False, "args": ["sleep", "1000000"]}
        spec["mounts"] = [mount for mount in spec["mounts"] if mount["destination"] != "/sys/fs/cgroup"]
        spec["mounts"].append(
            {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs", "options": ["size=64m"]}
        )
        spec["linux"]["resources"] = {"memory": {"limit": 512 << 20}, "pids": {"limit": 256}}
        return spec

    def _call(self, *arguments: str) -> None:
        # Containers keep the descriptors they are given: a pipe here would wait for their end.
        quiet = subprocess.DEVNULL
        subprocess.run([*self._crun, *arguments], check=True, stdin=quiet, stdout=quiet)

    def start(self, name: str) -> None:
        self._call("run", "--detach", "--bundle", str(self._bundle), name)

    def run_true(self, name: str) -> None:
        self._call("exec", name, "/bin/true")

    def delete(self, name: str) -> None:
        self._call("delete", "--force", name)


def _measure(crun: Crun, scale: Scale) -> Metrics:
    metrics: Metrics = {}

    def first(number: int) -> None:
        crun.start(f"seq{number}")
        crun.run_true(f"seq{number}")

    count = scale.sequential // 3
    metrics["create_first_exec"] = run_threads(count, 1, first)
    deletes = run_threads(count, 1, lambda number: crun.delete(f"seq{number}"))
    metrics["delete"] = {key: deletes[key] for key in latency([0.0])}

    before = memory_available()
    idle = min(scale.idle, 200)
    metrics["creates_c8"] = run_threads(idle, 8, lambda number: crun.start(f"box{number}"))
    metrics["idle_memory"] = memory_each(before, memory_available(), idle)
    for concurrency in (1, 8, 64):
        execs = scale.execs // (8 if concurrency == 1 else 4)
        metrics[f"exec_c{concurrency}"] = run_threads(
            execs, concurrency, lambda number: crun.run_true(f"box{number % idle}")
        )
    run_threads(idle, 8, lambda number: crun.delete(f"box{number}"))

    def live(number: int) -> None:
        crun.start(f"live{number}")
        for _ in range(4):
            crun.run_true(f"live{number}")
        crun.delete(f"live{number}")

    lives = min(scale.lifecycles, 200)
    metrics["lifecycle"] = {**run_threads(lives, 64, live), "success_rate": 1.0}
    return metrics


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="bench-crun-") as folder:
        print(json.dumps(_measure(Crun(Path(folder)), Scale(**json.loads(sys.argv[1])))))


if __name__ == "__main__":
    main()
