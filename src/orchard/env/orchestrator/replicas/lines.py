"""Connections to the seats that other services hold."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from typing import Any

import aiohttp

from orchard.env.errors import InfrastructureError
from orchard.env.orchestrator.app import Service
from orchard.env.orchestrator.replicas.seats import SOCKET, Seats, State
from orchard.env.orchestrator.replicas.sockets import QUESTIONS, ask

#: How long a seat whose service died is waited for, until a living one has taken it.
PATIENCE_S = 10.0
_PAUSE_S = 0.05
_CONNECT_S = 2.0
_ANSWER_S = 5.0
#: Shorter than any service keeps an idle connection.
_KEEPALIVE_S = 20.0


class Lines:
    """apps: the seats that this process holds, which need no connection."""

    def __init__(self, seats: Seats, apps: Callable[[], dict[int, Service]]) -> None:
        self._seats = seats
        self.apps = apps
        self._sessions: dict[int, tuple[int, aiohttp.ClientSession]] = {}

    def session(self, number: int) -> aiohttp.ClientSession:
        """Connections to a seat; they are to whoever holds it when they are made."""
        known = self._sessions.get(number)
        if known is None:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
            folder = os.open(self._seats.folder_of(number), flags)
            # The path of the directory may be longer than an address can be.
            connector = aiohttp.UnixConnector(
                f"/proc/self/fd/{folder}/{SOCKET}", limit=0, keepalive_timeout=_KEEPALIVE_S
            )
            session = aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            )
            known = self._sessions[number] = (folder, session)
        return known[1]

    def others(self) -> list[int]:
        """Seats of other services, those included that wait to be taken over."""
        return [number for number in self._seats.numbers() if number not in self.apps()]

    async def ask(self, number: int, question: str, **query: str) -> dict[str, Any] | None:
        """What a seat answers to a question of `sockets.ask`; None when nothing is recorded in it. Waits for a seat
        that is being taken over. Raises `InfrastructureError`."""
        wait = Waiting(self, number)
        while True:
            app = self.apps().get(number)
            if app is not None:
                return await ask(app.state.orchestrator, question, query)
            try:
                async with asyncio.timeout(_ANSWER_S):
                    url = f"http://seat{QUESTIONS}{question}"
                    async with self.session(number).get(url, params=query) as answer:
                        if answer.status == 200:
                            found: dict[str, Any] = await answer.json()
                            return found
            except (aiohttp.ClientError, OSError, TimeoutError):
                pass
            if not await wait.again():
                return None

    def state(self, number: int) -> State:
        return State.HELD if number in self.apps() else self._seats.state(number)

    def occupied(self, number: int) -> bool:
        """Something is recorded there, or may be at any moment."""
        return self.state(number) is not State.EMPTY

    async def close(self) -> None:
        for folder, session in self._sessions.values():
            await session.close()
            os.close(folder)
        self._sessions.clear()


class Waiting:
    """For a seat that does not answer."""

    def __init__(self, lines: Lines, number: int) -> None:
        self._lines = lines
        self._number = number
        self._deadline = time.monotonic() + PATIENCE_S

    async def again(self) -> bool:
        """Pause; then whether there is anything to wait for. Raises `InfrastructureError` after `PATIENCE_S`."""
        if self._lines.state(self._number) is State.EMPTY:
            return False
        if time.monotonic() > self._deadline:
            raise InfrastructureError(
                f"the service that had this died {PATIENCE_S:g} s ago and no other has taken its work over yet;"
                " try again in a moment",
                retry_after_s=2.0,
            )
        await asyncio.sleep(_PAUSE_S)
        return True
