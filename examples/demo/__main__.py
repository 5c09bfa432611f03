"""`python -m examples.demo`: three real projects, 16 sandboxes, four of them with a broken source file.

Exits with 0 only if every suite of a released source passes entirely and every broken one fails by name.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from examples.demo.build import ImageStore, build_image, find_base
from examples.demo.downloads import DownloadError, download
from examples.demo.projects import PROJECTS, Project
from examples.demo.report import print_outcomes, print_verdict
from examples.demo.service import running_service
from examples.demo.suites import Outcome, run_suite
from orchard import AsyncSandboxClient, OrchardError

FOLDER = Path(__file__).resolve().parents[2] / ".demo"
NEXT = "Try next: .venv/bin/orchard run host -- sh -c 'id; ls /' (and then docs/tutorials/quickstart.md)"


def make_plan() -> list[Outcome]:
    """The sandboxes: of each project its share, the first of them with its faults; in mixed order."""
    plan = [
        (project, project.faults[i] if i < len(project.faults) else None)
        for project in PROJECTS
        for i in range(project.sandboxes)
    ]
    random.Random(16).shuffle(plan)
    return [Outcome(number, project, fault) for number, (project, fault) in enumerate(plan, 1)]


class Demo:
    """The stages of the demo, and the progress they show."""

    def __init__(
        self, console: Console, progress: Progress, client: AsyncSandboxClient, state_dir: Path
    ) -> None:
        self._console = console
        self._progress = progress
        self._client = client
        self._store = ImageStore(state_dir)

    def say(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    async def make_images(self, carry_python: bool) -> dict[str, str]:
        """An image for each project; their names."""
        work = FOLDER / "work"
        work.mkdir(parents=True, exist_ok=True)
        base = await find_base(self._client, self._store, work, carry_python)
        self.say(f"sandboxes use {base.python} ({base.version}) of image {base.image}")
        bars = {p.name: self._progress.add_task(f"image of {p.name}: downloading", total=5) for p in PROJECTS}

        def step(name: str, what: str) -> None:
            self._progress.update(bars[name], description=f"image of {name}: {what}", advance=1)

        async def one(project: Project) -> tuple[str, str]:
            downloads = await asyncio.to_thread(
                download, project, FOLDER / "downloads" / base.version, base.version
            )
            began = time.perf_counter()
            image = await build_image(
                self._client,
                self._store,
                base,
                project,
                downloads,
                work,
                lambda what: step(project.name, what),
            )
            step(project.name, "done")
            took_s = time.perf_counter() - began
            self.say(f"image {image}: {project.requirement}, installed in a sandbox in {took_s:.1f} s")
            return project.name, image

        return dict(await asyncio.gather(*(one(project) for project in PROJECTS)))

    async def run_suites(self, plan: list[Outcome], images: dict[str, str]) -> float:
        """All at once; the wall time in seconds."""
        bar = self._progress.add_task(f"{len(plan)} suites", total=len(plan))
        began = time.perf_counter()

        async def one(outcome: Outcome) -> None:
            name = outcome.project.name
            try:
                await run_suite(self._client, outcome, images[name], lambda _: None)
            except (OrchardError, RuntimeError) as error:
                outcome.trouble = f"{type(error).__name__}: {error}"
            self._progress.update(bar, advance=1)
            source = "broken" if outcome.fault else "as released"
            counts = f"{outcome.passed} passed, {outcome.failed} failed"
            self.say(f"sandbox {outcome.number:2}: {name}, {source}: {counts}")

        await asyncio.gather(*(one(outcome) for outcome in plan))
        return time.perf_counter() - began


async def demonstrate(console: Console, base_url: str, key: str, state_dir: Path, carry_python: bool) -> bool:
    """Runs all stages and prints what came of them; whether all went as it should."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    plan = make_plan()
    with Progress(*columns, console=console, transient=True) as progress:
        async with AsyncSandboxClient(base_url=base_url, api_key=key, cleanup=True) as client:
            demo = Demo(console, progress, client, state_dir)
            images = await demo.make_images(carry_python)
            wall_s = await demo.run_suites(plan, images)
    print_outcomes(console, plan)
    tests = sum(outcome.passed + outcome.failed + outcome.errors for outcome in plan)
    spent_s = sum(outcome.exec_s for outcome in plan)
    console.print(
        f"\n{tests} tests in {len(plan)} sandboxes: {wall_s:.1f} s of wall time, {spent_s:.0f} s of suites."
    )
    return print_verdict(console, plan)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--carry-python", action="store_true", help="use a copy of the running Python in the sandboxes"
    )
    arguments = parser.parse_args()
    console = Console()
    state_dir = FOLDER / "state"
    try:
        with running_service(state_dir) as (base_url, key):
            console.print(f"service at {base_url}, its state in {state_dir}", highlight=False)
            good = asyncio.run(demonstrate(console, base_url, key, state_dir, arguments.carry_python))
    except (DownloadError, OrchardError, RuntimeError) as error:
        console.print(f"demo failed: {error}", style="red", markup=False, soft_wrap=True)
        return 1
    if not good:
        return 1
    console.print(
        "All as it should be: the released sources pass, the broken ones fail by name.", style="green"
    )
    console.print(NEXT, markup=False, highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
