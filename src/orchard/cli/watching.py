"""`orchard ps --watch`: a table that follows the events on a terminal, a line for each event elsewhere."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import typer

from orchard.cli.output import print_json_line

if TYPE_CHECKING:
    from rich.console import RenderableType

    from orchard.env.client import SandboxClient
    from orchard.env.contract import SandboxEvent, SandboxInfo

Render = Callable[[Iterable["SandboxInfo"]], "RenderableType"]


def watch(
    client: SandboxClient, labels: dict[str, str] | None, *, ended: bool, json: bool, render: Render
) -> None:
    """Follow until interrupted. ended: keep those that ended in the table. render: makes the table of sandboxes."""
    events = client.events(labels=labels)
    if json:
        for event in events:
            print_json_line(event.model_dump(mode="json", exclude_none=True))
    elif not sys.stdout.isatty():
        for event in events:
            typer.echo(line(event))
    else:
        _follow_in_table(client, events, labels, ended=ended, render=render)


def line(event: SandboxEvent) -> str:
    """One event for people and for grep."""
    moment = datetime.datetime.fromtimestamp(event.time).astimezone().isoformat(timespec="milliseconds")
    words = [moment, event.type.value]
    if event.sandbox_id is not None:
        words += [event.sandbox_id, event.image or "-"]
    if event.reason is not None:
        words.append(f"({event.reason.value}) {event.message or ''}".rstrip())
    if event.egress is not None:
        words.append(str(event.egress))
    return " ".join(words)


def _follow_in_table(
    client: SandboxClient,
    events: Iterable[SandboxEvent],
    labels: dict[str, str] | None,
    *,
    ended: bool,
    render: Render,
) -> None:
    from rich.live import Live

    from orchard.env.contract import EventType

    known: dict[str, SandboxInfo] = {}
    # The table is drawn anew every second, so that ages go on.
    with Live(get_renderable=lambda: render(list(known.values())), refresh_per_second=1) as live:
        for event in events:
            if event.type in (EventType.OPEN, EventType.GAP):
                known = {each.sandbox_id: each.info for each in client.list(labels=labels)}
            else:
                apply(known, event, ended=ended)
            live.refresh()


def apply(known: dict[str, SandboxInfo], event: SandboxEvent, *, ended: bool) -> None:
    """Bring what is known of sandboxes, by id, up to date."""
    from orchard.env.contract import EventType, SandboxInfo

    if event.sandbox_id is None:
        return
    if event.type is EventType.ENDED and not ended:
        known.pop(event.sandbox_id, None)
        return
    known[event.sandbox_id] = SandboxInfo.model_validate(
        event.model_dump(exclude={"id", "type", "time", "message"})
    )
