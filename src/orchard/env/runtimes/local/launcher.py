"""The service's side of the zygote: the process, and what it tells of each launch."""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import socket
import sys
import time
from pathlib import Path
from typing import Any

from orchard.env.contract import EndReason
from orchard.env.errors import RuntimeRefused
from orchard.env.runtimes.base import StartFailed
from orchard.env.runtimes.local.ordinary import Ordinary
from orchard.env.runtimes.local.spec import REQUEST, LaunchSpec

_log = logging.getLogger(__name__)
_ZYGOTE_START_S = 30.0
#: Nothing of the service's own; symbols bound at start are bound for all sandboxes at once.
_ENVIRONMENT = {"LD_BIND_NOW": "1"}
_LAST_WORD_S = 1.0
_FULL_RETRY_S = 0.005
_LOCK_POLL_S = 0.005
_MAX_MESSAGE = 1 << 16


class Launch:
    """One sandbox on its way: what the zygote and the newborn have told so far.

    delivered: its pid, once all that belongs to it is made. failed: `{detail, errno?, retryable?}`. exited: the exit
    code of its agent, or minus the signal.
    """

    def __init__(self, number: int, slot: int) -> None:
        loop = asyncio.get_running_loop()
        self.number = number
        self.slot = slot
        self.asked = False
        self.delivered: asyncio.Future[int] = loop.create_future()
        self.failed: asyncio.Future[dict[str, Any]] = loop.create_future()
        self.exited: asyncio.Future[int] = loop.create_future()

    @property
    def pid(self) -> int | None:
        return self.delivered.result() if self.delivered.done() else None

    @property
    def answered(self) -> bool:
        """It has been dealt with, or the zygote is gone: nothing more will be made of it."""
        return self.delivered.done() or self.failed.done()

    async def until_delivered(self) -> int:
        """Its pid. Raises `StartFailed`."""
        if not self.delivered.done():
            await asyncio.wait((self.delivered, self.failed), return_when=asyncio.FIRST_COMPLETED)
        if not self.delivered.done():
            raise self.failure()
        return self.delivered.result()

    async def last_word(self) -> None:
        """After its channel broke: the newborn's own word on why, or its exit, comes in a moment.

        Raises `StartFailed` with it, and returns when none came.
        """
        await asyncio.wait((self.failed,), timeout=_LAST_WORD_S)
        if self.failed.done():
            raise self.failure()

    def failure(self) -> StartFailed:
        facts = self.failed.result()
        reason = EndReason.RUNTIME_ERROR if facts.get("errno") else EndReason.AGENT_DID_NOT_START
        return StartFailed(reason, facts["detail"], retryable=bool(facts.get("retryable")))

    def tell(self, event: str, message: dict[str, Any]) -> None:
        if event == "exit":
            if not self.exited.done():
                self.exited.set_result(message["code"])
            event, message = "failed", {"detail": f"the agent exited with {message['code']} while starting"}
        if event == "delivered" and not self.delivered.done():
            self.delivered.set_result(message["pid"])
        elif event == "failed" and not self.failed.done():
            self.failed.set_result(message)


class Launcher:
    """Keeps one zygote alive and asks it for sandboxes. ordinary: the ids to use, where the service is not root."""

    def __init__(self, state_dir: Path, instance: str, ordinary: Ordinary | None = None) -> None:
        self._ordinary = ordinary
        self._state_dir = state_dir
        self._instance = instance
        self._process: asyncio.subprocess.Process | None = None
        self._control: socket.socket | None = None
        self._ready: asyncio.Future[None] | None = None
        self._launches: dict[int, Launch] = {}
        self._count = 0
        self._closing = False
        self._starting = asyncio.Lock()

    @property
    def alive(self) -> bool:
        return self._control is not None

    @property
    def process(self) -> asyncio.subprocess.Process | None:
        return self._process

    async def start(self) -> None:
        """Start the zygote and wait until it is ready. Raises `RuntimeRefused` with what the machine lacks."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        loop = asyncio.get_running_loop()
        self._control = ours
        self._ready = loop.create_future()
        options: dict[str, Any] = {
            "state_dir": str(self._state_dir),
            "instance": self._instance,
            "control_fd": theirs.fileno(),
        }
        if self._ordinary is not None:
            options["ordinary"] = self._ordinary.to_wire()
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", str(Path(__file__).with_name("zygote_main.py")), json.dumps(options),
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL,
                pass_fds=[theirs.fileno()], env=_ENVIRONMENT, cwd="/", start_new_session=True,
            )  # fmt: skip
        finally:
            theirs.close()
        loop.add_reader(ours.fileno(), self._on_control, ours)
        try:
            async with asyncio.timeout(_ZYGOTE_START_S):
                await self._ready
        except TimeoutError:
            raise RuntimeRefused(
                f"the sandbox launcher was not ready within {_ZYGOTE_START_S:g} s; is this state directory in use?"
            ) from None

    async def close(self) -> None:
        """End the zygote; sandboxes go on without it."""
        self._closing = True
        self._drop_control()
        if self._process is not None:
            await self._process.wait()

    def next_launch(self, slot: int) -> Launch:
        self._count += 1
        launch = Launch(self._count, slot)
        self._launches[launch.number] = launch
        return launch

    def forget(self, launch: Launch) -> None:
        self._launches.pop(launch.number, None)

    async def create(self, launch: Launch, spec: LaunchSpec, channel: socket.socket) -> None:
        """Ask for a sandbox whose agent has `channel`; what becomes of it is told to `launch`."""
        head = REQUEST.pack(b"C", launch.number, launch.slot, spec.network is not None)
        await self._send(head + json.dumps(spec.to_wire()).encode(), [channel.fileno()])

    async def go(self, launch: Launch) -> None:
        """The network interface of a launch is there."""
        await self._send(REQUEST.pack(b"G", launch.number, launch.slot, True))

    async def remove(self, sandbox_id: str) -> None:
        """Remove the tree of a sandbox whose processes are gone, files of its other users included. Raises
        `StartFailed`."""
        launch = self.next_launch(0)
        try:
            await self._send(REQUEST.pack(b"R", launch.number, 0, False) + sandbox_id.encode())
            await launch.until_delivered()
        finally:
            self.forget(launch)

    async def _send(self, message: bytes, fds: list[int] | None = None) -> None:
        async with self._starting:
            if self._control is None:
                if self._closing:
                    raise StartFailed(EndReason.RUNTIME_ERROR, "the service is shutting down", retryable=True)
                await self.start()
        control = self._control
        assert control is not None
        try:
            while True:
                try:
                    socket.send_fds(control, [message], fds or [])
                    return
                except BlockingIOError:
                    # The zygote is behind. Neither asyncio nor uvloop waits for a socket to take a message whole.
                    await asyncio.sleep(_FULL_RETRY_S)
        except OSError as error:
            raise StartFailed(
                EndReason.RUNTIME_ERROR, f"the sandbox launcher is gone: {error}", retryable=True
            ) from None

    def _on_control(self, control: socket.socket) -> None:
        while True:
            try:
                data = control.recv(_MAX_MESSAGE)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._lost()
                return
            self._on_message(json.loads(data))

    def _on_message(self, message: dict[str, Any]) -> None:
        event = message["event"]
        if event in ("ready", "refused"):
            ready = self._ready
            if ready is None or ready.done():
                return
            if event == "ready":
                ready.set_result(None)
            else:
                detail = f"this machine does not allow sandboxes: {message['detail']}; see `orchard doctor`"
                ready.set_exception(RuntimeRefused(detail))
            return
        launch = self._launches.get(message["launch"])
        if launch is None:
            if event == "failed":
                _log.warning("a process for a sandbox to come failed: %s", message["detail"])
        else:
            launch.tell(event, message)
            if event == "exit":
                self.forget(launch)

    def _lost(self) -> None:
        """The zygote ended: creations in flight fail and may be tried again; the rest is unharmed."""
        self._drop_control()
        ready = self._ready
        if ready is not None and not ready.done():
            detail = "the sandbox launcher ended while starting; its error is in the log above"
            ready.set_exception(RuntimeRefused(detail))
        launches, self._launches = self._launches, {}
        for launch in launches.values():
            launch.tell("failed", {"detail": "the sandbox launcher ended", "retryable": True})

    async def settled(self, launch: Launch, patience_s: float) -> None:
        """Wait until nothing more can be made of a launch, at most `patience_s`: it was dealt with, or the processes
        of a zygote that ended meanwhile are gone too."""
        deadline = asyncio.get_running_loop().time() + patience_s
        if not launch.answered:
            await asyncio.wait(
                (launch.delivered, launch.failed), timeout=patience_s, return_when=asyncio.FIRST_COMPLETED
            )
        if not self.alive:
            await asyncio.to_thread(self._wait_unlocked, deadline - asyncio.get_running_loop().time())

    def _wait_unlocked(self, patience_s: float) -> None:
        """Wait until no process of an earlier zygote is left that makes sandboxes."""
        deadline = time.monotonic() + patience_s
        with (self._state_dir / "zygote.lock").open("rb") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        return
                    time.sleep(_LOCK_POLL_S)

    def _drop_control(self) -> None:
        if self._control is not None:
            asyncio.get_running_loop().remove_reader(self._control.fileno())
            self._control.close()
            self._control = None
