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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import uvicorn
from starlette.types import ASGIApp

from orchard.env.errors import SettingsError
from orchard.env.images.pull import PullSettings
from orchard.env.orchestrator import logging as logs
from orchard.env.orchestrator.app import create_app
from orchard.env.orchestrator.settings import ServiceSettings
from orchard.env.orchestrator.stores.sqlite import SqliteStore, look_into
from orchard.env.runtimes.base import Runtime
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
    pull = PullSettings(
        auth_file=settings.registry_auth_file, insecure_registries=tuple(settings.insecure_registries)
    )

    def runtime_of(folder: Path) -> Runtime:
        return make_runtime(
            settings.runtime,
            folder,
            pull=pull,
            pull_missing=settings.pull == "missing",
            egress_resolver=settings.egress_resolver,
        )

    if settings.redis_url is not None:
        _run_with_others(settings, settings.redis_url, runtime_of)
        return
    with _locked(settings.state_dir), _listening(settings) as listener:
        _check_alone(settings.state_dir)
        store = SqliteStore(settings.state_dir / "orchestrator.db")
        app = create_app(settings, runtime_of(settings.state_dir), store)
        _serve(settings, app, app.state.orchestrator, listener)


def _run_with_others(
    settings: ServiceSettings, redis_url: str, runtime_of: Callable[[Path], Runtime]
) -> None:
    # Imported only here: Redis is an extra.
    try:
        from orchard.env.orchestrator.replicas.front import Front
        from orchard.env.orchestrator.replicas.household import Household
    except ModuleNotFoundError as error:
        if error.name != "redis":
            raise
        raise SettingsError("redis_url needs redis: pip install 'orchard-agents[redis]'") from None
    with _locked(settings.state_dir, shared=True), _listening(settings) as listener:
        household = Household(settings, redis_url, runtime_of, lambda app: _config(settings, app))
        _serve(settings, Front(household), household, listener)


def _check_alone(state_dir: Path) -> None:
    """Raises `SettingsError` when services with a Redis left sandboxes that nobody would look after."""
    live = sum(look_into(file).live for file in state_dir.glob("seats/*/orchestrator.db"))
    if live:
        raise SettingsError(
            f"{state_dir} holds {live} sandboxes of services with --redis-url: start one with it again, or choose another"
            " --state-dir"
        )


def _serve(settings: ServiceSettings, app: ASGIApp, work: Work, listener: socket.socket) -> None:
    config = _config(settings, app)
    server = _Server(config, work, _url(settings, listener))
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(server.serve_all(listener))


def _config(settings: ServiceSettings, app: ASGIApp) -> uvicorn.Config:
    return uvicorn.Config(
        app, loop="uvloop", http="httptools", ws="websockets-sansio", ws_max_size=_MAX_FRAME_BYTES,
        ws_ping_interval=_PING_S, ws_ping_timeout=60.0, lifespan="off", access_log=False, log_config=None,
        timeout_keep_alive=settings.keep_alive_s, timeout_graceful_shutdown=settings.shutdown_s,
        backlog=_BACKLOG, server_header=False, date_header=False, proxy_headers=False,
    )  # fmt: skip


class Work(Protocol):
    """What a service does besides HTTP: an orchestrator, or several."""

    async def start(self) -> None: ...

    async def begin_stop(self) -> None: ...

    async def stop(self) -> None: ...

    @property
    def reloads(self) -> bool: ...

    def reload(self) -> None: ...


class _Server(uvicorn.Server):
    """uvicorn's server, with the orchestrator's start and stop around it and our own signals."""

    def __init__(self, config: uvicorn.Config, work: Work, url: str) -> None:
        super().__init__(config)
        self._work = work
        self._url = url

    async def serve_all(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        for number in _STOP_SIGNALS:
            loop.add_signal_handler(number, self._stop, number)
        reloads = self._work.reloads
        if reloads:
            loop.add_signal_handler(signal.SIGHUP, self._work.reload)
        try:
            # Started here and not by the lifespan: its errors reach the caller as they are.
            await self._work.start()
            # What exists now lives as long as the process: the collector need not look at it again.
            gc.collect()
            gc.freeze()
            gc.set_threshold(20_000, 20, 50)
            if not self.should_exit:
                await self.serve(sockets=[listener])
        finally:
            await self._work.stop()
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
        await self._work.begin_stop()
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
def _locked(state_dir: Path, *, shared: bool = False) -> Iterator[None]:
    """The state directory for this process alone, or for those that share it. Raises `SettingsError`."""
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
            fcntl.flock(lock, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
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
