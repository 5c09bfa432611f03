"""`orchard ps` and `orchard logs`."""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from orchard.cli import options
from orchard.cli.output import age, print_json, print_table, table_of

if TYPE_CHECKING:
    from rich.table import Table

    from orchard.env.contract import SandboxInfo

_EVERY_STATUS = ("pending", "ready", "paused", "failed", "deleted")
_COLUMNS = ("SANDBOX", "IMAGE", "STATUS", "AGE", "CPU", "MEMORY", "NETWORK", "LABELS")


def ps(
    label: options.LabelOption = None,
    status: Annotated[str | None, typer.Option("--status", help="Only those with this status.")] = None,
    every: Annotated[bool, typer.Option("--all", "-a", help="Also those that ended.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Ids only.")] = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Go on, as things change.")] = False,
    json: options.Json = False,
    base_url: options.BaseUrl = None,
    api_key: options.ApiKey = None,
) -> None:
    """List sandboxes.

    --watch keeps the table up to date until Ctrl-C; where the output is no terminal, and with --json, it prints a
    line for each thing that happens instead.
    """
    labels = options.pairs(label, "--label")
    with options.connect(base_url, api_key) as client:
        if watch:
            if status or quiet:
                raise typer.BadParameter("goes with --label, --all and --json only", param_hint="--watch")
            from orchard.cli import watching

            watching.watch(client, labels, ended=every, json=json, render=_table)
            return
        wanted = _EVERY_STATUS if every else status
        infos = [each.info for each in client.list(labels=labels, status=wanted)]
    if json:
        print_json([info.model_dump(mode="json") for info in infos])
    elif quiet:
        for info in infos:
            typer.echo(info.sandbox_id)
    else:
        print_table(_COLUMNS, map(_row, infos))


def _table(infos: Iterable[SandboxInfo]) -> Table:
    return table_of(_COLUMNS, map(_row, infos))


def _row(info: SandboxInfo) -> tuple[str, ...]:
    return (
        info.sandbox_id,
        info.image,
        f"{info.status}{f' ({info.reason})' if info.reason else ''}",
        age(info.created_at),
        info.cpu or "-",
        info.memory or "-",
        "blocked" if info.block_network else "open",
        ",".join(f"{name}={value}" for name, value in info.labels.items()) or "-",
    )


def logs(
    sandbox_id: Annotated[str, typer.Argument(metavar="SANDBOX")],
    json: options.Json = False,
    base_url: options.BaseUrl = None,
    api_key: options.ApiKey = None,
) -> None:
    """Print the log of a sandbox's life and of its agent."""
    with options.connect(base_url, api_key) as client:
        answer = client.get(sandbox_id).logs()
    if json:
        print_json(answer.model_dump(mode="json"))
        return
    for line in answer.lines:
        moment = datetime.datetime.fromtimestamp(line.time).astimezone().isoformat(timespec="milliseconds")
        typer.echo(f"{moment} {line.source}: {line.message}")
