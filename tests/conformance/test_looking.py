"""Stats and logs of a sandbox, and the metrics of the service."""

from __future__ import annotations

import re

import pytest

from tests.conformance.conftest import NewBox
from tests.support.rest import Box, Rest
from tests.support.waiting import eventually

MIB = 1 << 20


def stats(box: Box) -> dict:  # type: ignore[type-arg]
    return box.rest.get(f"{box.path}/stats").expect(200)


def test_stats_tell_use_and_limits(new_box: NewBox) -> None:
    box = new_box(memory="256Mi", pids=100, disk="64Mi", cpu="1")
    seen = stats(box)
    assert (seen["sandbox_id"], seen["memory_limit_bytes"], seen["pids_limit"]) == (box.id, 256 * MIB, 100)
    assert seen["disk_limit_bytes"] == 64 * MIB
    assert seen.keys() >= {
        "cpu_seconds",
        "memory_bytes",
        "peak_memory_bytes",
        "pids",
        "disk_bytes",
        "oom_kills",
    }


def test_stats_count_processor_time(fresh: Box) -> None:
    before = stats(fresh)["cpu_seconds"]
    fresh.python("import time\nt=time.process_time()\nwhile time.process_time()-t<0.5: pass")
    assert 0.3 < stats(fresh)["cpu_seconds"] - before < 10


@pytest.mark.unprivileged
def test_stats_count_processes(fresh: Box) -> None:
    before = stats(fresh)["pids"]
    fresh.out("for i in 1 2 3 4 5; do sleep 60 & done; exit 0")
    eventually(lambda: stats(fresh)["pids"] == before + 5, "five more processes")


def test_stats_remember_the_peak_of_memory(new_box: NewBox) -> None:
    box = new_box(memory="512Mi")
    box.python("x=bytearray(100<<20)")
    seen = stats(box)
    assert 100 * MIB <= seen["peak_memory_bytes"] < 400 * MIB
    assert seen["memory_bytes"] < seen["peak_memory_bytes"]


@pytest.mark.unprivileged
def test_stats_count_the_disk(new_box: NewBox) -> None:
    box = new_box(disk="64Mi")
    before = stats(box)["disk_bytes"]
    box.out("head -c 20971520 /dev/urandom > /tmp/f")
    assert 20 * MIB <= stats(box)["disk_bytes"] - before < 24 * MIB


def test_stats_count_kills_for_memory(new_box: NewBox) -> None:
    box = new_box(memory="64Mi")
    assert stats(box)["oom_kills"] == 0
    box.python("x=bytearray(10**9)")
    assert stats(box)["oom_kills"] >= 1


def test_logs_tell_the_life_of_a_sandbox(fresh: Box) -> None:
    lines = fresh.rest.get(f"{fresh.path}/logs").expect(200)["lines"]
    assert lines
    assert all(line.keys() >= {"time", "source", "message"} for line in lines)
    assert {line["source"] for line in lines} <= {"agent", "lifecycle"}
    assert any("ready" in line["message"] for line in lines)


def test_logs_do_not_hold_the_commands_input_or_environment(fresh: Box) -> None:
    fresh.run("cat", stdin="swordfish-input", env={"SECRET": "swordfish-variable"})
    assert "swordfish" not in fresh.rest.get(f"{fresh.path}/logs").body.decode()


def test_metrics_count_sandboxes_and_commands(rest: Rest, fresh: Box) -> None:
    def total() -> float:
        text = rest.get("/metrics").body.decode()
        return sum(float(v) for v in re.findall(r"^orchard_\w*(?:jobs|exec|commands)\w*_total(?:\{[^}]*\})? ([\d.e+]+)$",
                                                text, re.MULTILINE))  # fmt: skip

    before = total()
    fresh.run("true")
    assert total() > before


def test_metrics_hold_no_ids(rest: Rest, fresh: Box) -> None:
    """Ids as label values would grow without bound."""
    fresh.run("true")
    assert fresh.id not in rest.get("/metrics").body.decode()


def test_metrics_tell_the_sizes_of_files(rest: Rest, fresh: Box) -> None:
    def small(direction: str) -> float:
        name = f'orchard_file_bytes_bucket{{direction="{direction}",le="8192.0"}} '
        return float(rest.get("/metrics").body.decode().split(name)[1].split("\n")[0])

    before = {direction: small(direction) for direction in ("in", "out")}
    fresh.write("/tmp/file", b"x" * 5000)
    fresh.read("/tmp/file")
    fresh.write("/tmp/large", b"x" * 9000)
    assert {direction: small(direction) for direction in before} == {
        "in": before["in"] + 1,
        "out": before["out"] + 1,
    }
