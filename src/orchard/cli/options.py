"""Options that several commands share, declared once, and the parsing of their values."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from orchard.env.client import SandboxClient

Json = Annotated[bool, typer.Option("--json", help="Machine-readable output on stdout.")]
BaseUrl = Annotated[
    str | None,
    typer.Option(
        "--base-url", metavar="URL", help="The service (or ORCHARD_BASE_URL) [http://localhost:8000]."
    ),
]
ApiKey = Annotated[str | None, typer.Option("--api-key", metavar="KEY", help="Its key (or ORCHARD_API_KEY).")]
StateDir = Annotated[
    Path | None, typer.Option("--state-dir", metavar="DIR", help="Where the service keeps its state.")
]
AuthFile = Annotated[
    Path | None,
    typer.Option("--auth-file", metavar="FILE", help="Registry credentials [where skopeo and Docker look]."),
]
InsecureRegistry = Annotated[
    list[str] | None,
    typer.Option(
        "--insecure-registry", metavar="HOST[:PORT]", help="May do without verified HTTPS; may be repeated."
    ),
]
LabelOption = Annotated[
    list[str] | None, typer.Option("--label", metavar="NAME=VALUE", help="A label; may be repeated.")
]
EnvOption = Annotated[
    list[str] | None,
    typer.Option("--env", "-e", metavar="NAME=VALUE", help="An environment variable; may be repeated."),
]
Cpu = Annotated[str | None, typer.Option("--cpu", metavar="CORES", help="Cores, as 2 or 500m.")]
Memory = Annotated[str | None, typer.Option("--memory", metavar="SIZE", help="Memory, as 8Gi.")]
Disk = Annotated[str | None, typer.Option("--disk", metavar="SIZE", help="Disk space, as 10Gi.")]
Pids = Annotated[int | None, typer.Option("--pids", metavar="N", help="Most processes at once.")]
Tunnel = Annotated[
    list[str] | None,
    typer.Option(
        "--tunnel", metavar="PORT=NAME", help="A port inside that leads to a target; may be repeated."
    ),
]
Network = Annotated[
    bool, typer.Option("--network/--no-network", help="Allow the network, or loopback only (default).")
]
AllowEgress = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-egress",
        metavar="HOST[:PORT]",
        help="The network, but only to this host name, *.name or IPv4 network; may be repeated.",
    ),
]
ReadyTimeout = Annotated[
    float | None, typer.Option("--ready-timeout", metavar="S", help="Seconds to become ready [600].")
]
Ttl = Annotated[float | None, typer.Option("--ttl", metavar="S", help="Longest life in seconds [24 h].")]
Timeout = Annotated[
    float | None, typer.Option("--timeout", "-t", metavar="S", help="Seconds the command may run [600].")
]
WorkDir = Annotated[str | None, typer.Option("--workdir", "-w", metavar="DIR", help="Working directory.")]
User = Annotated[str | None, typer.Option("--user", "-u", metavar="USER", help="User to run as.")]
Shell = Annotated[
    bool, typer.Option("--shell", help="CMD is one line for the sandbox's shell, not a program.")
]
LoginShell = Annotated[bool, typer.Option("--login", help="Like --shell, with the profile files read first.")]
Stdin = Annotated[bool, typer.Option("--stdin", "-i", help="Pass this command's input on to CMD.")]
CommandWords = Annotated[
    list[str],
    typer.Argument(metavar="CMD", help="The program and its arguments, after `--`.", show_default=False),
]


def connect(base_url: str | None, api_key: str | None) -> SandboxClient:
    """A client for the service that the options and the environment name."""
    from orchard.env.client import SandboxClient

    return SandboxClient(base_url, api_key)


def pairs(values: list[str] | None, option: str) -> dict[str, str] | None:
    """`NAME=VALUE` options as a mapping; None when there are none. A usage error without '='."""
    if not values:
        return None
    result = {}
    for value in values:
        name, sign, text = value.partition("=")
        if not sign or not name:
            raise typer.BadParameter(f"{value!r}: write NAME=VALUE", param_hint=option)
        result[name] = text
    return result


def tunnels(values: list[str] | None) -> list[dict[str, object]] | None:
    """`PORT=NAME` options as the fields of tunnels; None when there are none. A usage error for anything else."""
    if not values:
        return None
    result: list[dict[str, object]] = []
    for value in values:
        port, sign, target = value.partition("=")
        if not sign or not target or not port.isdecimal() or not 1 <= int(port) <= 65535:
            raise typer.BadParameter(
                f"{value!r}: write PORT=NAME, with a PORT of 1 to 65535", param_hint="--tunnel"
            )
        result.append({"listen_port": int(port), "target": target})
    return result


def command_of(words: list[str], *, shell: bool) -> str | list[str]:
    """What to execute: the words as exact argv, or for a shell the one line that they must be."""
    if not shell:
        return words
    if len(words) != 1:
        raise typer.BadParameter("with --shell or --login, quote CMD as one word", param_hint="CMD")
    return words[0]
