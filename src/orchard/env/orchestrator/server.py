"""Running the service: `run(settings)` is all that `orchard serve` does."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import gc
import logging
import os
import resource
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import uvicorn

from orchard.env.errors import SettingsError
from orchard.env.images.pull import PullSettings
from orchard.env.orchestrator import logging as logs
from orchard.env.orchestrator.app import create_app
from orchard.env.orchestrator.orchestrator import Orchestrator
from orchard.env.orchestrator.settings import ServiceSettings
from orchard.env.orchestrator.stores.sqlite import SqliteStore
from orchard.env.runtimes.registry import make_runtime

_log = logging.getLogger(__name__)
_BACKLOG = 4096
#: A frame of 4 MiB as base64. The published client gives a connection up after ten seconds of silence.
_MAX_FRAME_BYTES = 8 << 20
_PING_S = 4.0
_FILES = 65_536
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def run(settings: ServiceSettings) -> None:
    """Serve until SIGTERM or SIGINT; returns after a clean stop.

    Prints one line to stdout when ready, `Orchard is ready at URL`; logs go to stderr. Sandboxes outlive it and
    are adopted by the next run on the same state directory. Raises `OrchardError` (`SettingsError`,
    `RuntimeRefused`, …) when it cannot start.
    """
    settings.check_exposure()
    logs.configure(settings.log_level)
    _raise_file_limit()
    with _locked(settings.state_dir), _listening(settings) as listener:
        pull = PullSettings(
            auth_file=settings.registry_auth_file, insecure_registries=tuple(settings.insecure_registries)
        )
        runtime = make_runtime(
            settings.runtime,
            settings.state_dir,
            pull=pull,
            pull_missing=settings.pull == "missing",
            egress_resolver=settings.egress_resolver,
        )
        app = create_app(settings, runtime, SqliteStore(settings.state_dir / "orchestrator.db"))
        config = uvicorn.Config(
            app, loop="uvloop", http="httptools", ws="websockets-sansio", ws_max_size=_MAX_FRAME_BYTES,
            ws_ping_interval=_PING_S, ws_ping_timeout=60.0, lifespan="off", access_log=False, log_config=None,
            timeout_keep_alive=settings.keep_alive_s, timeout_graceful_shutdown=settings.shutdown_s,
            backlog=_BACKLOG, server_header=False, date_header=False, proxy_headers=False,
        )  # fmt: skip
        server = _Server(config, app.state.orchestrator, _url(settings, listener))
        with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
            runner.run(server.serve_all(listener))


class _Server(uvicorn.Server):
    """uvicorn's server, with the orchestrator's start and stop around it and our own signals."""

    def __init__(self, config: uvicorn.Config, orchestrator: Orchestrator, url: str) -> None:
        super().__init__(config)
        self._orchestrator = orchestrator
        self._url = url

    async def serve_all(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        for number in _STOP_SIGNALS:
            loop.add_signal_handler(number, self._stop, number)
        reloads = self._orchestrator.reloads
        if reloads:
            loop.add_signal_handler(signal.SIGHUP, self._orchestrator.reload)
        try:
            # Started here and not by the lifespan: its errors reach the caller as they are.
            await self._orchestrator.start()
            # What exists now lives as long as the process: the collector need not look at it again.
            gc.collect()
            gc.freeze()
            gc.set_threshold(20_000, 20, 50)
            if not self.should_exit:
                await self.serve(sockets=[listener])
        finally:
            await self._orchestrator.stop()
            for number in _STOP_SIGNALS:
                loop.remove_signal_handler(number)
            if reloads:
                loop.remove_signal_handler(signal.SIGHUP)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(f"Orchard is ready at {self._url}", flush=True)
        _log.info("ready at %s", self._url)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # Before waiting for answers under way: those that wait for commands are told to come back.
        await self._orchestrator.begin_stop()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # uvicorn would raise the signal again after a clean stop, and the process would end by it.
        yield

    def _stop(self, number: signal.Signals) -> None:
        if self.should_exit:
            self.force_exit = True
        _log.info("stopping on %s", signal.Signals(number).name)
        self.should_exit = True


@contextlib.contextmanager
def _locked(state_dir: Path) -> Iterator[None]:
    """The state directory for this process alone. Raises `SettingsError`."""
    try:
        state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Also one that was there before: it holds the files of sandboxes and the results of commands.
        state_dir.chmod(0o700)
        lock = os.open(state_dir / "orchestrator.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise SettingsError(
            f"cannot use the state directory {state_dir}: {error}; choose another with --state-dir"
        ) from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(lock, 32, 0).decode("ascii", "replace").strip() or "unknown"
            raise SettingsError(
                f"the state directory {state_dir} is in use by another service (process {holder}): stop that one, or"
                " choose another with --state-dir"
            ) from None
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(lock)


@contextlib.contextmanager
def _listening(settings: ServiceSettings) -> Iterator[socket.socket]:
    """A bound socket: taken before anything is started, so that a busy port is told at once."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, proto)
    except OSError as error:
        raise SettingsError(f"cannot listen on {settings.host}: {error}") from None
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as error:
            raise SettingsError(
                f"cannot listen on {settings.host}:{settings.port}: {error}; use another --port (0 takes a free one)"
            ) from None
        yield listener


def _url(settings: ServiceSettings, listener: socket.socket) -> str:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"http://{host}:{listener.getsockname()[1]}"


def _raise_file_limit() -> None:
    """A thousand sandboxes and as many clients need a descriptor each. Not more than that: commands inherit the
    limit, and some programs close every descriptor below it one by one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
