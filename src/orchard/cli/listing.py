"""`orchard ps` and `orchard logs`."""

from __future__ import annotations

import datetime
from typing import Annotated

import typer

from orchard.cli import options
from orchard.cli.output import age, print_json, print_table

_EVERY_STATUS = ("pending", "ready", "paused", "failed", "deleted")


def ps(
    label: options.LabelOption = None,
    status: Annotated[str | None, typer.Option("--status", help="Only those with this status.")] = None,
    every: Annotated[bool, typer.Option("--all", "-a", help="Also those that ended.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Ids only.")] = False,
    json: options.Json = False,
    base_url: options.BaseUrl = None,
    api_key: options.ApiKey = None,
) -> None:
    """List sandboxes."""
    with options.connect(base_url, api_key) as client:
        wanted = _EVERY_STATUS if every else status
        infos = [each.info for each in client.list(labels=options.pairs(label, "--label"), status=wanted)]
    if json:
        print_json([info.model_dump(mode="json") for info in infos])
    elif quiet:
        for info in infos:
            typer.echo(info.sandbox_id)
    else:
        rows = [
            (
                info.sandbox_id,
                info.image,
                f"{info.status}{f' ({info.reason})' if info.reason else ''}",
                age(info.created_at),
                info.cpu or "-",
                info.memory or "-",
                "blocked" if info.block_network else "open",
                ",".join(f"{name}={value}" for name, value in info.labels.items()) or "-",
            )
            for info in infos
        ]
        print_table(("SANDBOX", "IMAGE", "STATUS", "AGE", "CPU", "MEMORY", "NETWORK", "LABELS"), rows)


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
