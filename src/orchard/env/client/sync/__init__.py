# Generated from aio/__init__.py by tools/generate_sync_client.py; change that and run it.
"""The synchronous client, generated from the asynchronous one."""

from orchard.env.client.sync.client import SandboxClient
from orchard.env.client.sync.commands import CommandHandle, Commands
from orchard.env.client.sync.files import Files
from orchard.env.client.sync.images import Images
from orchard.env.client.sync.sandbox import Sandbox
from orchard.env.client.sync.sessions import Sessions
from orchard.env.client.sync.terminals import Terminal
from orchard.env.client.sync.tunnels import Tunnels

__all__ = [
    "CommandHandle",
    "Commands",
    "Files",
    "Images",
    "Sandbox",
    "SandboxClient",
    "Sessions",
    "Terminal",
    "Tunnels",
]
