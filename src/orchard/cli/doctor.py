"""`orchard doctor`."""

from __future__ import annotations

import typer

from orchard.cli import options
from orchard.cli.output import print_json

_MARKS = {"ok": ("green", "ok"), "weak": ("yellow", "weak"), "missing": ("red", "missing")}


def doctor(state_dir: options.StateDir = None, json: options.Json = False) -> None:
    """Tell what this machine can and cannot do for local sandboxes, and how to get it.

    Exits with 1 when the local runtime cannot work here.
    """
    from orchard.env.paths import default_state_dir
    from orchard.env.runtimes.local.doctor import examine

    checks = examine(state_dir or default_state_dir())
    works = not any(check.status == "missing" and check.required for check in checks)
    if json:
        print_json({"local_runtime_works": works, "checks": [check.as_dict() for check in checks]})
    else:
        from rich.console import Console
        from rich.text import Text

        console = Console(highlight=False, soft_wrap=True)
        for check in checks:
            style, mark = _MARKS[check.status]
            console.print(Text.assemble((f"{mark:<8}", style), f"{check.name:<20}{check.detail}"))
            if check.hint and check.status != "ok":
                console.print(f"{'':<28}{check.hint}", markup=False)
        console.print("Local sandboxes work here." if works else "Local sandboxes do not work here.")
    if not works:
        raise typer.Exit(1)
