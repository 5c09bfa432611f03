"""The table: a row for each figure, a column for each tool.

`python -m benchmarks.report RESULT.json` puts the table of a result into benchmarks/README.md.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
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
    ("tunnel round trip, one connection", "tunnel_c1", ("p50_ms", "p99_ms", "per_s")),
    ("tunnel round trip, 8 connections", "tunnel_c8", ("p50_ms", "p99_ms", "per_s")),
    ("the same, a new connection for each", "tunnel_new_c8", ("p50_ms", "p99_ms", "per_s")),
    ("without a tunnel, one connection", "direct_c1", ("p50_ms", "per_s")),
    ("without a tunnel, 8 connections", "direct_c8", ("p50_ms", "per_s")),
    ("the same, a new connection for each", "direct_new_c8", ("p50_ms", "per_s")),
    ("output as raw bytes, one reader", "raw_stream", ("mb_per_s", "mib")),
    ("output as events", "sdk_stream", ("mb_per_s", "mib")),
    ("a file out of a sandbox", "file_down", ("mb_per_s", "mib")),
    ("a file into a sandbox", "file_up", ("mb_per_s", "mib")),
    ("opening 500 terminals, 16 at a time", "pty_open", ("p50_ms", "p99_ms", "wall_s", "n")),
    ("a byte there and back, 500 open", "pty_echo", ("p50_ms", "p99_ms")),
    ("bare posix_spawn of true", "spawn", ("p50_ms", "p99_ms")),
    ("agent: exec of true", "agent_exec", ("p50_ms", "p99_ms")),
    ("agent over bare spawn", "agent_over_spawn", ("p50_ms",)),
    ("agent: proportional memory", "agent_memory", ("pss_mib",)),
)
UNITS = {
    "p50_ms": "p50 ms", "p99_ms": "p99 ms", "per_s": "per s", "mib_each": "MiB", "n": "number",
    "wall_s": "wall s", "mb_per_s": "MB/s", "mib": "of MiB", "success_rate": "success", "pss_mib": "MiB",
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
    for title, cells in rows(results):
        marks = {True: " [green]met[/]", False: " [red]missed[/]", None: ""}
        *values, (bound, met) = cells
        if title:
            table.add_section()
        table.add_row(title, *values, bound + marks[met])
    console.print(table)
    for tool, reason in document["missing"].items():
        console.print(f"missing: {tool}: {reason}", style="yellow", markup=False)


def rows(results: dict[str, Any]) -> Iterator[tuple[str, list[Any]]]:
    """Title (empty for the further lines of a figure), then unit, a text for each tool, and target and verdict."""
    for title, metric, fields in ROWS:
        shown = title
        for field in fields:
            values = [_text(field, metrics.get(metric, {}).get(field)) for metrics in results.values()]
            if any(value != "—" for value in values):
                yield shown, [UNITS[field], *values, _target(metric, field, results)]
                shown = ""


def _target(metric: str, field: str, results: dict[str, Any]) -> tuple[str, bool | None]:
    for target in TARGETS:
        if (target.metric, target.field) == (metric, field):
            return str(target), target.met(results)
    return "", None


def markdown(document: dict[str, Any]) -> str:
    """The same table for a README, with where and of what it was measured."""
    machine, results = document["machine"], document["results"]
    lines = [
        f"Commit `{document['commit'][:12]}`, {document['date']}, {machine['cores']} cores ({machine['cpu']}),"
        f" {machine['memory_mib'] // 1024} GiB, {machine['system']}, kernel {machine['kernel']}, Python"
        f" {document['versions']['python']}; load average before: {machine['load_average_before']:.1f}.",
        "",
        "| figure | unit | " + " | ".join(results) + " | target |",
        "|---|---|" + "---:|" * (len(results) + 1),
    ]
    for title, (unit, *values, (bound, met)) in rows(results):
        verdict = {True: f"{bound} met", False: f"{bound} **missed**", None: bound}[met]
        lines.append(f"| {title} | {unit} | " + " | ".join(values) + f" | {verdict} |")
    lines += [""] + [f"Missing: {tool}: {reason}" for tool, reason in document["missing"].items()]
    return "\n".join(lines).rstrip()


def main() -> None:
    result, readme = Path(sys.argv[1]), Path(__file__).with_name("README.md")
    table = f"From `results/{result.name}`. {markdown(json.loads(result.read_text()))}"
    before, start, rest = readme.read_text().partition("<!-- table -->\n")
    _, end, after = rest.partition("<!-- end of table -->")
    if not end:
        raise SystemExit(f"{readme} has lost its marks for the table")
    readme.write_text(f"{before}{start}{table.rstrip()}\n{end}{after}")


if __name__ == "__main__":
    main()
