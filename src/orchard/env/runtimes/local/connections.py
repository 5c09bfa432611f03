"""Connecting to the agents of live sandboxes."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable

from orchard.env.errors import AgentUnreachable
from orchard.env.runtimes.channel import AgentProtocolChannel


async def dial(
    folder_fd: int, sandbox_id: str, on_lost: Callable[[], None] | None, **hello: str
) -> AgentProtocolChannel:
    """A new, authenticated connection to the agent of a sandbox in the directory `folder_fd`. Raises
    `AgentUnreachable`."""
    path = f"/proc/self/fd/{folder_fd}/{sandbox_id}/agent.sock"
    loop = asyncio.get_running_loop()
    try:
        _, channel = await loop.create_unix_connection(
            lambda: AgentProtocolChannel(sandbox_id, on_lost), path
        )
    except OSError as error:
        raise AgentUnreachable(f"the agent of sandbox {sandbox_id} does not listen: {error}") from None
    try:
        await channel.call("hello", token=_token(folder_fd, sandbox_id), **hello)
    except BaseException:
        await channel.close()
        raise
    return channel


def _token(folder_fd: int, sandbox_id: str) -> str:
    fd = os.open(f"{sandbox_id}/sandbox.json", os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder_fd)
    with os.fdopen(fd, "rb") as file:
        try:
            return str(json.loads(file.read())["token"])
        except (ValueError, KeyError, TypeError, RecursionError):
            raise AgentUnreachable(f"the note of sandbox {sandbox_id} is damaged") from None
