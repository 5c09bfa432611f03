"""The asynchronous client: the only hand-written one. `orchard.env.client.sync` is generated from it."""

from orchard.env.client.aio.client import AsyncSandboxClient
from orchard.env.client.aio.commands import AsyncCommandHandle, AsyncCommands
from orchard.env.client.aio.files import AsyncFiles
from orchard.env.client.aio.sandbox import AsyncSandbox
from orchard.env.client.aio.sessions import AsyncSessions
from orchard.env.client.aio.terminals import AsyncTerminal
from orchard.env.client.aio.tunnels import AsyncTunnels

__all__ = [
    "AsyncCommandHandle",
    "AsyncCommands",
    "AsyncFiles",
    "AsyncSandbox",
    "AsyncSandboxClient",
    "AsyncSessions",
    "AsyncTerminal",
    "AsyncTunnels",
]
