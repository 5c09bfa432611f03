"""Orchard: an open framework for agentic modelling.

The environment service's client is available from the top:

    from orchard import SandboxClient

    with SandboxClient() as client:
        with client.create("host") as sandbox:
            print(sandbox.exec("echo hello").stdout)
"""

from __future__ import annotations

__version__ = "0.1.0"

__all__ = ["AsyncSandboxClient", "OrchardError", "SandboxClient", "__version__"]

TYPE_CHECKING = False  # importing typing would cost every sandbox's agent most of a megabyte
if TYPE_CHECKING:
    from typing import Any

    from orchard.env.client import AsyncSandboxClient, SandboxClient
    from orchard.env.errors import OrchardError


def __getattr__(name: str) -> Any:
    # Lazy: importing `orchard` must not pull in an HTTP client (the zygote and the agent import from here).
    if name in ("SandboxClient", "AsyncSandboxClient"):
        from orchard.env import client

        return getattr(client, name)
    if name == "OrchardError":
        from orchard.env.errors import OrchardError

        return OrchardError
    raise AttributeError(f"module 'orchard' has no attribute {name!r}")
