"""The service's side of the gateway: its process, kept alive, and what it is told and tells."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from orchard.env.errors import InfrastructureError, RuntimeRefused
from orchard.env.runtimes.local.gateway.listening import Listening

_log = logging.getLogger(__name__)
_ANSWER_S = 20.0
_STOP_S = 5.0
_RETRY_S = 0.5


class Gateway:
    """Keeps one gateway alive and its lists right. told: called with a source address and the fields of an
    `EgressDenial`. All lists are told anew to one that is started after another."""

    def __init__(
        self, state_dir: Path, resolver: tuple[str, int] | None, told: Callable[[str, dict[str, Any]], None]
    ) -> None:
        self._state_dir = state_dir
        self._resolver = resolver
        self._told = told
        self._lists: dict[str, tuple[str, ...]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._count = 0
        self._keeper: asyncio.Task[None] | None = None
        self._served = asyncio.Event()

    def start(self, listening: Listening, lists: Mapping[str, tuple[str, ...]]) -> None:
        """Start it, and again whenever it ends. Starting twice is fine."""
        self._lists.update(lists)
        if self._keeper is None:
            self._keeper = asyncio.get_running_loop().create_task(self._keep(listening))

    async def ready(self) -> None:
        """Returns when one has begun to serve. Raises `RuntimeRefused` when none does."""
        try:
            async with asyncio.timeout(_ANSWER_S):
                await self._served.wait()
        except TimeoutError:
            raise RuntimeRefused(
                f"the sandboxes' gateway did not start within {_ANSWER_S:g} s; its error is in the service's log"
            ) from None

    async def close(self) -> None:
        """End it: names are reached no more."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait({self._keeper})
            self._keeper = None

    async def allow(self, source: str, entries: tuple[str, ...]) -> None:
        """Returns when the sandbox with this address reaches these names and no other; connections to others are cut.

        Raises `InfrastructureError` when the gateway does not do it; a later one will.
        """
        self._lists[source] = entries
        await self._order({source: entries})

    async def forget(self, source: str) -> None:
        """The sandbox is gone; its address may be another's next."""
        if self._lists.pop(source, None) is not None:
            await self._order({source: None})

    async def _order(self, lists: Mapping[str, tuple[str, ...] | None]) -> None:
        """Have it done by the gateway that runs. When there is none, the next one begins with all lists."""
        if self._writer is None:
            return
        self._count += 1
        number = self._count
        done = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._say(lists)
            async with asyncio.timeout(_ANSWER_S):
                await done
        except TimeoutError:
            raise InfrastructureError("the sandboxes' gateway does not answer; try again") from None
        finally:
            self._waiting.pop(number, None)

    def _say(self, lists: Mapping[str, tuple[str, ...] | None]) -> None:
        if self._writer is not None:
            self._writer.write(json.dumps({"n": self._count, "lists": lists}).encode() + b"\n")

    # ----------------------------------------------------------------------------------------- its process

    async def _keep(self, listening: Listening) -> None:
        while True:
            try:
                await self._run(listening)
                _log.warning("the sandboxes' gateway ended; it is started again")
            except OSError as error:
                _log.error("the sandboxes' gateway cannot be started: %s", error)
            await asyncio.sleep(_RETRY_S)

    async def _run(self, listening: Listening) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        fds = [theirs.fileno(), *(each.fileno() for each in listening.sockets)]
        options = {
            "path": sys.path,
            "sockets": fds,
            "resolver": self._resolver,
            "state_dir": str(self._state_dir),
        }
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", str(Path(__file__).with_name("main.py")), json.dumps(options),
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL,
                pass_fds=fds, env={}, cwd="/", start_new_session=True,
            )  # fmt: skip
        try:
            reader, self._writer = await asyncio.open_connection(sock=ours)
            self._say(self._lists)
            while line := await reader.readline():
                self._heard(json.loads(line))
        except ConnectionError:
            pass
        finally:
            await self._ended(process)

    async def _ended(self, process: asyncio.subprocess.Process) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        for done in self._waiting.values():
            # What they ask for is in the lists that the next one begins with; until then nothing passes at all.
            if not done.done():
                done.set_result(None)
        try:
            async with asyncio.timeout(_STOP_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()

    def _heard(self, message: dict[str, Any]) -> None:
        if "denial" in message:
            self._told(message["source"], message["denial"])
        else:
            self._served.set()
            done = self._waiting.get(message["done"])
            if done is not None and not done.done():
                done.set_result(None)
