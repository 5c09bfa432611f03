"""The demo's table and verdict."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from examples.demo.projects import Fault
from examples.demo.suites import Outcome

NAMES_SHOWN = 4


def print_outcomes(console: Console, outcomes: Sequence[Outcome]) -> None:
    """One row for each sandbox, then the tests that the faults broke."""
    # Within 80 columns.
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), title_justify="left")
    table.title = "Test-suites in parallel sandboxes, network blocked"
    table.add_column("#", justify="right", no_wrap=True)
    table.add_column("project", no_wrap=True)
    table.add_column("source", no_wrap=True)
    for heading in ("passed", "failed", "errors", "create\nms", "exec\ns", "peak\nMiB"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("ok?")
    for outcome in outcomes:
        table.add_row(
            str(outcome.number),
            outcome.project.name,
            "[yellow]broken[/]" if outcome.fault else "released",
            str(outcome.passed),
            f"[red]{outcome.failed}[/]" if outcome.failed else "0",
            str(outcome.errors),
            f"{outcome.create_s * 1000:.0f}",
            f"{outcome.exec_s:.1f}",
            f"{outcome.peak_memory_bytes / 2**20:.0f}" if outcome.peak_memory_bytes else "?",
            "[red]no[/]" if outcome.complaint() else "[green]yes[/]",
        )
    console.print(table)
    for outcome in outcomes:
        if outcome.fault:
            _print_failing(console, outcome, outcome.fault)


def _print_failing(console: Console, outcome: Outcome, fault: Fault) -> None:
    where = f"sandbox {outcome.number}: {outcome.project.requirement}, {fault.path} broken"
    console.print(f"\n{where}: {fault.story}", soft_wrap=True)
    for name in outcome.failing[:NAMES_SHOWN]:
        console.print(f"  FAILED {name}", markup=False, soft_wrap=True)
    if len(outcome.failing) > NAMES_SHOWN:
        console.print(f"  … and {len(outcome.failing) - NAMES_SHOWN} more")


def print_verdict(console: Console, outcomes: Sequence[Outcome]) -> bool:
    """Whether all went as it should; says what did not."""
    wrong = [outcome for outcome in outcomes if outcome.complaint()]
    for outcome in wrong:
        text = f"sandbox {outcome.number} ({outcome.project.name}): {outcome.complaint()}"
        console.print(text, style="red", markup=False, soft_wrap=True)
    return not wrong
