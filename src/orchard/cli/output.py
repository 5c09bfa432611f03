"""What the commands print: JSON for programs, tables and lines for people, errors on stderr."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

    from orchard.env.errors import OrchardError


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    json.dump(value, sys.stdout, indent=2, ensure_ascii=False)
    sys.stdout.write("\n")


def print_json_line(value: Any) -> None:
    """One JSON document on one line, at once."""
    print(json.dumps(value, ensure_ascii=False), flush=True)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table for people; plain columns when stdout is no terminal."""
    from rich.console import Console

    # A pipe has no width: never cut what a program may read.
    width = None if sys.stdout.isatty() else 10_000
    Console(width=width, soft_wrap=False, highlight=False).print(table_of(columns, rows))


def table_of(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """The table that `print_table` prints."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD if sys.stdout.isatty() else None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, no_wrap=True, overflow="ignore" if not sys.stdout.isatty() else "ellipsis")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def write_bytes(data: bytes, *, error: bool = False) -> None:
    """A command's output as it is, without the terminal's encoding in between."""
    stream = sys.stderr if error else sys.stdout
    stream.flush()
    stream.buffer.write(data)
    stream.flush()


def note(text: str) -> None:
    """A line for people on stderr."""
    print(f"orchard: {text}", file=sys.stderr)


def print_error(error: OrchardError, *, as_json: bool) -> None:
    """What went wrong and what to do, on stderr; with --json also the error body on stdout."""
    note(error.detail)
    if as_json:
        body = {name: value for name, value in error.body().items() if name not in ("job", "sent")}
        print_json({"error": body})


def age(since: float | None) -> str:
    """The time since a Unix time, in its largest unit."""
    if since is None:
        return "-"
    seconds = max(0, int(time.time() - since))
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


def size(count: float | None) -> str:
    """Bytes in binary units."""
    if count is None:
        return "-"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
