"""Runs one test-suite in one sandbox and reads what came of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from xml.etree import ElementTree

from examples.demo.projects import Fault, Project
from orchard import AsyncSandboxClient
from orchard.env.client import AsyncSandbox

#: Where the images have the project and its virtual environment.
SUITE = "/suite"
REPORT = "/tmp/report.xml"
MEMORY = "1Gi"
SUITE_TIMEOUT_S = 900


@dataclass(slots=True)
class Outcome:
    """One sandbox and its suite. Times in seconds, memory in bytes; `trouble` is set when it did not run."""

    number: int
    project: Project
    fault: Fault | None
    passed: int = 0
    failed: int = 0
    errors: int = 0
    skipped: int = 0
    failing: list[str] = field(default_factory=list)
    create_s: float = 0.0
    exec_s: float = 0.0
    peak_memory_bytes: int | None = None
    trouble: str = ""

    def complaint(self) -> str:
        """Why this is not what it should be; empty if it is."""
        if self.trouble:
            return self.trouble
        if not self.passed:
            return "no test passed"
        if self.fault is None:
            return f"{self.failed} failed, {self.errors} errors: {self.failing[:3]}" if self.failing else ""
        if not any(self.fault.breaks in name for name in self.failing):
            return f"no {self.fault.breaks} among the failing tests {self.failing[:3]}"
        return ""


async def run_suite(
    client: AsyncSandboxClient, outcome: Outcome, image: str, step: Callable[[str], None]
) -> None:
    """Creates a sandbox, breaks it if it is to be broken, runs the suite, fills `outcome`, deletes it."""
    began = time.perf_counter()
    sandbox = await client.create(image, memory=MEMORY, block_network=True, labels={"demo": "suite"})
    outcome.create_s = time.perf_counter() - began
    try:
        root = f"{SUITE}/{outcome.project.name}"
        if outcome.fault:
            await _break(sandbox, f"{root}/{outcome.fault.path}", outcome.fault)
        step("testing")
        await _test(sandbox, root, outcome)
        outcome.peak_memory_bytes = (await sandbox.stats()).peak_memory_bytes
    finally:
        await sandbox.delete()


async def _break(sandbox: AsyncSandbox, path: str, fault: Fault) -> None:
    source = (await sandbox.files.read(path)).decode()
    if source.count(fault.old) != 1:
        raise RuntimeError(f"{path} does not hold {fault.old!r} once: the fault belongs to another version")
    await sandbox.files.write(path, source.replace(fault.old, fault.new).encode())


async def _test(sandbox: AsyncSandbox, root: str, outcome: Outcome) -> None:
    command = [
        f"{SUITE}/venv/bin/python",
        "-m",
        "pytest",
        "-q",
        "--junitxml",
        REPORT,
        *outcome.project.arguments,
    ]
    job = await sandbox.exec(
        command,
        cwd=root,
        timeout_s=SUITE_TIMEOUT_S,
        # With it hypothesis draws the same examples every time, without deadlines: the cores are shared.
        env={"CI": "true"},
    )
    outcome.exec_s = job.duration_seconds or 0.0
    # pytest's exit codes: 0 all passed, 1 some failed; anything else means that it did not get that far.
    if job.exit_code not in (0, 1) or job.timed_out:
        end = (job.stdout + job.stderr).strip()[-2000:]
        how = (
            "timed out"
            if job.timed_out
            else "out of memory"
            if job.oom_killed
            else f"exit code {job.exit_code}"
        )
        outcome.trouble = f"pytest did not run to its end: {how}\n{end}"
        return
    read_report(await sandbox.files.read(REPORT), outcome)


def read_report(xml: bytes, outcome: Outcome) -> None:
    """Counts and failing names from pytest's JUnit report."""
    for case in ElementTree.fromstring(xml).iter("testcase"):
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            outcome.failing.append(f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}")
            outcome.failed += "failure" in kinds
            outcome.errors += "error" in kinds
        elif "skipped" in kinds:
            outcome.skipped += 1
        else:
            outcome.passed += 1
