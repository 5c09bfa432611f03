"""`orchard create` and `orchard rm`."""

from __future__ import annotations

from typing import Annotated

import typer

from orchard.cli import options
from orchard.cli.output import note, print_json


def create(
    image: Annotated[
        str, typer.Argument(metavar="IMAGE", help='"host", "dir:PATH" or the name of an image.')
    ],
    sandbox_id: Annotated[str | None, typer.Option("--id", metavar="ID", help="Your own id.")] = None,
    label: options.LabelOption = None,
    cpu: options.Cpu = None,
    memory: options.Memory = None,
    disk: options.Disk = None,
    pids: options.Pids = None,
    network: options.Network = False,
    tunnel: options.Tunnel = None,
    allow_egress: options.AllowEgress = None,
    env: options.EnvOption = None,
    workdir: options.WorkDir = None,
    user: options.User = None,
    ready_timeout: options.ReadyTimeout = None,
    ttl: options.Ttl = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until it is ready.")] = True,
    json: options.Json = False,
    base_url: options.BaseUrl = None,
    api_key: options.ApiKey = None,
) -> None:
    """Create a sandbox and print its id."""
    with options.connect(base_url, api_key) as client:
        sandbox = client.create(
            image,
            sandbox_id=sandbox_id,
            labels=options.pairs(label, "--label"),
            cpu=cpu,
            memory=memory,
            disk=disk,
            pids=pids,
            block_network=not network,
            tunnels=options.tunnels(tunnel),
            allow_egress=allow_egress or None,
            env=options.pairs(env, "--env"),
            working_dir=workdir,
            user=user,
            timeout=ready_timeout,
            ttl_seconds=ttl,
            wait=wait,
        )
        if json:
            print_json(sandbox.info.model_dump(mode="json"))
        else:
            typer.echo(sandbox.sandbox_id)


def remove(
    sandbox_ids: Annotated[
        list[str] | None, typer.Argument(metavar="[SANDBOX]...", show_default=False)
    ] = None,
    label: options.LabelOption = None,
    every: Annotated[bool, typer.Option("--all", help="All of your sandboxes.")] = False,
    json: options.Json = False,
    base_url: options.BaseUrl = None,
    api_key: options.ApiKey = None,
) -> None:
    """Delete sandboxes: by id, all with a label, or all."""
    from orchard.env.errors import OrchardError

    if sum(map(bool, (sandbox_ids, label, every))) != 1:
        raise typer.BadParameter("name sandboxes, or give --label or --all", param_hint="SANDBOX")
    removed: list[str] = []
    failures: dict[str, OrchardError] = {}
    with options.connect(base_url, api_key) as client:
        labels = options.pairs(label, "--label")
        if labels:
            removed = client.delete_all(labels)
        else:
            for sandbox_id in sandbox_ids or [each.sandbox_id for each in client.list()]:
                try:
                    client.delete(sandbox_id)
                    removed.append(sandbox_id)
                except OrchardError as error:
                    failures[sandbox_id] = error
    for failure in failures.values():
        note(failure.detail)
    if json:
        print_json({"deleted": removed, "failed": {name: each.body() for name, each in failures.items()}})
    else:
        for sandbox_id in removed:
            typer.echo(sandbox_id)
    if failures:
        raise typer.Exit(1)
