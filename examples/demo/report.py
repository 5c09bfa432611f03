"""The demo's table and verdict."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from examples.demo.suites import Outcome

NAMES_SHOWN = 4


def print_outcomes(console: Console, outcomes: Sequence[Outcome]) -> None:
    """One row for each sandbox, then the tests that the faults broke."""
    table = Table(title="Test-suites in parallel sandboxes, network blocked", title_justify="left")
    table.add_column("#", justify="right")
    table.add_column("project")
    table.add_column("source")
    for heading in ("passed", "failed", "errors", "skipped", "create", "exec", "peak memory"):
        table.add_column(heading, justify="right")
    table.add_column("as it should be")
    for outcome in outcomes:
        table.add_row(
            str(outcome.number),
            outcome.project.requirement,
            f"[yellow]broken: {outcome.fault.story}[/]" if outcome.fault else "as released",
            str(outcome.passed),
            f"[red]{outcome.failed}[/]" if outcome.failed else "0",
            str(outcome.errors),
            str(outcome.skipped),
            f"{outcome.create_s * 1000:.0f} ms",
            f"{outcome.exec_s:.1f} s",
            f"{outcome.peak_memory_bytes / 2**20:.0f} MiB" if outcome.peak_memory_bytes else "?",
            "[red]no[/]" if outcome.complaint() else "[green]yes[/]",
        )
    console.print(table)
    for outcome in outcomes:
        if outcome.fault:
            _print_failing(console, outcome)


def _print_failing(console: Console, outcome: Outcome) -> None:
    console.print(
        f"\nsandbox {outcome.number}, {outcome.project.name} with {outcome.fault.path} broken:", markup=False
    )
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
