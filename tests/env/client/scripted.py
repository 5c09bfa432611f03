"""A small HTTP service for the client to talk to: it keeps sandboxes and jobs in memory and runs nothing.

What goes wrong on the way is scripted: `faults[(method, path)]` holds what to do instead of, or after, the next
requests. Only connections and answers are imitated here; what commands do is tested against the real service.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Fault = Callable[["ScriptedService", web.Request], Awaitable[web.StreamResponse]]


def _abort(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def drop_before(service: ScriptedService, request: web.Request) -> web.StreamResponse:
    """The connection breaks before the service sees the request."""
    return _abort(request)


async def drop_after(service: ScriptedService, request: web.Request) -> web.StreamResponse:
    """The service does it, and the connection breaks before the answer."""
    await service.answer(request)
    return _abort(request)


async def bad_gateway_after(service: ScriptedService, request: web.Request) -> web.StreamResponse:
    """The service does it, and a gateway loses the answer."""
    await service.answer(request)
    return web.Response(status=502, text="<html>bad gateway</html>", content_type="text/html")


async def silence_after(service: ScriptedService, request: web.Request) -> web.StreamResponse:
    """The service does it and never answers."""
    await service.answer(request)
    assert service._stopped is not None
    await service._stopped.wait()
    return _abort(request)


async def normally(service: ScriptedService, request: web.Request) -> web.StreamResponse:
    """No fault."""
    return await service.answer(request)


def reply(status: int, body: Any, **headers: str) -> Fault:
    """This answer, instead of doing anything."""

    async def act(service: ScriptedService, request: web.Request) -> web.StreamResponse:
        text = body if isinstance(body, str) else json.dumps(body)
        return web.Response(
            status=status, text=text, headers={n.replace("_", "-"): v for n, v in headers.items()}
        )

    return act


def error(status: int, code: str, **fields: Any) -> Fault:
    """The JSON error of the service."""
    return reply(status, {"detail": f"scripted {code}", "code": code, "retryable": status == 503, **fields})


@dataclass
class Seen:
    """One request as it arrived."""

    method: str
    path: str
    query: dict[str, str]
    body: Any
    headers: dict[str, str]


@dataclass
class ScriptedService:
    """See the module's docstring. Runs in a thread, so that programs and synchronous clients can use it too."""

    base_url: str = ""
    port: int = 0
    version: str = "1.0"
    faults: dict[tuple[str, str], list[Fault]] = field(default_factory=lambda: defaultdict(list))
    seen: list[Seen] = field(default_factory=list)
    sandboxes: dict[str, dict[str, Any]] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    jobs: dict[str, dict[str, Any]] = field(default_factory=dict)
    #: How often each job was really started.
    starts: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    #: Jobs do not end before this many wait at the same time.
    barrier: int = 0
    #: Waits for a job answer 408 this often first.
    waits_over: int = 0
    _waiting: int = 0
    _together: asyncio.Event | None = None
    _loop: asyncio.AbstractEventLoop | None = None
    _stopped: asyncio.Event | None = None
    _thread: threading.Thread | None = None

    def start(self) -> ScriptedService:
        ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(ready)), daemon=True)
        self._thread.start()
        assert ready.wait(10)
        return self

    def stop(self) -> None:
        assert self._loop is not None and self._stopped is not None and self._thread is not None
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(10)

    def on(self, method: str, path: str, *faults: Fault) -> None:
        """What happens to the next requests for this path."""
        self.faults[method, path].extend(faults)

    def requests(self, method: str, path: str) -> list[Seen]:
        """What arrived for this path."""
        return [each for each in self.seen if (each.method, each.path) == (method, path)]

    async def _serve(self, ready: threading.Event) -> None:
        self._loop, self._stopped, self._together = (
            asyncio.get_running_loop(),
            asyncio.Event(),
            asyncio.Event(),
        )
        app = web.Application(client_max_size=64 << 20)
        app.router.add_route("*", "/{tail:.*}", self._handle)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", self.port, backlog=4096, reuse_address=True)
        await site.start()
        self.base_url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        ready.set()
        await self._stopped.wait()
        await runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        self.seen.append(
            Seen(
                request.method,
                request.path,
                dict(request.query),
                json.loads(raw) if raw else None,
                dict(request.headers),
            )
        )
        waiting = self.faults[request.method, request.path]
        response = await (waiting.pop(0) if waiting else normally)(self, request)
        response.headers["X-Orchard-Version"] = self.version
        return response

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """What a service without faults would do."""
        raw = await request.read()
        body = json.loads(raw) if raw else {}
        match [request.method, *request.path.strip("/").split("/")]:
            case ["GET", "health"]:
                return web.json_response({"status": "healthy"})
            case ["POST", "sandboxes"]:
                return self._create(body)
            case ["GET", "sandboxes", sandbox_id] | ["GET", "sandboxes", sandbox_id, "wait"]:
                return self._sandbox(sandbox_id)
            case ["DELETE", "sandboxes", sandbox_id]:
                self.sandboxes.pop(sandbox_id, None)
                return web.json_response({"status": "deleted", "sandbox_id": sandbox_id})
            case ["POST", "sandboxes", sandbox_id, "heartbeat"]:
                return web.json_response({"status": "ok", "sandbox_id": sandbox_id})
            case ["POST", "sandboxes", sandbox_id, "exec"]:
                return await self._exec(sandbox_id, body)
            case ["GET", "jobs", job_id, *rest]:
                return await self._job(job_id, wait=rest == ["wait"])
            case ["POST", "jobs", _, "stdin" | "signal"]:
                return web.json_response({"status": "ok"})
            case ["GET", "sandboxes"]:
                return self._page(request)
        return web.json_response({"detail": "no such path", "code": "not_found"}, status=404)

    def _create(self, body: dict[str, Any]) -> web.Response:
        known = self.keys.get(body.get("idempotency_key", ""))
        if known is None:
            known = body["sandbox_id"]
            self.keys[body.get("idempotency_key", "")] = known
            self.sandboxes[known] = {
                "sandbox_id": known, "image": body["image"], "status": "ready", "ready": True,
                "created_at": time.time(), "timeout": body.get("timeout", 600), "labels": body.get("labels", {}),
            }  # fmt: skip
        return web.json_response({**self.sandboxes[known], "status": "pending", "ready": False})

    def _sandbox(self, sandbox_id: str) -> web.Response:
        if sandbox_id not in self.sandboxes:
            return web.json_response({"detail": "unknown", "code": "sandbox_not_found"}, status=404)
        return web.json_response(self.sandboxes[sandbox_id])

    def _page(self, request: web.Request) -> web.Response:
        limit, begin = int(request.query.get("limit", 2)), int(request.query.get("cursor", 0))
        every = list(self.sandboxes.values())
        rest = len(every) > begin + limit
        page = {
            "sandboxes": every[begin : begin + limit],
            "next_cursor": str(begin + limit) if rest else None,
        }
        return web.json_response(page)

    async def _exec(self, sandbox_id: str, body: dict[str, Any]) -> web.Response:
        job_id = body["job_id"]
        if job_id not in self.jobs:
            self.starts[job_id] += 1
            self.jobs[job_id] = {
                "job_id": job_id, "sandbox_id": sandbox_id, "command": body["command"], "status": "succeeded",
                "stdout": "out\n", "exit_code": 0, "created_at": time.time(),
            }  # fmt: skip
        if not body.get("wait"):
            return web.json_response({"job_id": job_id, "status": "queued"}, status=202)
        if self.barrier:
            assert self._together is not None
            self._waiting += 1
            if self._waiting >= self.barrier:
                self._together.set()
            await self._together.wait()
        return web.json_response(self.jobs[job_id])

    async def _job(self, job_id: str, *, wait: bool) -> web.Response:
        if job_id not in self.jobs:
            return web.json_response({"detail": "unknown", "code": "job_not_found"}, status=404)
        if wait and self.waits_over:
            self.waits_over -= 1
            return web.json_response(
                {"detail": "wait again", "code": "wait_timeout", "retryable": True}, status=408
            )
        return web.json_response(self.jobs[job_id])
