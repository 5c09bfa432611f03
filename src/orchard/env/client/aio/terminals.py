"""Terminals: commands with a pseudo-terminal, which outlive the connection to them."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from orchard.env.client.aio.streams import not_understood
from orchard.env.client.flows import Socket
from orchard.env.client.retry import Backoff
from orchard.env.client.transport import Transport, path_of
from orchard.env.errors import BY_CODE, ConnectionFailed, InfrastructureError, OrchardError

_CHUNK_BYTES = 1 << 20
#: How long an input waits for a broken connection to come back.
_RECONNECT_S = 60.0


class AsyncTerminal:
    """A command that has a terminal: `sandbox.pty()`. It lives on when its connection breaks, and when nobody is connected
    for up to 15 minutes; `sandbox.attach_pty` finds it again."""

    def __init__(
        self, transport: Transport, sandbox_id: str, pty_id: str | None = None, since: int = 0
    ) -> None:
        self._transport = transport
        self._sandbox_id = sandbox_id
        self._pty_id = pty_id
        self._offset = since
        self._pid: int | None = None
        self._exit_code: int | None = None
        self._socket: Socket | None = None
        self._connected = asyncio.Event()

    @property
    def pty_id(self) -> str:
        """The id under which it is found again; it is also the id of its job."""
        assert self._pty_id is not None
        return self._pty_id

    @property
    def pid(self) -> int | None:
        """Its process inside the sandbox."""
        return self._pid

    @property
    def offset(self) -> int:
        """How many bytes of its output have been read: what `attach_pty` goes on from."""
        return self._offset

    @property
    def exit_code(self) -> int | None:
        """Once it has ended; -1 when it was ended by force before it had one."""
        return self._exit_code

    async def output(self) -> AsyncIterator[bytes]:
        """What it shows, until it has ended. Goes on over broken connections without losing or repeating anything.

        Raises `Conflict` when another connection has taken it over.
        """
        backoff = Backoff(self._transport.settings.retry)
        while self._exit_code is None:
            try:
                frame = await self._receive()
            except OrchardError as error:
                pause_s = backoff.pause_s(error.retry_after_s) if _may_pass(error) else None
                if pause_s is None:
                    raise
                await asyncio.sleep(pause_s)
                with contextlib.suppress(ConnectionFailed):
                    await self._connect({})
                continue
            if frame["type"] == "stdout":
                backoff = Backoff(self._transport.settings.retry)
                data = frame["data"]
                self._offset = frame["offset"] + len(data)
                yield data
            elif frame["type"] == "exit":
                self._exit_code = frame["code"]
                await self._leave()
            elif frame["type"] == "error":
                raise _error(frame)

    async def wait(self) -> int:
        """Its exit code, once it has ended; what it still shows is passed over."""
        async for _ in self.output():
            pass
        assert self._exit_code is not None
        return self._exit_code

    async def send(self, data: bytes | str) -> None:
        """Type something; text is sent as UTF-8. Return is a carriage return, Ctrl-C the byte 3, Ctrl-D the byte 4."""
        raw = data.encode() if isinstance(data, str) else data
        for start in range(0, len(raw), _CHUNK_BYTES):
            encoded = base64.b64encode(raw[start : start + _CHUNK_BYTES]).decode("ascii")
            await self._send({"type": "stdin", "data": encoded})

    async def resize(self, rows: int, cols: int) -> None:
        """Tell it its size in characters."""
        await self._send({"type": "resize", "rows": rows, "cols": cols})

    async def signal(self, signal: str) -> None:
        """Send a signal such as "INT" to every process in it."""
        await self._send({"type": "signal", "sig": signal})

    async def close(self) -> None:
        """End it and everything that runs in it. Repeating is fine."""
        if self._exit_code is None:
            with contextlib.suppress(OrchardError):
                await self._send({"type": "close"})
                await self.wait()
        await self._leave()

    async def detach(self) -> None:
        """Close the connection and leave it running."""
        await self._leave()

    # ------------------------------------------------------------------------------------- the connection

    async def _connect(self, init: dict[str, Any], *, takeover: bool = False) -> None:
        await self._leave()
        query = [("pty_id", self._pty_id), ("since", str(self._offset))] if self._pty_id is not None else []
        if takeover or self._pid is not None:
            # After a broken connection the service may not have noticed yet that the old one is dead.
            query.append(("takeover", "1"))
        path = path_of("sandboxes", self._sandbox_id, "exec", "pty")
        self._socket = await self._transport.open_socket(path, [(n, v) for n, v in query if v is not None])
        if self._pty_id is None:
            await self._socket.send(json.dumps({"type": "init", **init}))
        frame = await self._receive()
        if frame["type"] != "ready":
            await self._leave()
            raise (
                _error(frame) if frame["type"] == "error" else not_understood("the first frame is not ready")
            )
        self._pty_id, self._pid = frame["pty_id"], frame["pid"]
        self._connected.set()

    async def _receive(self) -> dict[str, Any]:
        if self._socket is None:
            raise ConnectionFailed("the terminal is not connected", sent=True)
        try:
            return _understood(await self._socket.receive())
        except ConnectionFailed:
            self._connected.clear()
            raise

    async def _send(self, frame: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(_RECONNECT_S):
                await self._connected.wait()
        except TimeoutError:
            raise ConnectionFailed(
                "the terminal is not connected: read its output to reconnect", sent=False
            ) from None
        assert self._socket is not None
        await self._socket.send(json.dumps(frame))

    async def _leave(self) -> None:
        self._connected.clear()
        socket, self._socket = self._socket, None
        if socket is not None:
            await socket.close()


async def open_terminal(
    transport: Transport,
    sandbox_id: str,
    command: Sequence[str] | None,
    *,
    rows: int,
    cols: int,
    env: Mapping[str, str] | None,
    cwd: str | None,
    login_shell: bool,
) -> AsyncTerminal:
    """Start a command in a terminal."""
    terminal = AsyncTerminal(transport, sandbox_id)
    await terminal._connect({
        "cmd": None if command is None else list(command), "env": dict(env or {}), "cwd": cwd,
        "rows": rows, "cols": cols, "login_shell": login_shell,
    })  # fmt: skip
    return terminal


async def attach_terminal(
    transport: Transport, sandbox_id: str, pty_id: str, since: int, *, takeover: bool
) -> AsyncTerminal:
    """Connect to one that was opened before."""
    terminal = AsyncTerminal(transport, sandbox_id, pty_id, since)
    await terminal._connect({}, takeover=takeover)
    return terminal


#: What of a frame is used, by its type.
_FRAMES: dict[Any, dict[str, tuple[type, ...]]] = {
    "ready": {"pty_id": (str,), "pid": (int, type(None))},
    "stdout": {"data": (str,), "offset": (int,)},
    "exit": {"code": (int,)},
}


def _understood(text: str | bytes) -> dict[str, Any]:
    """The frame, if it is one. Raises `InfrastructureError`."""
    try:
        frame = json.loads(text)
        if not isinstance(frame["type"], str):
            raise TypeError("its type is no text")
        for name, kinds in _FRAMES.get(frame["type"], {}).items():
            if type(frame[name]) not in kinds:
                raise TypeError(f"{name} is wrong")
        if frame["type"] == "stdout":
            frame["data"] = base64.b64decode(frame["data"])
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise not_understood(f"{type(error).__name__}: {error}") from None
    return frame  # type: ignore[no-any-return]


def _may_pass(error: OrchardError) -> bool:
    return isinstance(error, ConnectionFailed) or (error.http_status == 503 and error.retryable)


def _error(frame: dict[str, Any]) -> OrchardError:
    code = frame.get("code")
    message = str(frame.get("message"))
    if code == "taken_over":
        return BY_CODE["conflict"](message)
    return BY_CODE.get(str(code), InfrastructureError)(message)
