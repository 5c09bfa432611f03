# Generated from aio/sessions.py by tools/generate_sync_client.py; change that and run it.
"""Named shells whose directory, variables and functions last from one command to the next: `sandbox.sessions`."""

from __future__ import annotations

from typing import TypeAlias

from orchard.env.client.aio.sessions import AsyncSessions
from orchard.env.client.portal import Portal
from orchard.env.contract import SessionInfo

SessionInfos: TypeAlias = list[SessionInfo]


class Sessions:
    """The sessions of one sandbox. A session begins with the first `sandbox.exec(…, session="name")`."""

    def __init__(self, portal: Portal, wrapped: AsyncSessions) -> None:
        self._portal = portal
        self._async = wrapped

    def list(self) -> SessionInfos:
        """Those that there are, oldest first."""
        return self._portal.call(self._async.list())

    def delete(self, name: str) -> None:
        """Forget what a session has kept; the next command of that name begins anew. One that is not there is fine."""
        self._portal.call(self._async.delete(name))
