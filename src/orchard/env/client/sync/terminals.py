# Generated from aio/terminals.py by tools/generate_sync_client.py; change that and run it.
"""Terminals: commands with a pseudo-terminal, which outlive the connection to them."""

from __future__ import annotations

from collections.abc import Iterator

from orchard.env.client.aio.terminals import AsyncTerminal
from orchard.env.client.portal import Portal


class Terminal:
    """A command that has a terminal: `sandbox.pty()`. It lives on when its connection breaks, and when nobody is connected
    for up to 15 minutes; `sandbox.attach_pty` finds it again."""

    def __init__(self, portal: Portal, wrapped: AsyncTerminal) -> None:
        self._portal = portal
        self._async = wrapped

    @property
    def pty_id(self) -> str:
        """The id under which it is found again; it is also the id of its job."""
        return self._async.pty_id

    @property
    def pid(self) -> int | None:
        """Its process inside the sandbox."""
        return self._async.pid

    @property
    def offset(self) -> int:
        """How many bytes of its output have been read: what `attach_pty` goes on from."""
        return self._async.offset

    @property
    def exit_code(self) -> int | None:
        """Once it has ended; -1 when it was ended by force before it had one."""
        return self._async.exit_code

    def output(self) -> Iterator[bytes]:
        """What it shows, until it has ended. Goes on over broken connections without losing or repeating anything.

        Raises `Conflict` when another connection has taken it over.
        """
        yield from self._portal.iterate(self._async.output())

    def wait(self) -> int:
        """Its exit code, once it has ended; what it still shows is passed over."""
        return self._portal.call(self._async.wait())

    def send(self, data: bytes | str) -> None:
        """Type something; text is sent as UTF-8. Return is a carriage return, Ctrl-C the byte 3, Ctrl-D the byte 4."""
        self._portal.call(self._async.send(data))

    def resize(self, rows: int, cols: int) -> None:
        """Tell it its size in characters."""
        self._portal.call(self._async.resize(rows, cols))

    def signal(self, signal: str) -> None:
        """Send a signal such as "INT" to every process in it."""
        self._portal.call(self._async.signal(signal))

    def close(self) -> None:
        """End it and everything that runs in it. Repeating is fine."""
        self._portal.call(self._async.close())

    def detach(self) -> None:
        """Close the connection and leave it running."""
        self._portal.call(self._async.detach())
