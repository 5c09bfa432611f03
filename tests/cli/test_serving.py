"""`serve`, the service that `run` embeds, `images` and `doctor`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.cli.conftest import environment, run_cli
from tests.support.machine import children, pids_with_argument
from tests.support.service import Service
from tests.support.waiting import eventually

pytestmark = pytest.mark.xdist_group("cli")


def test_serve_prints_one_line_and_stops_on_sigint(tmp_path: Path) -> None:
    server = Service(tmp_path / "state").start()
    assert len(server.out_path.read_text().splitlines()) == 1
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(30) == 0


def test_serve_refuses_what_it_cannot_do_in_words(tmp_path: Path) -> None:
    open_to_all = run_cli("serve", "--host", "0.0.0.0", "--state-dir", str(tmp_path), env=environment())
    assert open_to_all.returncode == 1
    assert "--api-key" in open_to_all.stderr
    assert "Traceback" not in open_to_all.stderr


def test_run_embeds_a_service_for_its_own_lifetime(alone: dict[str, str], tmp_path: Path) -> None:
    own = str(tmp_path / "state")
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    env = {**alone, "TMPDIR": str(temporary)}
    done = run_cli("run", "host", "--state-dir", own, "--", "sh", "-c", "echo embedded; exit 9", env=env)
    assert (done.stdout, done.returncode) == ("embedded\n", 9), done.stderr
    assert not list(temporary.iterdir())


def _start_run(tmp_path: Path, alone: dict[str, str], mark: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "orchard", "run", "host", "--state-dir", str(tmp_path / "state")]
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    return subprocess.Popen(
        [*command, "--", "sleep", mark],
        env={**alone, "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_an_interrupted_run_leaves_nothing(
    alone: dict[str, str], tmp_path: Path, number: signal.Signals, code: int
) -> None:
    mark = f"{40_000 + number}.{os.getpid()}"
    running = _start_run(tmp_path, alone, mark)
    eventually(
        lambda: [pid for pid in pids_with_argument(mark) if pid != running.pid], "the command runs", 60
    )
    (service,) = children(running.pid)
    running.send_signal(number)
    assert running.wait(60) == code
    eventually(lambda: not pids_with_argument(mark), "the command is gone", 30)
    eventually(lambda: not Path(f"/proc/{service}").exists(), "the service is gone", 30)
    eventually(lambda: not list((tmp_path / "tmp").iterdir()), "its state is gone", 30)


def test_images_and_a_run_of_one(alone: dict[str, str], tmp_path: Path) -> None:
    state = ["--state-dir", str(tmp_path / "state")]
    busybox = Path("/bin/busybox")
    if not busybox.exists():
        pytest.skip("needs busybox-static")
    archive = tmp_path / "small.tar"
    with tarfile.open(archive, "w") as tar:
        tar.add(busybox, "bin/busybox")
    done = run_cli("images", "import", str(archive), "--name", "small", *state, env=alone)
    assert done.returncode == 0, done.stderr
    listed = json.loads(run_cli("images", "list", "--json", *state, env=alone).stdout)
    assert [each["name"] for each in listed] == ["host", "small:latest"]
    ran = run_cli("run", "small", *state, "--", "/bin/busybox", "echo", "from small", env=alone)
    assert ran.stdout == "from small\n", ran.stderr
    assert run_cli("images", "rm", "small", *state, env=alone).returncode == 0
    gone = run_cli("images", "rm", "small", *state, env=alone)
    assert gone.returncode == 1
    assert "small" in gone.stderr
    assert "freed_bytes" in json.loads(run_cli("images", "prune", "--json", *state, env=alone).stdout)
