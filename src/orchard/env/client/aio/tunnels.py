"""Ports inside a sandbox that lead to targets of the operator: `sandbox.tunnels`."""

from __future__ import annotations

from typing import TypeAlias

from orchard.env.client.transport import Repeat, Transport, build, encode, path_of
from orchard.env.contract import Deleted, OpenTunnel, TunnelInfo, TunnelList

#: A class with a method `list` cannot name the type in its annotations.
TunnelInfos: TypeAlias = list[TunnelInfo]


class AsyncTunnels:
    """The tunnels of one sandbox. They work with the network blocked: bytes go through the service."""

    def __init__(self, transport: Transport, sandbox_id: str) -> None:
        self._transport = transport
        self._sandbox_id = sandbox_id

    async def open(self, target: str, listen_port: int | None = None) -> TunnelInfo:
        """Let user code reach `target`, a name that the operator allows, at the returned `url`.

        listen_port: on the sandbox's loopback; None takes a free one. A tunnel that is there already, with the same
        port and target, is returned. Raises `TargetNotAllowed` (it lists those that are), `PortInUse`,
        `PortNotAllowed`.
        """
        request = build(OpenTunnel, target=target, listen_port=listen_port)
        return await self._transport.call(
            "POST",
            path_of("sandboxes", self._sandbox_id, "tunnels"),
            TunnelInfo,
            body=encode(request),
            # A repeat without a port would open another one.
            repeat=Repeat.SAFE if listen_port else Repeat.UNSENT_ONLY,
        )

    async def list(self) -> TunnelInfos:
        """Those that there are, in order of their ports, with what came through them and what went wrong last."""
        path = path_of("sandboxes", self._sandbox_id, "tunnels")
        return (await self._transport.call("GET", path, TunnelList)).tunnels

    async def close(self, listen_port: int) -> None:
        """Listen no more on a port, and break the connections through it. One that is not there is fine."""
        path = path_of("sandboxes", self._sandbox_id, "tunnels", str(listen_port))
        await self._transport.call("DELETE", path, Deleted)
