"""Calls to the agent inside a sandbox, with the sandbox's own end in place of a connection error."""

from __future__ import annotations

import asyncio
from typing import Any

from orchard.env.errors import AgentUnreachable
from orchard.env.orchestrator.sandbox import Sandbox
from orchard.env.runtimes.base import Runtime

#: A broken channel mostly means that the sandbox is ending: the runtime learns of it within this time.
_LEARN_OF_END_S = 2.0


class Agents:
    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    async def call(
        self, sandbox: Sandbox, op: str, payload: bytes = b"", /, **args: Any
    ) -> tuple[dict[str, Any], bytes]:
        """One operation of `orchard.env.agent.wire`; header and payload of the answer.

        Raises the agent's own error, the sandbox's end, or `AgentUnreachable` when it lives on but does not answer.
        """
        try:
            channel = await self._runtime.channel(sandbox.sandbox_id)
            return await channel.call(op, payload, **args)
        except AgentUnreachable as error:
            await self.raise_end(sandbox, _LEARN_OF_END_S)
            raise AgentUnreachable(
                f"the agent of sandbox {sandbox.sandbox_id} does not answer ({error.detail}); try again in a moment",
                retry_after_s=1.0,
            ) from None

    async def raise_end(self, sandbox: Sandbox, within_s: float) -> None:
        """Raise the sandbox's end if it has ended or ends within the time; else return."""
        if sandbox.live:
            try:
                async with asyncio.timeout(within_s):
                    await sandbox.ended.wait()
            except TimeoutError:
                return
        if (error := sandbox.gone()) is not None:
            raise error
