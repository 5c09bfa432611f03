"""The portal: a background thread with an event loop, where synchronous clients run the asynchronous core."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from typing import Any, Generic, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")
Closer = Callable[[], Awaitable[None]]

_CLOSE_TIMEOUT_S = 15.0


class _Call(Generic[T]):
    """One coroutine on its way through the portal."""

    def __init__(self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]) -> None:
        self._loop = loop
        self._coroutine = coroutine
        self._task: asyncio.Task[T] | None = None
        self._result: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run(self) -> T:
        """Its result; when the calling thread is interrupted, it is cancelled and its clean-up awaited."""
        # An interrupt may come between any two steps: all of them are inside one `try`.
        closed = False
        try:
            try:
                self._loop.call_soon_threadsafe(self._begin)
            except RuntimeError:
                closed = True
                self._coroutine.close()
                raise RuntimeError("this client was closed; make a new one") from None
            return self._result.result()
        except BaseException:
            if not closed and not self._result.done():
                self._loop.call_soon_threadsafe(self._cancel)
                concurrent.futures.wait([self._result], _CLOSE_TIMEOUT_S)
            raise

    def _begin(self) -> None:
        self._task = self._loop.create_task(self._coroutine)
        self._task.add_done_callback(self._finish)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
        elif not self._result.done():
            # It was interrupted before it was handed over.
            self._coroutine.close()
            self._result.set_exception(concurrent.futures.CancelledError("interrupted"))

    def _finish(self, task: asyncio.Task[T]) -> None:
        if task.cancelled():
            self._result.set_exception(concurrent.futures.CancelledError("this client was closed"))
        elif (error := task.exception()) is not None:
            self._result.set_exception(error)
        else:
            self._result.set_result(task.result())


class _LoopThread:
    """A thread that runs an event loop until it is told to stop. Holds no reference to its portal."""

    def __init__(self, closers: list[Closer]) -> None:
        self.pid = os.getpid()
        self.loop = asyncio.new_event_loop()
        self._closers = closers
        self._winding_up: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, name="orchard-portal", daemon=True)
        self._thread.start()

    def here(self) -> bool:
        """Whether the caller runs on this loop's own thread."""
        return threading.current_thread() is self._thread

    def stop(self) -> None:
        """Run the closers, cancel what still runs, end the thread. Idempotent, callable from any thread."""
        if self.pid != os.getpid() or not self._thread.is_alive():
            return
        try:
            self.loop.call_soon_threadsafe(self._begin_to_wind_up)
        except RuntimeError:  # the loop was closed in between
            return
        # A finaliser may run on any thread, the loop's own included: there is nothing to join then.
        if not self.here():
            self._thread.join(_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            self.loop.close()

    def _begin_to_wind_up(self) -> None:
        if self._winding_up is None:
            self._winding_up = self.loop.create_task(self._wind_up())

    async def _wind_up(self) -> None:
        try:
            others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            for closer in self._closers:
                try:
                    await closer()
                except Exception as error:
                    logger.warning("closing a client: %s", error)
            await self.loop.shutdown_asyncgens()
        finally:
            self.loop.stop()


class Portal:
    """Runs coroutines of one asynchronous client for any number of threads.

    The thread starts with the first call and ends with `close`, with the interpreter, or when the portal is
    no longer referenced. After a fork the child gets a thread of its own at its first call.
    """

    def __init__(self) -> None:
        # By process id: a lock that another thread held during a fork would stay locked in the child.
        self._locks: dict[int, threading.Lock] = {}
        self._running: _LoopThread | None = None
        self._closers: list[Closer] = []
        self._finalizer: weakref.finalize[..., Any] | None = None
        self._closed = False

    def at_close(self, closer: Closer) -> None:
        """Await `closer()` on the loop when the portal closes."""
        self._closers.append(closer)

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result. An exception in the calling thread (Ctrl-C) cancels it."""
        try:
            loop = self._loop()
        except BaseException:
            coroutine.close()
            raise
        return _Call(loop, coroutine).run()

    def iterate(self, items: AsyncIterator[T]) -> Iterator[T]:
        """The items of an asynchronous generator, each fetched when it is asked for."""
        finished = object()

        async def step() -> Any:
            return await anext(items, finished)

        try:
            while (item := self.call(step())) is not finished:
                yield item
        finally:
            close = getattr(items, "aclose", None)
            if close is not None and not self._closed:
                self.call(close())

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def close(self) -> None:
        """End the thread after what `at_close` registered has run. Repeating is fine."""
        with self._lock():
            self._closed = True
            running, self._running = self._running, None
        if running is None:
            return
        if self._finalizer is not None:
            self._finalizer.detach()
        running.stop()

    def _lock(self) -> threading.Lock:
        return self._locks.setdefault(os.getpid(), threading.Lock())

    def _loop(self) -> asyncio.AbstractEventLoop:
        running = self._running
        if running is None or running.pid != os.getpid():
            running = self._start()
        if running.here():
            raise RuntimeError("a synchronous client was called on its own loop; use AsyncSandboxClient")
        return running.loop

    def _start(self) -> _LoopThread:
        with self._lock():
            if self._closed:
                raise RuntimeError("this client was closed; make a new one")
            if self._running is None or self._running.pid != os.getpid():
                self._running = _LoopThread(self._closers)
                # Runs when the portal is collected, and at interpreter exit.
                self._finalizer = weakref.finalize(self, self._running.stop)
            return self._running
