"""The audit log: what gets a line, what is in it, and a file that cannot be written."""

from __future__ import annotations

import json
import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchard.env.errors import SettingsError
from orchard.env.orchestrator.audit import AuditLog
from orchard.env.orchestrator.metrics import Metrics
from tests.env.orchestrator.asgi import Caller
from tests.env.orchestrator.conftest import KEYS, Running, Start


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "audit.jsonl"


@pytest.fixture
async def running(start: Start, file: Path) -> Running:
    return await start(audit_log=file)


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in content(file).splitlines()]


def content(file: Path) -> str:
    return file.read_text()


async def test_a_change_leaves_a_line_with_who_what_and_how_it_ended(running: Running, file: Path) -> None:
    await running.caller("alice").ready("box")
    (line,) = lines(file)
    assert line.pop("time") > 1e9
    assert line.pop("request_id")
    assert line == {
        "owner": "alice", "role": "user", "method": "POST", "path": "/sandboxes", "sandbox_id": "box", "status": 200,
        "client": "127.0.0.1",
    }  # fmt: skip


async def test_reading_leaves_no_line(running: Running, file: Path) -> None:
    await running.call.get("/sandboxes")
    await running.call.get("/nowhere")
    await running.caller(None).get("/health")
    assert lines(file) == []


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_refused_key_leaves_a_line_without_the_key(running: Running, file: Path, method: str) -> None:
    await Caller(running.call.app, "stolen-key")(method, "/sandboxes?api_key=stolen-key")
    (line,) = lines(file)
    assert (line["owner"], line["status"], line["path"]) == (None, 401, "/sandboxes")
    assert "stolen-key" not in content(file)


async def test_what_was_refused_for_another_reason_has_its_status_and_owner(
    running: Running, file: Path
) -> None:
    (await running.caller("bob").delete("/sandboxes/hers")).expect(404)
    (line,) = lines(file)
    assert (line["owner"], line["method"], line["sandbox_id"], line["status"]) == (
        "bob",
        "DELETE",
        "hers",
        404,
    )


async def test_a_batch_names_all_that_it_made(running: Running, file: Path) -> None:
    entries = [{"image": "x", "sandbox_id": name} for name in ("a", "b")]
    (await running.call.post("/sandboxes/batch", {"sandboxes": entries})).expect()
    assert lines(file)[0]["sandbox_ids"] == ["a", "b"]


async def test_bodies_and_keys_are_in_no_line(running: Running, file: Path) -> None:
    box = await running.caller("alice").ready()
    await running.caller("alice").run(box, "echo password-of-mine", env={"TOKEN": "t0ken"})
    text = content(file)
    assert len(lines(file)) == 2
    assert [word for word in ("password-of-mine", "t0ken", *KEYS.values()) if word in text] == []


def test_the_file_is_private_and_appended_to(file: Path) -> None:
    file.write_text('{"earlier": 1}\n')
    file.chmod(0o644)
    log = AuditLog(file, Metrics())
    log._write(b"{}\n")
    log.close()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert lines(file) == [{"earlier": 1}, {}]


async def test_a_full_disk_fails_no_request_and_is_counted(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    running = await start(audit_log=Path("/dev/full"))
    await running.call.ready("one")
    await running.call.ready("two")
    text = (await running.call.get("/metrics")).body.decode()
    assert "orchard_audit_lines_lost_total 2.0" in text
    assert [record.levelname for record in caplog.records if "audit log" in record.message] == ["ERROR"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of two pages."""
    place = tmp_path / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8k", "none", str(place)], check=True)
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_line_that_was_cut_short_swallows_no_later_one(small_disk: Path) -> None:
    """The disk fills up in the middle of a line, and has room again later."""
    (small_disk / "filler").write_bytes(bytes(4096))
    metrics = Metrics()
    log = AuditLog(small_disk / "audit", metrics)
    log._write(b'{"cut": "' + b"x" * 5000 + b'"}\n')
    assert (small_disk / "audit").stat().st_size == 4096
    (small_disk / "filler").unlink()
    log._write(b'{"later": 1}\n')
    log.close()
    assert (small_disk / "audit").read_text().splitlines()[-1] == '{"later": 1}'
    assert b"orchard_audit_lines_lost_total 1.0" in metrics.text()


def test_a_pipe_that_nobody_reads_does_not_hold_the_service(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(SettingsError, match="audit log"):
        AuditLog(pipe, Metrics())


def test_a_place_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="no-such"):
        AuditLog(tmp_path / "no-such" / "audit", Metrics())


def test_a_file_that_was_moved_away_is_made_anew(file: Path, tmp_path: Path) -> None:
    log = AuditLog(file, Metrics())
    log._write(b"{}\n")
    file.rename(tmp_path / "old")
    log.reopen()
    log._write(b'{"new": 1}\n')
    log.close()
    assert lines(file) == [{"new": 1}]
    assert lines(tmp_path / "old") == [{}]


async def test_without_a_file_nothing_is_written(start: Start, tmp_path: Path) -> None:
    running = await start()
    await running.call.ready()
    assert running.orchestrator.audit is None
