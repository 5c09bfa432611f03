"""The name servers of a sandbox that lives already."""

from __future__ import annotations

import os
from contextlib import suppress

from orchard.env.errors import Conflict, DiskFull, InvalidRequest, NotFound
from orchard.env.runtimes.base import AgentChannel


async def set_name_servers(channel: AgentChannel, servers: list[str]) -> None:
    """In a sandbox that lives; one that has made that impossible keeps what it has."""
    path, text = "/etc/resolv.conf", "".join(f"nameserver {server}\n" for server in servers)
    for op, payload, more in (
        ("remove", b"", {}),  # a link, perhaps to nowhere
        ("write", text.encode(), {"upload": os.urandom(8).hex(), "mode": 0o644}),
    ):
        with suppress(InvalidRequest, NotFound, Conflict, DiskFull):
            await channel.call(op, payload, path=path, **more)
