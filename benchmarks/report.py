"""The table: a row for each figure, a column for each tool."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.targets import TARGETS

ROWS = (
    ("create → first exec", "create_first_exec", ("p50_ms", "p99_ms")),
    ("creates at concurrency 8", "creates_c8", ("per_s", "p50_ms", "p99_ms")),
    ("exec of true, one at a time", "exec_c1", ("p50_ms", "p99_ms", "per_s")),
    ("exec of true, 8 at a time", "exec_c8", ("p50_ms", "p99_ms", "per_s")),
    ("exec of true, 64 at a time", "exec_c64", ("p50_ms", "p99_ms", "per_s")),
    ("delete", "delete", ("p50_ms", "p99_ms")),
    ("memory of an idle sandbox", "idle_memory", ("mib_each", "n")),
    ("create, 4 commands, delete", "lifecycle", ("n", "wall_s", "success_rate")),
    ("bare posix_spawn of true", "spawn", ("p50_ms", "p99_ms")),
    ("agent: exec of true", "agent_exec", ("p50_ms", "p99_ms")),
    ("agent over bare spawn", "agent_over_spawn", ("p50_ms",)),
    ("agent: proportional memory", "agent_memory", ("pss_mib",)),
)
UNITS = {
    "p50_ms": "p50 ms", "p99_ms": "p99 ms", "per_s": "per s", "mib_each": "MiB", "n": "sandboxes",
    "wall_s": "wall s", "success_rate": "success", "pss_mib": "MiB",
}  # fmt: skip


def _text(field: str, value: Any) -> str:
    if value is None:
        return "—"
    return f"{value:.1%}" if field == "success_rate" else f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"


def print_table(console: Console, document: dict[str, Any]) -> None:
    """All figures, the targets and whether they were met, and what is missing and why."""
    results = document["results"]
    table = Table(
        title=f"{document['machine']['cores']} cores, {document['machine']['cpu']}", title_justify="left"
    )
    table.add_column("figure")
    table.add_column("unit")
    for tool in results:
        table.add_column(tool, justify="right")
    table.add_column("target", justify="right")
    for title, metric, fields in ROWS:
        for number, field in enumerate(fields):
            values = [_text(field, metrics.get(metric, {}).get(field)) for metrics in results.values()]
            if any(value != "—" for value in values):
                table.add_row(
                    title if not number else "", UNITS[field], *values, _target(metric, field, results)
                )
        table.add_section()
    console.print(table)
    for tool, reason in document["missing"].items():
        console.print(f"missing: {tool}: {reason}", style="yellow", markup=False)


def _target(metric: str, field: str, results: dict[str, Any]) -> str:
    for target in TARGETS:
        if (target.metric, target.field) == (metric, field):
            met = target.met(results)
            return f"{target} " + {True: "[green]met[/]", False: "[red]missed[/]", None: "?"}[met]
    return ""
