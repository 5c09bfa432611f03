"""Which tunnels each sandbox has, kept in its record; and the connections that carry them, kept up while it lives."""

from __future__ import annotations

import asyncio
import logging
import resource
import ssl
from collections.abc import Iterable
from functools import partial
from typing import Any

from orchard.env.contract import MAX_TUNNELS, OpenTunnel
from orchard.env.errors import AgentUnreachable, InvalidRequest, OrchardError, PortInUse, TargetNotAllowed
from orchard.env.orchestrator.agents import Agents
from orchard.env.orchestrator.auth import Principal
from orchard.env.orchestrator.metrics import Metrics
from orchard.env.orchestrator.sandbox import Sandbox
from orchard.env.orchestrator.settings import ServiceSettings
from orchard.env.orchestrator.stores.base import Store
from orchard.env.orchestrator.tunnels.relay import Load, Relay, Tunnel, TunnelStream
from orchard.env.orchestrator.tunnels.targets import parse_targets
from orchard.env.runtimes.base import Runtime

_log = logging.getLogger(__name__)
_CONNECT_S = 10.0
_RETRY_S = 0.1
_MAX_RETRY_S = 2.0


class _Box:
    """The tunnels of one sandbox, by port, and their connection to its agent."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self.tunnels: dict[int, Tunnel] = {}
        self.changing = asyncio.Lock()
        self.stream: TunnelStream | None = None
        self.connected = asyncio.Event()
        self.keeper: asyncio.Task[None] | None = None


class Tunnels:
    """See the module's docstring. Nothing is made for a sandbox without tunnels."""

    def __init__(self, settings: ServiceSettings, runtime: Runtime, store: Store, agents: Agents, metrics: Metrics,
                 boot: str) -> None:  # fmt: skip
        self._runtime = runtime
        self._store = store
        self._agents = agents
        self._metrics = metrics
        self._boot = boot
        self._timeout_s = settings.tunnel_connect_timeout_s
        self._targets = parse_targets(settings.tunnel_targets)
        self._context: ssl.SSLContext | None = None
        if any(target.tls for target in self._targets.values()):
            self._context = ssl.create_default_context()
        # The other half is for clients, agents and files.
        self._load = Load(resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        self._boxes: dict[str, _Box] = {}
        self._closing = False

    # --------------------------------------------------------------------------------------- what is wanted

    def check(self, principal: Principal, wanted: Iterable[OpenTunnel]) -> None:
        """Raises `TargetNotAllowed` for a target that the operator does not allow, or not to this key."""
        allowed = set(self._targets)
        if principal.tunnel_targets is not None:
            allowed &= principal.tunnel_targets
        for tunnel in wanted:
            if tunnel.target not in allowed:
                known = ", ".join(sorted(allowed))
                raise TargetNotAllowed(
                    f"tunnel target {tunnel.target!r} is not allowed; "
                    + (
                        f"use one of: {known}"
                        if known
                        else "the operator allows none (serve --tunnel-target NAME=URL)"
                    )
                )

    async def open(self, sandbox: Sandbox, wanted: list[OpenTunnel]) -> list[dict[str, Any]]:
        """Open tunnels, all or none; durable and carried on when it returns. Those that are there already are fine.

        The fields of `TunnelInfo` of each. Their targets have been checked. Raises `PortInUse`, `PortNotAllowed`.
        """
        box = self._box(sandbox)
        async with box.changing:
            self._check_room(box, wanted)
            for each in wanted:
                known = box.tunnels.get(each.listen_port or 0)
                if known is not None and known.target != each.target:
                    raise PortInUse(
                        f"port {known.listen_port} is that of the tunnel to {known.target}; close it first, or choose"
                        " another listen_port"
                    )
            header, _ = await self._agents.call(
                sandbox, "tunnels", ports=[each.listen_port or 0 for each in wanted]
            )
            opened = [
                self._add(box, int(port), each.target)
                for port, each in zip(header["ports"], wanted, strict=True)
            ]
            if (error := sandbox.gone()) is not None:
                raise error
            self._save(box)
            await self._store.flush()
        await self._connected(box)
        return [self._info(tunnel) for tunnel in opened]

    def _check_room(self, box: _Box, wanted: list[OpenTunnel]) -> None:
        fresh = [each for each in wanted if (each.listen_port or 0) not in box.tunnels]
        if len(box.tunnels) + len(fresh) > MAX_TUNNELS:
            raise InvalidRequest(
                f"a sandbox has at most {MAX_TUNNELS} tunnels; close one first, or use one for several connections"
            )

    async def close(self, sandbox: Sandbox, port: int) -> None:
        """Listen no more, break what came by it. One that is not there is fine. Durable when it returns."""
        box = self._boxes.get(sandbox.sandbox_id)
        if box is None or port not in box.tunnels:
            return
        async with box.changing:
            await self._agents.call(sandbox, "untunnel", port=port)
            tunnel = box.tunnels.pop(port, None)
            if tunnel is not None and box.stream is not None:
                box.stream.drop_tunnel(tunnel)
            self._save(box)
            await self._store.flush()

    def listing(self, sandbox: Sandbox) -> list[dict[str, Any]]:
        """The fields of `TunnelInfo` of each, in order of their ports."""
        box = self._boxes.get(sandbox.sandbox_id)
        return [self._info(tunnel) for _, tunnel in sorted(box.tunnels.items())] if box is not None else []

    # ------------------------------------------------------------------------------------- sandboxes' lives

    async def open_first(self, sandbox: Sandbox) -> None:
        """Those that its creation asked for."""
        await self.open(sandbox, sandbox.body.tunnels or [])

    def adopt(self, sandbox: Sandbox) -> None:
        """Carry on what a sandbox had before the service was restarted; its agent has gone on listening."""
        box = self._box(sandbox)
        for port, target in sandbox.tunnels.items():
            tunnel = self._add(box, port, target)
            if target not in self._targets:
                tunnel.last_error = _not_allowed(target)
        self._keep(box)

    def sandbox_ended(self, sandbox: Sandbox, _error: OrchardError) -> None:
        box = self._boxes.pop(sandbox.sandbox_id, None)
        if box is not None:
            self._let_go(box)

    async def stop(self) -> None:
        """Break all connections; agents listen on."""
        self._closing = True
        boxes = list(self._boxes.values())
        for box in boxes:
            self._let_go(box)
            # Whoever waits for it has what is durable: the next service connects.
            box.connected.set()
        await asyncio.gather(*(box.keeper for box in boxes if box.keeper is not None), return_exceptions=True)

    def _let_go(self, box: _Box) -> None:
        if box.keeper is not None:
            box.keeper.cancel()
        if box.stream is not None:
            box.stream.close()

    # ------------------------------------------------------------------------------------------- connections

    def _keep(self, box: _Box) -> None:
        if box.keeper is None and box.sandbox.live and not self._closing:
            box.keeper = asyncio.get_running_loop().create_task(self._keep_connected(box))

    async def _connected(self, box: _Box) -> None:
        self._keep(box)
        try:
            async with asyncio.timeout(_CONNECT_S):
                await box.connected.wait()
        except TimeoutError:
            await self._agents.raise_end(box.sandbox, 1.0)
            raise AgentUnreachable(
                f"the agent of sandbox {box.sandbox.sandbox_id} does not take the tunnels' connection; it is tried on",
                retry_after_s=1.0,
            ) from None

    async def _keep_connected(self, box: _Box) -> None:
        """Connect, and again whenever the connection is lost, for as long as the sandbox lives."""
        pause_s = _RETRY_S
        while True:
            stream = TunnelStream(
                box.sandbox.sandbox_id,
                box.tunnels.get,
                partial(self._connect, box),
                self._timeout_s,
                self._load,
            )
            try:
                async with asyncio.timeout(_CONNECT_S):
                    # An agent whose tunnels were changed when the service was killed is told what holds.
                    await self._agree(box)
                    await self._runtime.tunnel_connection(box.sandbox.sandbox_id, stream)
                box.stream = stream
                box.connected.set()
                pause_s = _RETRY_S
                await stream.lost.wait()
                box.connected.clear()
            except (OrchardError, OSError, TimeoutError) as error:
                _log.info("the tunnels' connection is tried again: %s", error,
                          extra={"sandbox_id": box.sandbox.sandbox_id})  # fmt: skip
            finally:
                stream.close()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_RETRY_S)

    async def _agree(self, box: _Box) -> None:
        async with box.changing:
            await self._agents.call(box.sandbox, "tunnels", ports=list(box.tunnels), exactly=True)

    async def _connect(self, box: _Box, tunnel: Tunnel, relay: Relay) -> None:
        target = self._targets.get(tunnel.target)
        if target is None:
            raise ConnectionRefusedError(_not_allowed(tunnel.target))
        await target.connect(lambda: relay, self._context)

    # ---------------------------------------------------------------------------------------------- records

    def _box(self, sandbox: Sandbox) -> _Box:
        if (error := sandbox.gone()) is not None:
            raise error
        return self._boxes.setdefault(sandbox.sandbox_id, _Box(sandbox))

    def _add(self, box: _Box, port: int, target: str) -> Tunnel:
        if port not in box.tunnels:
            box.tunnels[port] = Tunnel(port, target, self._metrics.tunnel_meter(target), box.sandbox.note)
        return box.tunnels[port]

    def _save(self, box: _Box) -> None:
        box.sandbox.tunnels = {port: tunnel.target for port, tunnel in box.tunnels.items()}
        if box.sandbox.live:
            self._store.put_sandbox(box.sandbox.record(self._boot))

    def _info(self, tunnel: Tunnel) -> dict[str, Any]:
        target = self._targets.get(tunnel.target)
        port = tunnel.listen_port
        return {
            "listen_port": port,
            "target": tunnel.target,
            "url": target.url_at(port) if target is not None else f"tcp://127.0.0.1:{port}",
            "open_connections": tunnel.open_connections,
            "total_connections": tunnel.total_connections,
            "failed_connections": tunnel.failed_connections,
            "sent_bytes": tunnel.sent_bytes,
            "received_bytes": tunnel.received_bytes,
            "last_error": tunnel.last_error,
            "last_error_at": tunnel.last_error_at,
        }


def _not_allowed(target: str) -> str:
    return f"the target {target} is not allowed (any more): serve --tunnel-target {target}=URL allows it"
