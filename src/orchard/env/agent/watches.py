"""The watches of a sandbox, as operations of the wire protocol."""

from __future__ import annotations

import os
import stat

from orchard.env.agent.inotify import explained
from orchard.env.agent.job import AgentError
from orchard.env.agent.paths import Places, failure
from orchard.env.agent.watch import Watch

TYPE_CHECKING = False  # importing typing would cost every sandbox most of a megabyte
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from orchard.env.agent.loop import Loop, Timer

_MAX_WATCHES = 32
#: A watch that nobody asks is dropped: its client, or the service, has gone.
_FORGOTTEN_S = 60.0


class Watches:
    """All watches of the sandbox, by number."""

    def __init__(self, loop: Loop, places: Places) -> None:
        self._loop = loop
        self._places = places
        self._watches: dict[int, Watch] = {}
        self._timers: dict[int, Timer] = {}
        self._numbers = 0

    def operations(self) -> dict[str, Callable[..., None]]:
        """By their names of the wire protocol, as the server calls them."""
        return {"watch": self._start, "watch_changes": self._changes, "unwatch": self._stop}

    def _start(
        self, header: dict[str, Any], _payload: bytes, answer: Callable[..., None], fail: Callable[..., None]
    ) -> None:
        """Begin; the answer comes when everything is watched."""
        path: str = header["path"]
        if len(self._watches) >= _MAX_WATCHES:
            raise AgentError(
                "overloaded", f"{_MAX_WATCHES} watches are open in this sandbox; close one first"
            )
        try:
            whole, only = self._root(path)
        except OSError as error:
            raise failure(error, path) from None
        watch = Watch(self._loop, whole, only, bool(header.get("recursive")) and only is None)
        self._numbers += 1
        number = self._numbers
        self._watches[number] = watch

        def ready(error: AgentError | None) -> None:
            if error is not None:
                self._drop(number)
                fail(error)
                return
            self._expect(number)
            answer({"watch": number})

        try:
            watch.start(ready)
        except OSError as error:
            self._drop(number)
            raise explained(error, path) from None

    def _root(self, path: str) -> tuple[bytes, bytes | None]:
        """The path of the directory to watch, and the name in it that counts. Raises OSError."""
        whole = self._places.absolute(path)
        # Looked at without opening: a device or a pipe would do something.
        fd = self._places.open(path, None, os.O_PATH)
        try:
            if stat.S_ISDIR(os.fstat(fd).st_mode):
                return whole, None
        finally:
            os.close(fd)
        folder, name = os.path.split(whole.rstrip(b"/"))
        return folder, name

    def _changes(
        self, header: dict[str, Any], _payload: bytes, answer: Callable[..., None], _fail: Any
    ) -> None:
        """What has happened since the last time; waits for something to happen."""
        number = int(header["watch"])
        watch = self._watches.get(number)
        if watch is None:
            raise AgentError("not_found", "this watch has ended; begin a new one")
        self._expect(number)

        def look() -> None:
            timer.cancel()
            watch.when_changed(None)
            answer({"changes": watch.take(), "ended": watch.ended})
            if watch.ended:
                self._drop(number)

        timer = self._loop.after(float(header.get("timeout_s", 15.0)), look)
        watch.when_changed(look)

    def _stop(self, header: dict[str, Any], _payload: bytes, answer: Callable[..., None], _fail: Any) -> None:
        self._drop(int(header["watch"]))
        answer({})

    def _expect(self, number: int) -> None:
        if (timer := self._timers.get(number)) is not None:
            timer.cancel()
        self._timers[number] = self._loop.after(_FORGOTTEN_S, lambda: self._drop(number))

    def _drop(self, number: int) -> None:
        if (timer := self._timers.pop(number, None)) is not None:
            timer.cancel()
        if (watch := self._watches.pop(number, None)) is not None:
            watch.close()
