# Generated from aio/tunnels.py by tools/generate_sync_client.py; change that and run it.
"""Ports inside a sandbox that lead to targets of the operator: `sandbox.tunnels`."""

from __future__ import annotations

from typing import TypeAlias

from orchard.env.client.aio.tunnels import AsyncTunnels
from orchard.env.client.portal import Portal
from orchard.env.contract import TunnelInfo

TunnelInfos: TypeAlias = list[TunnelInfo]


class Tunnels:
    """The tunnels of one sandbox. They work with the network blocked: bytes go through the service."""

    def __init__(self, portal: Portal, wrapped: AsyncTunnels) -> None:
        self._portal = portal
        self._async = wrapped

    def open(self, target: str, listen_port: int | None = None) -> TunnelInfo:
        """Let user code reach `target`, a name that the operator allows, at the returned `url`.

        listen_port: on the sandbox's loopback; None takes a free one. A tunnel that is there already, with the same
        port and target, is returned. Raises `TargetNotAllowed` (it lists those that are), `PortInUse`,
        `PortNotAllowed`.
        """
        return self._portal.call(self._async.open(target, listen_port))

    def list(self) -> TunnelInfos:
        """Those that there are, in order of their ports, with what came through them and what went wrong last."""
        return self._portal.call(self._async.list())

    def close(self, listen_port: int) -> None:
        """Listen no more on a port, and break the connections through it. One that is not there is fine."""
        self._portal.call(self._async.close(listen_port))
