"""Clients of the soak: `python -m experiments.soak.clients LEDGER SEED THREADS KEY URL...`, until SIGTERM or worse.

Each thread works in a sandbox of its own through any of the services. After a connection error it asks again under the
same ids, at another service.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.soak.ledger import Ledger
from tests.support.rest import Answer, Rest, new_id

IMAGE = "host"
#: A sandbox outlives its killed client by this much.
LEASE_S = 60.0
_UNANSWERED = (ConnectionError, http.client.HTTPException, TimeoutError, OSError)
#: What may be said of anything while something is broken: come again.
_AGAIN = (503, 507)
_GIVE_UP_S = 90.0


class GivenUp(Exception):
    """The service has not answered for too long; or the soak is over."""


class Client(threading.Thread):
    def __init__(self, ledger: Ledger, services: list[Rest], stop: threading.Event, seed: int) -> None:
        super().__init__(daemon=True)
        self._ledger = ledger
        self._services = services
        self._stop_asked = stop
        self._random = random.Random(seed)
        self._sandbox = ""
        self._open: list[Any] = []

    def run(self) -> None:
        actions: tuple[tuple[Callable[[], None], int], ...] = (
            (self._command, 60), (self._big_output, 3), (self._file, 12), (self._slow_reader, 4), (self._half_open, 2),
            (self._delete, 2), (self._list, 4),
        )  # fmt: skip
        threading.Thread(target=self._keep_beating, daemon=True).start()
        try:
            while not self._stop_asked.is_set():
                if not self._sandbox:
                    self._create()
                    continue
                action = self._random.choices([a for a, _ in actions], [w for _, w in actions])[0]
                began = time.monotonic()
                action()
                self._ledger.note("did", what=action.__name__, seconds=round(time.monotonic() - began, 4))
                self._stop_asked.wait(self._random.uniform(0.1, 0.9))
        except GivenUp as error:
            if not self._stop_asked.is_set():
                self._ledger.note("wrong", what=f"gave up: {error}")
        except Exception as error:
            self._ledger.note("wrong", what=f"{type(error).__name__}: {error}")

    # ------------------------------------------------------------------------------------------- asking

    def _ask(self, ask: Callable[[Rest], Answer], what: str) -> Answer:
        """The answer, however many attempts it takes, at any service."""
        deadline = time.monotonic() + _GIVE_UP_S
        last = "nothing"
        while not self._stop_asked.is_set():
            service = self._random.choice(self._services)
            try:
                answer = ask(service)
                if answer.status not in _AGAIN:
                    return answer
                last = f"{answer.status} {answer.body[:200]!r}"
                if answer.status == 503 and "retry-after" not in answer.headers:
                    self._ledger.note("wrong", what=f"{what}: a 503 without Retry-After: {answer.body!r}")
            except _UNANSWERED as error:
                last = f"{type(error).__name__}: {error}"
            if time.monotonic() > deadline:
                raise GivenUp(f"{what}: {last}")
            self._stop_asked.wait(0.1)
        raise GivenUp("over")

    def _json(self, method: str, path: str, body: Any = None, **query: Any) -> Answer:
        answer = self._ask(lambda service: service.request(method, path, body, **query), f"{method} {path}")
        if answer.status >= 500:
            self._ledger.note("wrong", what=f"{method} {path}: {answer.status} {answer.body[:500]!r}")
        return answer

    def _gone(self, answer: Answer, what: str) -> bool:
        """Whether the sandbox has ended, which is noted."""
        if answer.status == 404 and answer.code in ("sandbox_dead", "sandbox_deleted"):
            self._ledger.note("gone", sandbox=self._sandbox, reason=answer.json["reason"])
            self._sandbox = ""
            return True
        if answer.status >= 400:
            self._ledger.note(
                "wrong", what=f"{what} in {self._sandbox}: {answer.status} {answer.body[:500]!r}"
            )
            self._sandbox = ""
            return True
        return False

    # ------------------------------------------------------------------------------------------- actions

    def _create(self) -> None:
        sandbox_id = new_id("soak")
        body = {"image": IMAGE, "sandbox_id": sandbox_id, "heartbeat_timeout": LEASE_S, "pids": 64}
        self._ledger.note("asked", sandbox=sandbox_id)
        self._sandbox = sandbox_id
        if self._gone(self._json("POST", "/sandboxes", body), "create"):
            return
        while True:
            answer = self._json("GET", f"/sandboxes/{sandbox_id}/wait", timeout=8)
            if answer.status == 408:
                continue
            if self._gone(answer, "wait"):
                return
            if answer.json["status"] == "ready":
                self._ledger.note("ready", sandbox=sandbox_id)
                return
            self._ledger.note("unready", sandbox=sandbox_id, reason=answer.json.get("reason"))
            self._sandbox = ""
            return

    def _keep_beating(self) -> None:
        """As the SDK does: beside the requests, whatever becomes of them."""
        services = [Rest(service.base_url, service.api_key, timeout_s=5.0) for service in self._services]
        turn = 0
        while not self._stop_asked.wait(3.0):
            if sandbox := self._sandbox:
                turn += 1
                try:
                    services[turn % len(services)].post(f"/sandboxes/{sandbox}/heartbeat")
                except _UNANSWERED:
                    pass  # the next one goes to another service

    def _exec(self, command: str, expected: str, wait: bool) -> None:
        job_id = new_id("job")
        command = command.replace("JOB", job_id)
        body = {"command": command, "job_id": job_id, "wait": wait, "timeout_seconds": 60}
        answer = self._json("POST", f"/sandboxes/{self._sandbox}/exec", body)
        sandbox = self._sandbox
        if self._gone(answer, "exec"):
            return
        self._ledger.note("ack", job=job_id, sandbox=sandbox, expected=expected.replace("JOB", job_id)[:100])
        self._note_result(answer)

    def _note_result(self, answer: Answer) -> None:
        job = answer.json
        if job.get("status") in ("succeeded", "failed"):
            digest = hashlib.sha256(job["stdout"].encode()).hexdigest()
            self._ledger.note(
                "result", job=job["job_id"], status=job["status"], exit_code=job["exit_code"], stdout=digest
            )

    def _command(self) -> None:
        pause = self._random.choice([0, 0, 0, 0.02, 0.2, 1.5])
        # A full disk fails the line, not the promise: then nothing says that it ran.
        command = f"sleep {pause:g}; echo JOB >> /tmp/ran && echo out-JOB || echo full-JOB"
        self._exec(command, "out-JOB\n", self._random.random() < 0.6)

    def _big_output(self) -> None:
        self._exec("head -c 100000 /dev/zero | tr '\\0' x", "x" * 100_000, True)

    def _file(self) -> None:
        data = self._random.randbytes(self._random.choice([10, 3000, 40_000]))
        path = f"/tmp/{new_id('file')}"
        headers = {"Content-Type": "application/octet-stream"}
        url = f"/sandboxes/{self._sandbox}/files/content?path={path}"
        answer = self._ask(lambda service: service.raw("PUT", url, data, headers), "PUT content")
        if not self._gone(answer, "write"):
            self._ledger.note("file", sandbox=self._sandbox, path=path, sha=hashlib.sha256(data).hexdigest())

    def _slow_reader(self) -> None:
        """Takes a little of a long stream, and then nothing more for a while."""
        job_id = new_id("job")
        body = {
            "command": "head -c 20000000 /dev/zero", "job_id": job_id, "background": True, "timeout_seconds": 60,
            "max_spool_bytes": 64 << 10, "max_output_bytes": 1000,
        }  # fmt: skip
        if self._gone(self._json("POST", f"/sandboxes/{self._sandbox}/exec", body), "exec"):
            return
        service = self._random.choice(self._services)
        try:
            connection = service.connect()
            connection.request("GET", f"/jobs/{job_id}/stream?raw=stdout", headers=service.headers())
            connection.getresponse().read(65536)
            self._keep(connection)
        except _UNANSWERED:
            pass

    def _half_open(self) -> None:
        """A request that never gets further than its first half."""
        service = self._random.choice(self._services)
        host, _, port = service.base_url.rpartition("//")[2].partition(":")
        try:
            sock = socket.create_connection((host, int(port)), timeout=5)
            sock.sendall(b"POST /sandboxes HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
            self._keep(sock)
        except OSError:
            pass

    def _keep(self, what: Any) -> None:
        self._open.append(what)
        if len(self._open) > 3:
            self._open.pop(0).close()

    def _delete(self) -> None:
        answer = self._json("DELETE", f"/sandboxes/{self._sandbox}")
        if answer.status == 200:
            self._ledger.note("deleted", sandbox=self._sandbox)
        else:
            self._ledger.note("wrong", what=f"delete {self._sandbox}: {answer.status} {answer.body[:300]!r}")
        self._sandbox = ""

    def _list(self) -> None:
        answer = self._json("GET", "/sandboxes", limit=5)
        if answer.status != 200:
            self._ledger.note("wrong", what=f"list: {answer.status} {answer.body[:300]!r}")


def main() -> None:
    path, seed, threads, key, *urls = sys.argv[1:]
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    ledger = Ledger(Path(path))
    rng = random.Random(int(seed))
    clients = [
        Client(ledger, [Rest(url, key, timeout_s=15.0) for url in urls], stop, rng.randrange(1 << 30))
        for _ in range(int(threads))
    ]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    print(json.dumps({"ended": len(clients)}))


if __name__ == "__main__":
    main()
