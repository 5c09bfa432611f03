"""A real registry on loopback (Debian's docker-registry), images pushed to it, and a faulty way to it."""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from tests.env.images.archives import Layout
from tests.support.waiting import eventually

_NEEDED = {"docker-registry": "docker-registry", "skopeo": "skopeo"}


def need_registry() -> None:
    """Skip where the programs are missing."""
    missing = [package for program, package in _NEEDED.items() if shutil.which(program) is None]
    if missing:
        pytest.skip(f"needs {' and '.join(missing)} (apt install {' '.join(missing)})")


@dataclass
class Registry:
    """`host` is `127.0.0.1:PORT`."""

    host: str
    folder: Path
    auth_file: Path | None = None

    def push(self, layout: Layout, name: str) -> str:
        """Push the one image (or index) of a layout as `name`; its full reference."""
        path = layout.write(self.folder / f"push-{name.replace('/', '_').replace(':', '-')}")
        auth = ["--dest-authfile", str(self.auth_file)] if self.auth_file else []
        ref = f"{self.host}/{name}"
        command = [
            "skopeo",
            "copy",
            "--all",
            "--quiet",
            "--insecure-policy",
            "--dest-tls-verify=false",
            *auth,
        ]
        subprocess.run(
            [*command, f"oci:{path}", f"docker://{ref}"], check=True, capture_output=True, text=True
        )
        return ref


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def running_registry(folder: Path, htpasswd: str | None = None) -> Iterator[Registry]:
    """docker-registry with its files in `folder`. htpasswd: a line of users, which turns on basic authentication."""
    need_registry()
    folder.mkdir(parents=True, exist_ok=True)
    port = _free_port()
    auth = ""
    if htpasswd is not None:
        (folder / "htpasswd").write_text(htpasswd)
        auth = f"auth: {{htpasswd: {{realm: test, path: {folder / 'htpasswd'}}}}}\n"
    (folder / "config.yml").write_text(
        f"version: 0.1\nlog: {{level: error}}\nstorage: {{filesystem: {{rootdirectory: {folder / 'data'}}}}}\n"
        f"http: {{addr: '127.0.0.1:{port}'}}\n{auth}"
    )
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            ["docker-registry", "serve", str(folder / "config.yml")], stdout=log, stderr=subprocess.STDOUT
        )
    try:
        eventually(lambda: _listens(port), f"docker-registry listens\n{folder / 'log'}")
        yield Registry(f"127.0.0.1:{port}", folder)
    finally:
        process.terminate()
        process.wait()


#: What to answer instead of the registry: a status with headers and a body, or what to do to the registry's own body.
Decide = Callable[[str, str, int], "Fault | None"]


@dataclass(frozen=True)
class Fault:
    """status: answered instead of the registry. cut_after: bytes of the body, then the connection breaks.
    change: the body is another one. hold: nothing more comes until the proxy ends. after: all that only once this
    is true."""

    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    cut_after: int | None = None
    change: Callable[[bytes], bytes] | None = None
    hold: bool = False
    after: Callable[[], bool] = lambda: True


@dataclass
class FaultyRegistry:
    """`decide(method, path, n)` names the fault of the n-th request of that method and path (from 0)."""

    host: str = ""
    decide: Decide = lambda _method, _path, _n: None
    seen: list[tuple[str, str]] = field(default_factory=list)

    def fetched_blobs(self) -> list[str]:
        """The digests that were asked for, in order."""
        return [
            path.rpartition("/")[2] for method, path in self.seen if method == "GET" and "/blobs/" in path
        ]


@contextmanager
def faulty_registry(registry: Registry) -> Iterator[FaultyRegistry]:
    """A real server in front of `registry`, in a thread of its own, since pulls block the one that calls them."""
    faulty = FaultyRegistry()
    loop = asyncio.new_event_loop()
    started = threading.Event()
    ended = asyncio.Event()

    async def serve() -> None:
        async with aiohttp.ClientSession(auto_decompress=False) as session:
            runner = web.AppRunner(_application(faulty, registry.host, session, ended), shutdown_timeout=1)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            faulty.host = f"127.0.0.1:{runner.addresses[0][1]}"
            started.set()
            await ended.wait()
            await runner.cleanup()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), name="faulty registry")
    thread.start()
    started.wait()
    try:
        yield faulty
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()
        loop.close()


def _application(
    faulty: FaultyRegistry, target: str, session: aiohttp.ClientSession, ended: asyncio.Event
) -> web.Application:
    async def handle(request: web.Request) -> web.StreamResponse:
        number = faulty.seen.count((request.method, request.path))
        faulty.seen.append((request.method, request.path))
        fault = faulty.decide(request.method, request.path, number) or Fault()
        while not fault.after() and not ended.is_set():  # noqa: ASYNC110 - a condition of anything, no event
            await asyncio.sleep(0.02)
        if fault.status is not None:
            body = {"errors": [{"code": "TOOMANYREQUESTS", "message": "slow down"}]}
            return web.json_response(body, status=fault.status, headers=fault.headers)
        # A list, since skopeo repeats Accept.
        headers = [(name, value) for name, value in request.headers.items() if name.lower() != "host"]
        url = f"http://{target}{request.path_qs}"
        async with session.request(request.method, url, headers=headers, allow_redirects=False) as answer:
            content = await answer.read()
            kept = {
                n: v for n, v in answer.headers.items() if n.lower() not in ("content-length", "connection")
            }
        content = fault.change(content) if fault.change else content
        response = web.StreamResponse(status=answer.status, headers=kept)
        # HEAD has no body, but tells the length of one.
        response.content_length = int(answer.headers.get("Content-Length", len(content)))
        await response.prepare(request)
        if request.method == "HEAD":
            return response
        await response.write(content[: fault.cut_after])
        if fault.hold:
            await ended.wait()
        if fault.cut_after is not None and request.transport is not None:
            request.transport.abort()
        return response

    application = web.Application(client_max_size=1 << 30)
    application.router.add_route("*", "/{path:.*}", handle)
    return application
