"""Named shells whose directory, variables and functions last from one command to the next: `sandbox.sessions`."""

from __future__ import annotations

from typing import TypeAlias

from orchard.env.client.transport import Transport, path_of
from orchard.env.contract import Deleted, SessionInfo, SessionList

#: A class with a method `list` cannot name the type in its annotations.
SessionInfos: TypeAlias = list[SessionInfo]


class AsyncSessions:
    """The sessions of one sandbox. A session begins with the first `sandbox.exec(…, session="name")`."""

    def __init__(self, transport: Transport, sandbox_id: str) -> None:
        self._transport = transport
        self._sandbox_id = sandbox_id

    async def list(self) -> SessionInfos:
        """Those that there are, oldest first."""
        path = path_of("sandboxes", self._sandbox_id, "sessions")
        return (await self._transport.call("GET", path, SessionList)).sessions

    async def delete(self, name: str) -> None:
        """Forget what a session has kept; the next command of that name begins anew. One that is not there is fine."""
        path = path_of("sandboxes", self._sandbox_id, "sessions", name)
        await self._transport.call("DELETE", path, Deleted)
