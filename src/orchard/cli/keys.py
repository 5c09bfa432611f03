"""`orchard keys`."""

from __future__ import annotations

import secrets
from typing import Annotated, Any

import typer

from orchard.cli import options
from orchard.cli.output import note, print_json

app = typer.Typer(help="Keys of tenants.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    pass


@app.command("new")
def new(
    owner: Annotated[str, typer.Option("--owner", metavar="NAME", help="Whose key it is.")],
    role: Annotated[str, typer.Option("--role", metavar="ROLE", help="user or admin.")] = "user",
    max_sandboxes: Annotated[
        int | None, typer.Option("--max-sandboxes", metavar="N", help="Live sandboxes.")
    ] = None,
    max_cpu: Annotated[
        str | None, typer.Option("--max-cpu", metavar="CORES", help="Cores of all its sandboxes together.")
    ] = None,
    max_memory: Annotated[
        str | None, typer.Option("--max-memory", metavar="SIZE", help="Memory of all its sandboxes together.")
    ] = None,
    creates_per_minute: Annotated[
        int | None, typer.Option("--creates-per-minute", metavar="N", help="Sandboxes created per minute.")
    ] = None,
    json: options.Json = False,
) -> None:
    """Make a key: the entry for the keys file on stdout, the key itself on stderr, where it is shown this once.

    With --json both are on stdout. `orchard keys new --owner alice >> keys.yaml` adds a tenant; SIGHUP makes a
    running service read the file again.
    """
    from orchard.env.orchestrator.auth import check_entry, hash_key

    key = "ork_" + secrets.token_urlsafe(30)
    quotas = {
        "max_sandboxes": max_sandboxes,
        "max_cpu": max_cpu,
        "max_memory": max_memory,
        "creates_per_minute": creates_per_minute,
    }
    entry: dict[str, Any] = {"owner": owner, "role": role, "hash": hash_key(key)}
    entry |= {name: value for name, value in quotas.items() if value is not None}
    check_entry("the new key", entry)
    if json:
        print_json({"key": key, "entry": entry})
        return
    for number, (name, value) in enumerate(entry.items()):
        typer.echo(f"{'  ' if number else '- '}{name}: {_scalar(value)}")
    note(f"the key of {owner}, not shown again: {key}")


def _scalar(value: object) -> str:
    """YAML of a number, or of a text in quotes: without them "2" and "null" would be something else."""
    return f'"{value}"' if isinstance(value, str) else str(value)
