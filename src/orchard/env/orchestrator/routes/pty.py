"""WS /sandboxes/{id}/exec/pty: a terminal over JSON frames.

The client sends `init {cmd, env, cwd, rows, cols, login_shell}` first, then `stdin {data}`, `signal {sig}`,
`resize {rows, cols}`, `close {}`; the service `ready {pid, pty_id}`, `stdout {data, offset}`, `exit {code}`,
`error {message}`. Data is base64. A connection with `?pty_id=ID&since=OFFSET` goes on with a terminal that was opened
before, without `init`; `takeover=1` takes it from who is connected.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from starlette.websockets import WebSocket, WebSocketDisconnect

from orchard.env.contract import field_of
from orchard.env.errors import (
    Conflict,
    Forbidden,
    InvalidRequest,
    NotFound,
    OrchardError,
    SandboxNotReady,
    Unauthorized,
)
from orchard.env.orchestrator.jobtable import LiveJob
from orchard.env.orchestrator.middleware import KEY_SUBPROTOCOL
from orchard.env.orchestrator.streaming import Ended, Piece
from orchard.env.orchestrator.terminals import Holder, Terminals

routes = APIRouter(tags=["commands"])
_INIT_WITHIN_S = 60.0
_FRAME_BYTES = 256 << 10
_MAX_STDIN_BYTES = 4 << 20

Size = Annotated[int, Field(ge=1, le=10_000)]


class _Frame(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Init(_Frame):
    type: Literal["init"]
    cmd: list[str] | None = None
    env: dict[str, str] | None = None
    cwd: str | None = None
    rows: Size = 24
    cols: Size = 80
    login_shell: bool | None = None


class Stdin(_Frame):
    type: Literal["stdin"]
    data: Annotated[str, Field(max_length=_MAX_STDIN_BYTES * 4 // 3 + 4)]


class Signal(_Frame):
    type: Literal["signal"]
    sig: Annotated[str, Field(max_length=32)]


class Resize(_Frame):
    type: Literal["resize"]
    rows: Size
    cols: Size


class Close(_Frame):
    type: Literal["close"]


_FRAMES: TypeAdapter[Init | Stdin | Signal | Resize | Close] = TypeAdapter(
    Annotated[Init | Stdin | Signal | Resize | Close, Field(discriminator="type")]
)


@routes.websocket("/sandboxes/{sandbox_id}/exec/pty")
async def pty(socket: WebSocket, sandbox_id: str) -> None:
    """See the module's docstring. Refusals come as an `error` frame and a close code: 4400 bad frame, 4401 key, 4404
    unknown or ended, 4409 not ready or in use, 4410 taken over, 4503 try again."""
    offered = [name for name in socket.scope["subprotocols"] if name.startswith(KEY_SUBPROTOCOL)]
    await socket.accept(subprotocol=offered[0] if offered else None)
    try:
        await _Session(socket, sandbox_id).serve()
    except OrchardError as error:
        await _refuse(socket, error)
    except WebSocketDisconnect:
        return


async def _refuse(socket: WebSocket, error: OrchardError) -> None:
    kinds = (
        ((Unauthorized, Forbidden), 4401), ((SandboxNotReady, Conflict), 4409), ((NotFound,), 4404),
        ((InvalidRequest,), 4400),
    )  # fmt: skip
    code = next((code for classes, code in kinds if isinstance(error, classes)), 0)
    if not code:
        code = 4404 if error.http_status == 404 else 4503 if error.http_status == 503 else 4400
    try:
        await socket.send_text(json.dumps({"type": "error", "message": error.detail, "code": error.code}))
        await socket.close(code, error.code)
    except (WebSocketDisconnect, RuntimeError):
        return  # it did not wait for the reason


class _Session:
    """One connection to one terminal."""

    def __init__(self, socket: WebSocket, sandbox_id: str) -> None:
        self._socket = socket
        self._sandbox_id = sandbox_id
        self._service = socket.app.state.orchestrator
        self._terminals: Terminals = self._service.terminals
        self._tasks: list[asyncio.Task[None]] = []
        self._taken_over = False

    async def serve(self) -> None:
        principal = self._socket.app.edge.principal_of_socket(self._socket.scope)
        sandbox = await self._service.catalog.ready_one(principal, self._sandbox_id)
        query = self._socket.query_params
        pty_id, since = query.get("pty_id"), _number(query, "since")
        if pty_id is None:
            init = await self._init()
            job = await self._terminals.open(
                sandbox, init.cmd, init.rows, init.cols, env=init.env, cwd=init.cwd,
                login_shell=bool(init.login_shell),
            )  # fmt: skip
        else:
            found = await self._terminals.find(principal, sandbox, pty_id)
            if not isinstance(found, LiveJob):
                await self._send("ready", pid=None, pty_id=pty_id)
                await self._output(found, since)
                return
            job = found
        holder = Holder(self._leave)
        await self._terminals.attach(job, holder, takeover=query.get("takeover") in ("1", "true"))
        try:
            await self._send("ready", pid=job.pid, pty_id=job.job_id)
            await self._both_ways(job, since)
        finally:
            self._terminals.detach(job, holder)

    async def _init(self) -> Init:
        try:
            async with asyncio.timeout(_INIT_WITHIN_S):
                frame = await self._frame()
        except TimeoutError:
            raise InvalidRequest(f"no init frame came within {_INIT_WITHIN_S:g} s") from None
        if not isinstance(frame, Init):
            raise InvalidRequest("the first frame must be init {cmd, env, cwd, rows, cols, login_shell}")
        return frame

    async def _both_ways(self, job: LiveJob, since: int) -> None:
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._input(job)), loop.create_task(self._output(job, since))]
        try:
            done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)
        if self._taken_over:
            await self._send(
                "error", message="another connection has taken this terminal over", code="taken_over"
            )
            await self._socket.close(4410, "taken_over")
            return
        for task in done:
            if not task.cancelled():
                task.result()

    def _leave(self) -> None:
        self._taken_over = True
        for task in self._tasks:
            task.cancel()

    async def _input(self, job: LiveJob) -> None:
        while True:
            match await self._frame():
                case Stdin(data=data):
                    await self._terminals.write(job, _decoded(data))
                case Resize(rows=rows, cols=cols):
                    await self._terminals.resize(job, rows, cols)
                case Signal(sig=name):
                    await self._terminals.signal(job, name)
                case Close():
                    await self._terminals.hang_up(job)
                case Init():
                    raise InvalidRequest("init is the first frame only")

    async def _frame(self) -> Init | Stdin | Signal | Resize | Close:
        text = await self._socket.receive()
        if text["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(text.get("code", 1005))
        try:
            return _FRAMES.validate_json(text.get("text") or text.get("bytes") or b"")
        except ValidationError as error:
            problem = error.errors()[0]
            where = f"frame {field_of(problem['loc'])}".rstrip()
            raise InvalidRequest(f"{where}: {problem['msg']}") from None

    async def _output(self, job: Any, since: int) -> None:
        async for happening in self._service.streams.follow(job, {"stdout": since}, _FRAME_BYTES):
            match happening:
                case Piece(_, offset, data):
                    await self._send("stdout", data=base64.b64encode(data).decode("ascii"), offset=offset)
                case Ended(record):
                    head = json.loads(record.head)
                    if head["infra"]:
                        await self._send("error", message=head["error"], code=head["error_code"])
                    code = head["exit_code"]
                    await self._send("exit", code=-1 if code is None else code)
                    await self._socket.close(1000)
                case _:
                    pass

    async def _send(self, kind: str, **fields: Any) -> None:
        await self._socket.send_text(json.dumps({"type": kind, **fields}))


def _decoded(data: str) -> bytes:
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest("frame stdin: data must be base64") from None


def _number(query: Mapping[str, str], name: str) -> int:
    text = query.get(name, "0")
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise InvalidRequest(f"{name} must be a whole number")
    return int(text)
