"""`orchard serve`: how it starts, what it refuses, how it stops."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conformance.runtimes import RuntimeCase
from tests.support.rest import Rest
from tests.support.service import Service
from tests.support.waiting import Stopwatch

Start = Callable[..., Service]


def serve(
    tmp_path: Path, *arguments: str, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """A service that is expected to refuse to start."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("ORCHARD_", "SANDBOX_"))} | (
        env or {}
    )
    command = [
        sys.executable,
        "-m",
        "orchard.cli.main",
        "serve",
        "--port",
        "0",
        "--state-dir",
        str(tmp_path / "s"),
    ]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, env=environment, timeout=60)


def test_it_prints_one_line_with_its_url(service: Service) -> None:
    lines = service.out_path.read_text().splitlines()
    assert len(lines) == 1
    assert re.search(r"http://127\.0\.0\.1:\d+", lines[0])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_stops_cleanly_on_a_signal(own_service: Start, number: int) -> None:
    service = own_service()
    service.rest.create("host").start("sleep 300")
    service.process.send_signal(number)
    assert service.process.wait(60) == 0
    assert "Traceback" not in service.log()


def test_it_stops_although_somebody_waits(own_service: Start) -> None:
    from concurrent.futures import ThreadPoolExecutor

    service = own_service()
    box = service.rest.create("host")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(box.post_exec, "sleep 300", wait=True)
        from tests.support.waiting import eventually

        eventually(lambda: service.rest.get(f"{box.path}/jobs").expect(200)["jobs"], "the command is there")
        watch = Stopwatch()
        assert service.stop() == 0
        assert watch.seconds < 60
        error = waiting.exception(60)
        assert error is not None or waiting.result().status in (200, 503)


def test_without_a_key_it_listens_on_loopback_only(tmp_path: Path) -> None:
    done = serve(tmp_path, "--host", "0.0.0.0")
    assert done.returncode != 0
    assert "--api-key" in done.stderr + done.stdout
    assert "Traceback" not in done.stderr


def test_without_a_key_on_loopback_nobody_needs_one(own_service: Start) -> None:
    service = own_service(api_key=None)
    assert Rest(service.base_url, None).get("/resources").status == 200


def test_keys_may_come_from_the_environment(
    runtime: RuntimeCase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [
        sys.executable,
        "-m",
        "orchard.cli.main",
        "serve",
        "--port",
        "0",
        "--state-dir",
        str(tmp_path / "s"),
    ]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("ORCHARD_", "SANDBOX_"))}
    environment["ORCHARD_API_KEYS"] = "one-key,two-key"
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    )
    try:
        assert process.stdout is not None
        found = re.search(r"http://\S+:\d+", process.stdout.readline())
        assert found
        statuses = [
            Rest(found[0], key).get("/sandboxes").status for key in ("one-key", "two-key", "three-key")
        ]
        assert statuses == [200, 200, 401]
    finally:
        process.terminate()
        assert process.wait(60) == 0


@pytest.mark.parametrize(
    "arguments",
    [("--runtime", "nonsense"), ("--port", "99999"), ("--max-starting", "0"), ("--keys-file", "/no/such/file"),
     ("--api-key", "")],
)  # fmt: skip
def test_senseless_arguments_are_refused_with_what_to_do(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    done = serve(tmp_path, *arguments)
    assert done.returncode != 0
    assert done.stderr.strip()
    assert "Traceback" not in done.stderr


def test_a_port_in_use_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = serve(tmp_path, "--port", port, "--api-key", "k")
    assert done.returncode != 0
    assert port in done.stderr
    assert "Traceback" not in done.stderr


def test_a_malformed_keys_file_is_refused_and_no_key_is_shown(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text('[{"owner": "a", "hash": "swordfish"}]')
    done = serve(tmp_path, "--keys-file", str(keys))
    assert done.returncode != 0
    assert "swordfish" not in done.stderr


def test_the_state_directory_is_private(service: Service) -> None:
    assert service.state_dir.stat().st_mode & 0o077 == 0


def test_the_key_is_not_in_the_state_directory(service: Service) -> None:
    assert service.api_key
    for path in service.state_dir.rglob("*"):
        if path.is_file() and "sandboxes" not in path.parts and path.stat().st_size < 50_000_000:
            assert service.api_key.encode() not in path.read_bytes(), path


def test_a_full_disk_is_told_not_hidden(runtime: RuntimeCase, tmp_path: Path) -> None:
    """The state directory on a small file system that fills: the service answers with errors, not with silence."""
    mount = tmp_path / "small"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "none", str(mount)], check=True)
    service = Service(mount / "state", arguments=runtime.serve_arguments)
    try:
        service.start()
        box = service.rest.create("host")
        answers = [
            box.post_exec("head -c 40000000 /dev/zero > /tmp/f; rm -f /tmp/f; echo ran", wait=True)
            for _ in range(2)
        ]
        assert all(answer.status in (200, 503, 507) for answer in answers), answers
        (mount / "fill").write_bytes(b"")
        with pytest.raises(OSError), (mount / "fill").open("wb") as fill:
            while True:
                fill.write(bytes(1 << 16))
                fill.flush()
        answer = box.post_exec("echo with a full disk", wait=True)
        assert answer.status in (200, 503, 507), answer
        assert service.rest.get("/health").status == 200
        (mount / "fill").unlink()
        assert box.out("echo with space again") == "with space again\n"
        service.delete_all()
    finally:
        service.stop()
        subprocess.run(["umount", "-l", str(mount)], check=True)
