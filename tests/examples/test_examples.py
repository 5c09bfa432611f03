"""The examples do what they say, against a real service; the README shows the very same code."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.service import Service

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="of the local runtime as root")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    server = Service(tmp_path_factory.mktemp("examples") / "state").start()
    yield server
    server.delete_all()
    assert server.stop() == 0, server.log()


def run_example(name: str, service: Service) -> list[str]:
    """The lines it prints; it must end well."""
    result = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name)],
        env={**os.environ, "ORCHARD_BASE_URL": service.base_url, "ORCHARD_API_KEY": str(service.api_key)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_quickstart_runs_commands_and_survives_a_timeout(service: Service) -> None:
    assert run_example("quickstart.py", service) == ["0 2", "two pears", "True before"]


def test_many_counts_in_twenty_sandboxes(service: Service) -> None:
    lines = run_example("many.py", service)
    assert [line.split()[0] for line in lines] == [str(number) for number in range(1, 21)]


def test_patch_and_test_repairs_the_program(service: Service) -> None:
    assert run_example("patch_and_test.py", service) == ["before: failed", "patched: True", "after: passed"]
