"""Deleting sandboxes when the program ends, whatever way it ends that Python can still act upon.

This is the one piece of process-wide state of the client: a process has one exit and one set of signal
handlers. Nothing is installed before a sandbox has to be cleaned up.
"""

from __future__ import annotations

import atexit
import contextlib
import http.client
import logging
import os
import signal
import ssl
import threading
import time
from collections.abc import Iterable
from types import FrameType
from urllib.parse import urlsplit

from orchard.env.client.settings import ClientSettings
from orchard.env.contract import KEY_HEADER

logger = logging.getLogger(__name__)

#: Connections used side by side, and the time that an exit may take.
_CONNECTIONS = 8
_BUDGET_S = 10.0


class OwnedSandboxes:
    """Ids of the sandboxes that one client must delete, at the latest when the process ends."""

    def __init__(self, settings: ClientSettings) -> None:
        self._settings = settings
        self._ids: dict[str, None] = {}
        self._pid = os.getpid()
        self._hooked = False

    def prepare(self) -> None:
        """Hook into the end of the program; on the main thread, also into SIGTERM if nobody else has."""
        self._forget_parent()
        if not self._hooked:
            self._hooked = True
            _HOOK.watch(self)
        if self._settings.handle_signals:
            _own_sigterm()

    def add(self, sandbox_id: str) -> None:
        """Delete this sandbox at exit unless `discard` comes first."""
        self._forget_parent()
        self._ids[sandbox_id] = None

    def discard(self, sandbox_id: str) -> None:
        """It was deleted, or is somebody else's now."""
        self._ids.pop(sandbox_id, None)

    def release(self) -> None:
        """The client was closed: nothing is owned any more, or what is left is the exit's to delete."""
        if self._hooked and not self.ids():
            self._hooked = False
            _HOOK.forget(self)

    def ids(self) -> list[str]:
        """What is owned now, by this process: a child of fork owns nothing of its parent's."""
        self._forget_parent()
        return list(self._ids)

    def delete_now(self, budget_s: float = _BUDGET_S) -> None:
        """Delete all, blocking and without an event loop or threads: neither works at interpreter exit."""
        ids = self.ids()
        self._ids.clear()
        if ids:
            delete_blocking(self._settings, ids, budget_s)

    def _forget_parent(self) -> None:
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._ids = {}
            self._hooked = False


class _ExitHook:
    """Runs the clean-up of all clients once, at exit."""

    def __init__(self) -> None:
        # Strong references: sandboxes must go even if their client was collected before.
        self._kept: list[OwnedSandboxes] = []
        self._pid: int | None = None

    def watch(self, owned: OwnedSandboxes) -> None:
        if self._pid is None:
            atexit.register(self._at_exit)
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._kept = []
        self._kept.append(owned)

    def forget(self, owned: OwnedSandboxes) -> None:
        if owned in self._kept:
            self._kept.remove(owned)

    def _at_exit(self) -> None:
        if self._pid != os.getpid():
            return
        deadline = time.monotonic() + _BUDGET_S
        for owned in self._kept:
            owned.delete_now(max(0.5, deadline - time.monotonic()))


def _own_sigterm() -> None:
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _exit_on_signal)


def _exit_on_signal(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


_HOOK = _ExitHook()


def delete_blocking(settings: ClientSettings, sandbox_ids: Iterable[str], budget_s: float) -> None:
    """Send DELETE for each sandbox over a few plain connections; failures are logged, never raised."""
    deadline = time.monotonic() + budget_s
    waiting = list(sandbox_ids)
    for base_url in settings.base_urls:
        waiting = _delete_at(base_url, settings.api_key, waiting, deadline)
    if waiting:
        logger.warning("sandboxes left to their time to live: %s", ", ".join(waiting[:20]))


def _delete_at(base_url: str, api_key: str | None, waiting: list[str], deadline: float) -> list[str]:
    """Those that could not be deleted by the service there."""
    url = urlsplit(base_url)
    waiting = [*waiting]
    batch: list[tuple[http.client.HTTPConnection, str]] = []
    links: list[http.client.HTTPConnection] = []
    try:
        budget_s = max(0.5, deadline - time.monotonic())
        links = [_connect(base_url, budget_s) for _ in range(min(_CONNECTIONS, len(waiting)))]
        headers = {KEY_HEADER: api_key} if api_key else {}
        while waiting and time.monotonic() < deadline:
            batch = [(link, waiting.pop()) for link in links[: len(waiting)]]
            for link, sandbox_id in batch:
                link.request("DELETE", f"{url.path}/sandboxes/{sandbox_id}", headers=headers)
            for link, _ in batch:
                link.getresponse().read()
            batch = []
    except (OSError, http.client.HTTPException) as error:
        waiting += [sandbox_id for _, sandbox_id in batch]
        logger.warning("could not delete %d sandboxes at exit: %s", len(waiting), error)
    finally:
        for link in links:
            with contextlib.suppress(OSError):
                link.close()
    return waiting


def _connect(base_url: str, timeout_s: float) -> http.client.HTTPConnection:
    url = urlsplit(base_url)
    host = url.hostname or "localhost"
    if url.scheme == "https":
        return http.client.HTTPSConnection(
            host, url.port, timeout=timeout_s, context=ssl.create_default_context()
        )
    return http.client.HTTPConnection(host, url.port, timeout=timeout_s)
