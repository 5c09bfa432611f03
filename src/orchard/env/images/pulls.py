"""The pulls of a service: one per reference, shared by whoever waits for it, and told of afterwards."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from orchard.env.errors import InfrastructureError, OrchardError
from orchard.env.images.importer import Progress
from orchard.env.images.pull import Puller, PullSettings, Remote
from orchard.env.images.record import ImageRecord
from orchard.env.images.store import ImageStore

_AT_ONCE = 4
_KEPT = 100
_KEPT_LINES = 100


@dataclass(eq=False, slots=True)
class Pull:
    """One pull. done: its result, once it has ended. kept: it goes on even if nobody waits."""

    ref: str
    done: asyncio.Future[ImageRecord] = field(init=False)
    kept: bool = False
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=_KEPT_LINES))
    stop: threading.Event = field(default_factory=threading.Event)
    listeners: list[Progress] = field(default_factory=list)

    def told(self, line: str) -> None:
        self.lines.append(line)
        for listener in self.listeners:
            listener(line)

    @property
    def error(self) -> OrchardError | None:
        """Why it failed, where it did."""
        if not self.done.done():
            return None
        error = self.done.exception()
        if error is None or isinstance(error, OrchardError):
            return error
        return InfrastructureError(f"The pull of {self.ref!r} failed in an unforeseen way: {error!r}")


class Pulls:
    """Belongs to one event loop; the work is done in threads of its own, so that long pulls take nobody else's."""

    def __init__(self, store: ImageStore, settings: PullSettings | None = None) -> None:
        self._puller = Puller(store, settings)
        self._running: dict[str, Pull] = {}
        self._ended: deque[Pull] = deque(maxlen=_KEPT)
        self._threads: ThreadPoolExecutor | None = None
        self._closing = False

    async def pull(self, ref: str, progress: Progress = lambda line: None) -> ImageRecord:
        """Wait for a pull of `ref`, that of others if there is one. If everybody who waits is cancelled, so is the pull.

        Raises what `Puller.pull` raises.
        """
        pull = self._begin(ref)
        pull.listeners.append(progress)
        try:
            return await asyncio.shield(pull.done)
        finally:
            pull.listeners.remove(progress)
            if not pull.listeners and not pull.kept:
                pull.stop.set()

    def start(self, ref: str) -> Pull:
        """Begin a pull of `ref`, or join the one under way; it goes on by itself. Raises InvalidRequest."""
        pull = self._begin(ref)
        pull.kept = True
        return pull

    def __iter__(self) -> Iterator[Pull]:
        """Those under way, then those that ended, the newest first."""
        yield from [*self._running.values(), *reversed(self._ended)]

    async def close(self) -> None:
        """Stop what is under way; layers that have arrived stay cached."""
        self._closing = True
        for pull in self._running.values():
            pull.stop.set()
        if self._running:
            await asyncio.wait([pull.done for pull in self._running.values()])
        if self._threads is not None:
            self._threads.shutdown(wait=False)

    def _begin(self, ref: str) -> Pull:
        name = Remote.parse(ref).name
        if self._closing:
            raise InfrastructureError("The service is stopping; pull again in a moment.", retry_after_s=2.0)
        pull = self._running.get(name)
        if pull is not None and not pull.stop.is_set():
            return pull
        loop = asyncio.get_running_loop()
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_AT_ONCE, "pull")
        pull = Pull(ref)

        def told(line: str) -> None:
            loop.call_soon_threadsafe(pull.told, line)

        def ended(future: asyncio.Future[ImageRecord]) -> None:
            if self._running.get(name) is pull:
                del self._running[name]
            future.exception()  # told to those who wait, and kept for those who ask: never a stray one
            self._ended.append(pull)

        pull.done = loop.run_in_executor(self._threads, self._puller.pull, ref, told, pull.stop)
        pull.done.add_done_callback(ended)
        self._running[name] = pull
        return pull
