"""A small REST client over `http.client`: what a program without our SDK would send."""

from __future__ import annotations

import base64
import http.client
import json
import threading
import time
import urllib.parse
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.support.waiting import eventually

JsonObject = dict[str, Any]

#: A connection idle for longer is opened anew: services may close idle ones at any time.
_IDLE_S = 20.0


def new_id(prefix: str = "t") -> str:
    """A valid id that nobody else uses."""
    return f"{prefix}-{uuid.uuid4().hex[:16]}"


@dataclass(frozen=True)
class Answer:
    """One HTTP answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str | None:
        """The `code` of an error body."""
        return self.json.get("code")

    def expect(self, *statuses: int) -> Any:
        """The JSON body; fails with the whole answer unless the status is one of `statuses` (default any 2xx)."""
        fine = self.status in statuses if statuses else 200 <= self.status < 300
        assert fine, f"HTTP {self.status} (expected {statuses or '2xx'}): {self.body[:2000]!r}"
        return self.json


class Rest:
    """Requests to one service with one key. Threads may share it: each has its own connection."""

    def __init__(self, base_url: str, api_key: str | None, timeout_s: float = 120.0) -> None:
        parts = urllib.parse.urlsplit(base_url)
        assert parts.hostname and parts.port, base_url
        self.base_url = base_url
        self.api_key = api_key
        self._address = (parts.hostname, parts.port)
        self._timeout_s = timeout_s
        self._local = threading.local()

    def with_key(self, api_key: str | None) -> Rest:
        return Rest(self.base_url, api_key, self._timeout_s)

    def connect(self) -> http.client.HTTPConnection:
        """A connection of one's own, to be closed by the caller."""
        return http.client.HTTPConnection(*self._address, timeout=self._timeout_s)

    def headers(self) -> dict[str, str]:
        return {"X-API-Key": self.api_key} if self.api_key is not None else {}

    def raw(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
        query: dict[str, Any] | None = None,
    ) -> Answer:
        """One request with these bytes; `path` is sent as it stands."""
        target = path + ("?" + urllib.parse.urlencode(query, doseq=True) if query else "")
        merged = {**self.headers(), **(headers or {})}
        connection: http.client.HTTPConnection | None = getattr(self._local, "connection", None)
        if connection is None or time.monotonic() - self._local.used_at > _IDLE_S:
            self._forget()
            connection = self._local.connection = self.connect()
        try:
            return self._exchange(connection, method, target, body, merged)
        except BaseException:
            self._forget()
            raise
        finally:
            self._local.used_at = time.monotonic()

    def _forget(self) -> None:
        connection = getattr(self._local, "connection", None)
        if connection is not None:
            connection.close()
        self._local.connection = None

    @staticmethod
    def _exchange(
        connection: http.client.HTTPConnection,
        method: str,
        target: str,
        body: bytes | None,
        headers: dict[str, str],
    ) -> Answer:
        connection.request(method, target, body, headers)
        response = connection.getresponse()
        content = response.read()
        return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, content)

    def request(self, method: str, path: str, body: Any = None, /, **query: Any) -> Answer:
        """One request with a JSON body."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} if data is not None else {}
        return self.raw(method, path, data, headers, query)

    def get(self, path: str, /, **query: Any) -> Answer:
        return self.request("GET", path, **query)

    def post(self, path: str, body: Any = None, /, **query: Any) -> Answer:
        return self.request("POST", path, body, **query)

    def patch(self, path: str, body: Any = None) -> Answer:
        return self.request("PATCH", path, body)

    def delete(self, path: str, /, **query: Any) -> Answer:
        return self.request("DELETE", path, **query)

    # -- sandboxes

    def create(self, image: str, **fields: Any) -> Box:
        """A ready sandbox."""
        box = self.submit(image, **fields)
        box.wait_ready()
        return box

    def submit(self, image: str, **fields: Any) -> Box:
        """A sandbox that may still be pending."""
        info = self.post("/sandboxes", {"image": image, **fields}).expect()
        return Box(self, info["sandbox_id"])

    @contextmanager
    def sandbox(self, image: str, **fields: Any) -> Iterator[Box]:
        """A ready sandbox that is deleted at the end."""
        box = self.create(image, **fields)
        try:
            yield box
        finally:
            box.delete()

    def job(self, job_id: str) -> JsonObject:
        return self.get(f"/jobs/{job_id}").expect(200)

    def wait_job(self, job_id: str, timeout_s: float = 60.0) -> JsonObject:
        return self.get(f"/jobs/{job_id}/wait", timeout=timeout_s).expect(200)


class Box:
    """One sandbox through raw REST."""

    def __init__(self, rest: Rest, sandbox_id: str) -> None:
        self.rest = rest
        self.id = sandbox_id
        self.path = f"/sandboxes/{sandbox_id}"

    def info(self) -> JsonObject:
        return self.rest.get(self.path).expect(200)

    def wait_ready(self, timeout_s: float = 60.0) -> JsonObject:
        info = self.rest.get(f"{self.path}/wait", timeout=timeout_s).expect(200)
        assert info["status"] == "ready", info
        return info

    def delete(self) -> None:
        answer = self.rest.delete(self.path)
        assert answer.status in (200, 404), answer

    # -- commands

    def post_exec(self, command: str | list[str], **fields: Any) -> Answer:
        return self.rest.post(f"{self.path}/exec", {"command": command, **fields})

    def run(self, command: str | list[str], **fields: Any) -> JsonObject:
        """The finished job of `command`, whatever became of it."""
        job = self.post_exec(command, wait=True, **fields).expect(200)
        assert job["status"] in ("succeeded", "failed"), job
        return job

    def out(self, command: str | list[str], **fields: Any) -> str:
        """stdout of a command that must exit with 0."""
        job = self.run(command, **fields)
        assert job["exit_code"] == 0, job
        return job["stdout"]

    def start(self, command: str | list[str], **fields: Any) -> str:
        """The job id of a command that was accepted."""
        return self.post_exec(command, **fields).expect()["job_id"]

    def running(self, command: str | list[str], **fields: Any) -> str:
        """The job id of a command that runs."""
        job_id = self.start(command, **fields)
        eventually(lambda: self.rest.job(job_id)["status"] == "running", f"{command!r} runs")
        return job_id

    def python(self, code: str, *argv: str, **fields: Any) -> JsonObject:
        """The finished job of a Python program, in an image that has python3."""
        return self.run(["/usr/bin/python3", "-I", "-c", code, *argv], **fields)

    def agent_start(self) -> str:
        """When the agent (process 1 inside) started, in ticks: the same agent, the same number."""
        return self.out("sed 's/.*) //' /proc/1/stat | cut -d' ' -f20", concurrent=True)

    def until(self, condition: str) -> None:
        """Waits until the shell command `condition` succeeds inside."""
        eventually(
            lambda: self.run(condition, concurrent=True)["exit_code"] == 0, f"{condition!r} inside {self.id}"
        )

    def alive(self) -> bool:
        """The sandbox still runs commands."""
        return self.out(["/bin/echo", "alive"], concurrent=True) == "alive\n"

    # -- files

    def write(self, path: str, content: bytes, **fields: Any) -> JsonObject:
        return self.post_write(path, content, **fields).expect(200, 201)

    def post_write(self, path: str, content: bytes, **fields: Any) -> Answer:
        body = {"path": path, "content": base64.b64encode(content).decode(), **fields}
        return self.rest.post(f"{self.path}/files", body)

    def get_file(self, path: str) -> Answer:
        return self.rest.get(f"{self.path}/files", path=path)

    def read(self, path: str) -> bytes:
        return base64.b64decode(self.get_file(path).expect(200)["content"])

    def get_list(self, path: str) -> Answer:
        return self.rest.get(f"{self.path}/files/list", path=path)

    def ls(self, path: str) -> dict[str, JsonObject]:
        return {entry["name"]: entry for entry in self.get_list(path).expect(200)["files"]}

    def put_content(self, path: str, content: bytes, **query: Any) -> Answer:
        return self.rest.raw("PUT", f"{self.path}/files/content", content, query={"path": path, **query})

    def get_content(self, path: str) -> Answer:
        return self.rest.raw("GET", f"{self.path}/files/content", query={"path": path})

    def put_archive(self, path: str, archive: bytes) -> Answer:
        return self.rest.raw("PUT", f"{self.path}/archive", archive, query={"path": path})

    def get_archive(self, path: str) -> Answer:
        return self.rest.raw("GET", f"{self.path}/archive", query={"path": path})

    def stat(self, path: str, **query: Any) -> Answer:
        return self.rest.get(f"{self.path}/files/stat", path=path, **query)

    def mkdir(self, path: str, **fields: Any) -> Answer:
        return self.rest.post(f"{self.path}/files/mkdir", {"path": path, **fields})

    def move(self, source: str, target: str, **fields: Any) -> Answer:
        return self.rest.post(f"{self.path}/files/move", {"source": source, "target": target, **fields})

    def remove(self, path: str, **query: Any) -> Answer:
        return self.rest.delete(f"{self.path}/files", path=path, **query)

    def apply_patch(self, patch: str, **fields: Any) -> Answer:
        return self.rest.post(f"{self.path}/apply_patch", {"patch": patch, **fields})
