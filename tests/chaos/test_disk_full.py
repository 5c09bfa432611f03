"""The service's disk runs full, and has room again."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance.conftest import end_and_check
from tests.conformance.runtimes import RUNTIMES
from tests.support.rest import Box, new_id
from tests.support.service import Service


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own."""
    place = tmp_path / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m", "orchard-test", place], check=True)
    yield place
    subprocess.run(["umount", "-l", place], check=True)


@pytest.fixture
def service(disk: Path, tmp_path: Path) -> Iterator[Service]:
    runtime = RUNTIMES["local"]
    running = Service(disk / "state", arguments=runtime.serve_arguments, logs=tmp_path).start()
    yield running
    (disk / "filler").unlink(missing_ok=True)
    end_and_check(running, runtime)


def fill(disk: Path) -> None:
    with (disk / "filler").open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue


def test_what_could_not_be_created_can_be_created_under_the_same_id_later(
    service: Service, disk: Path
) -> None:
    names = [new_id("full") for _ in range(30)]
    fill(disk)
    answers = {name: service.rest.post("/sandboxes", {"image": "host", "sandbox_id": name}) for name in names}
    refused = [name for name, answer in answers.items() if answer.status != 200]
    assert refused, "the disk was full"
    assert {answers[name].status for name in refused} <= {503, 507}
    assert all("retry-after" in answers[name].headers for name in refused if answers[name].status == 503)
    (disk / "filler").unlink()
    for name in refused:
        service.rest.post("/sandboxes", {"image": "host", "sandbox_id": name}).expect(200)
        assert Box(service.rest, name).wait_ready()["status"] == "ready"


def test_results_are_told_when_they_are_stored(service: Service, disk: Path) -> None:
    box = service.rest.create("host")
    fill(disk)
    # Enough of them to want new pages of the database.
    jobs = [new_id("job") for _ in range(40)]
    told = {}
    for job in jobs:
        answer = box.post_exec(
            ["/bin/sh", "-c", "head -c 5000 /dev/zero | tr '\\0' x"], job_id=job, wait=True
        )
        assert answer.status in (200, 503, 507), answer
        told[job] = answer.status == 200
    assert not all(told.values()), "the disk was full"
    (disk / "filler").unlink()
    for job in jobs:
        again = box.post_exec(["/bin/sh", "-c", "head -c 5000 /dev/zero | tr '\\0' x"], job_id=job, wait=True)
        assert again.expect(200)["stdout"] == "x" * 5000
    service.kill()
    service.start()
    for job in jobs:
        assert service.rest.job(job)["stdout"] == "x" * 5000
