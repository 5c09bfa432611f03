"""`doctor` on this machine as it is, and with things taken away from it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import environment

pytestmark = pytest.mark.xdist_group("cli")


def examine(state_dir: Path, *wrapper: str, **env: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """The exit code, and the checks by name."""
    command = [*wrapper, sys.executable, "-m", "orchard", "doctor", "--json", "--state-dir", str(state_dir)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(**env), timeout=120)
    report = json.loads(done.stdout)
    assert report["local_runtime_works"] is (done.returncode == 0), done.stderr
    return done.returncode, {check["name"]: check for check in report["checks"]}


def test_this_machine_works_as_the_service_shows(tmp_path: Path) -> None:
    # The other tests of this folder run sandboxes here.
    code, checks = examine(tmp_path / "state")
    assert code == 0
    for name in (
        "root",
        "namespaces",
        "user namespaces",
        "overlayfs",
        "seccomp",
        "cgroup2",
        "blocked network",
        "egress lists",
    ):
        assert checks[name]["status"] == "ok", checks[name]
    assert list(tmp_path.iterdir()) == []


def test_whatever_is_not_fine_comes_with_a_hint(tmp_path: Path) -> None:
    _, checks = examine(tmp_path, PATH="/nonexistent")
    assert checks["open network"]["status"] == "weak"
    assert checks["image registries"]["status"] == "weak"
    assert "apt install skopeo" in checks["image registries"]["hint"]
    assert all(check["hint"] for check in checks.values())


def test_without_the_right_to_make_namespaces_it_does_not_work(tmp_path: Path) -> None:
    if shutil.which("setpriv") is None:
        pytest.skip("needs setpriv (util-linux)")
    code, checks = examine(tmp_path, "setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin")
    assert code == 1
    assert checks["namespaces"]["status"] == "missing"
    assert "not permitted" in checks["namespaces"]["detail"]
    assert checks["overlayfs"]["status"] == "missing"
    assert checks["seccomp"]["status"] == "ok"


def test_root_of_a_container_without_id_ranges_does_not_do(tmp_path: Path) -> None:
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare (util-linux)")
    code, checks = examine(tmp_path, "unshare", "--user", "--map-root-user")
    assert code == 1
    assert checks["root"]["status"] == "ok"
    assert checks["user namespaces"]["status"] == "missing"


def test_few_open_files_are_weak(tmp_path: Path) -> None:
    if shutil.which("prlimit") is None:
        pytest.skip("needs prlimit (util-linux)")
    code, checks = examine(tmp_path, "prlimit", "--nofile=256:256")
    assert code == 0
    assert checks["open files"]["status"] == "weak"
