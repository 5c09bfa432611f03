"""A minimal event loop: descriptors, timers and dead children, on epoll, in one thread.

asyncio would cost every sandbox megabytes and every command a millisecond.
"""

from __future__ import annotations

# The functions themselves: `signal` wraps them into enumerations, at ten times the cost.
import _signal  # type: ignore[import-not-found]
import heapq
import os
import select
import time

TYPE_CHECKING = False  # importing typing would cost every sandbox most of a megabyte
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

READ = select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR | select.EPOLLRDHUP
WRITE = select.EPOLLOUT | select.EPOLLHUP | select.EPOLLERR

#: epoll takes milliseconds as a C int, which are less than 25 days; a timer that is later is waited for again.
_LONGEST_S = 3600.0


class Timer:
    """A scheduled call; `cancel` makes it not happen."""

    __slots__ = ("callback",)

    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class Loop:
    """Run with `run`; every callback runs in the thread that called it."""

    def __init__(self, on_child: Callable[[], None], on_error: Callable[[BaseException], None]) -> None:
        self._epoll = select.epoll(flags=select.EPOLL_CLOEXEC)
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._timers: list[tuple[float, int, Timer]] = []
        self._sequence = 0
        self._on_child = on_child
        self._on_error = on_error
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._stopped = False

    def watch(self, fd: int, events: int, handler: Callable[[int], None]) -> None:
        """Call `handler(events)` whenever `fd` has them; replaces an earlier watch of the same descriptor."""
        if fd in self._handlers:
            self._epoll.modify(fd, events)
        else:
            self._epoll.register(fd, events)
        self._handlers[fd] = handler

    def unwatch(self, fd: int) -> None:
        """Stop watching; to be called before the descriptor is closed."""
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def after(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        timer = Timer(callback)
        self._sequence += 1
        heapq.heappush(self._timers, (time.monotonic() + delay_s, self._sequence, timer))
        return timer

    def stop(self) -> None:
        self._stopped = True

    def run(self) -> None:
        # Only SIGCHLD has a handler, so that as pid 1 no other signal from the sandbox has any effect.
        for number in (_signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP):
            _signal.signal(number, _signal.SIG_DFL)
        _signal.signal(_signal.SIGPIPE, _signal.SIG_IGN)
        _signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        _signal.signal(_signal.SIGCHLD, _ignore)
        self.watch(self._wake_read, select.EPOLLIN, self._woken)
        # Children may have died before the handler was there.
        self._guard(self._on_child)
        while not self._stopped:
            self.turn(self._timeout_s())

    def turn(self, timeout_s: float) -> None:
        """Wait for events, at most `timeout_s` (-1: for ever), and serve them and the timers that are due."""
        for fd, events in self._epoll.poll(timeout_s):
            handler = self._handlers.get(fd)
            if handler is not None:
                self._guard(handler, events)
        self._run_timers()

    def close(self) -> None:
        self._epoll.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _woken(self, _events: int) -> None:
        try:
            while len(os.read(self._wake_read, 4096)) == 4096:
                pass
        except BlockingIOError:
            pass
        self._on_child()

    def _timeout_s(self) -> float:
        while self._timers and self._timers[0][2].callback is None:
            heapq.heappop(self._timers)
        if not self._timers:
            return -1
        return min(max(0.0, self._timers[0][0] - time.monotonic()), _LONGEST_S)

    def _run_timers(self) -> None:
        while self._timers:
            due, _, timer = self._timers[0]
            if timer.callback is not None and due > time.monotonic():
                return
            heapq.heappop(self._timers)
            if timer.callback is not None:
                self._guard(timer.callback)

    def _guard(self, call: Callable[..., None], *args: Any) -> None:
        """A fault in one callback must not take the agent, and with it the sandbox."""
        try:
            call(*args)
        except Exception as error:
            self._on_error(error)


def _ignore(_number: int, _frame: Any) -> None:
    """The wake-up descriptor does the work."""
