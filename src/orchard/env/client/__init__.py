"""The SDK: `AsyncSandboxClient` and `SandboxClient`, the same names and meanings in both.

    from orchard.env.client import SandboxClient

    with SandboxClient() as client, client.create("host") as sandbox:
        print(sandbox.exec("echo hello").stdout)

Needs no server dependency.
"""

from orchard.env.client.aio import (
    AsyncCommandHandle,
    AsyncCommands,
    AsyncFiles,
    AsyncSandbox,
    AsyncSandboxClient,
    AsyncSessions,
    AsyncTerminal,
    AsyncTunnels,
)
from orchard.env.client.results import JobResult, OutputChunk, OutputGap
from orchard.env.client.retry import RetryPolicy
from orchard.env.client.settings import ClientSettings
from orchard.env.client.sync import (
    CommandHandle,
    Commands,
    Files,
    Sandbox,
    SandboxClient,
    Sessions,
    Terminal,
    Tunnels,
)

__all__ = [
    "AsyncCommandHandle",
    "AsyncCommands",
    "AsyncFiles",
    "AsyncSandbox",
    "AsyncSandboxClient",
    "AsyncSessions",
    "AsyncTerminal",
    "AsyncTunnels",
    "ClientSettings",
    "CommandHandle",
    "Commands",
    "Files",
    "JobResult",
    "OutputChunk",
    "OutputGap",
    "RetryPolicy",
    "Sandbox",
    "SandboxClient",
    "Sessions",
    "Terminal",
    "Tunnels",
]
