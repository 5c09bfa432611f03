"""Tunnels and lists of what a sandbox may reach."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from orchard.env.contract.base import Answer, Request, Text
from orchard.env.egress import normalised

#: Of one sandbox.
MAX_TUNNELS = 32
TargetName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]


def _one_each(value: list[OpenTunnel]) -> list[OpenTunnel]:
    ports = [tunnel.listen_port for tunnel in value if tunnel.listen_port]
    if twice := {port for port in ports if ports.count(port) > 1}:
        raise ValueError(f"listen_port {min(twice)} is named twice: each tunnel needs a port of its own")
    return value


AllowEgress = Annotated[list[Text], AfterValidator(normalised)]


class OpenTunnel(Request):
    """POST /sandboxes/{id}/tunnels. target: a name of `serve --tunnel-target`. listen_port: on the sandbox's loopback;
    left out or 0, the agent picks one."""

    target: TargetName
    listen_port: Annotated[int, Field(ge=0, le=65535)] | None = None


class TunnelInfo(Answer):
    """A tunnel: what user code reaches as `url` is the operator's `target`. Counted since the tunnel was opened, or the
    service was started: connections, and bytes from the sandbox (sent) and to it (received). last_error: why a
    connection was refused or broken last; last_error_at: when, in Unix seconds."""

    listen_port: int
    target: str
    url: str
    open_connections: int = 0
    total_connections: int = 0
    failed_connections: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    last_error: str | None = None
    last_error_at: float | None = None


class TunnelList(Answer):
    tunnels: list[TunnelInfo]
