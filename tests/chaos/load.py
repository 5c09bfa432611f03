"""Load that survives what chaos does to it, and a ledger of what the service acknowledged."""

from __future__ import annotations

import http.client
import random
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from tests.support.rest import Answer, Box, Rest, new_id
from tests.support.service import Service

IMAGE = "host"

#: What a client sees when the service is gone in the middle of something.
UNANSWERED = (ConnectionError, http.client.HTTPException, TimeoutError)


@dataclass
class Acknowledged:
    """A job that the service accepted, and its result where a client has already seen it."""

    job_id: str
    sandbox_id: str
    result: dict[str, Any] | None = None

    @property
    def expected_output(self) -> str:
        return f"out-{self.job_id}\n"


@dataclass
class Ledger:
    """What the service owes to its clients. Threads share it."""

    jobs: dict[str, Acknowledged] = field(default_factory=dict)
    sandboxes: set[str] = field(default_factory=set)
    lost: dict[str, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def acknowledge(self, job_id: str, sandbox_id: str, result: dict[str, Any] | None) -> None:
        with self._lock:
            self.jobs[job_id] = Acknowledged(job_id, sandbox_id, result)

    def note_sandbox(self, sandbox_id: str) -> None:
        with self._lock:
            self.sandboxes.add(sandbox_id)

    def note_lost(self, sandbox_id: str, reason: str) -> None:
        with self._lock:
            self.lost[sandbox_id] = reason

    def note_wrong(self, what: str) -> None:
        with self._lock:
            self.wrong.append(what)


class Worker(threading.Thread):
    """Runs commands in a sandbox of its own; after a connection error it asks again under the same ids."""

    def __init__(self, service: Service, ledger: Ledger, stop: threading.Event, seed: int) -> None:
        super().__init__(daemon=True)
        self._rest = Rest(service.base_url, service.api_key)
        self._ledger = ledger
        self._stop_asked = stop
        self._random = random.Random(seed)

    def run(self) -> None:
        try:
            while not self._stop_asked.is_set():
                box = self._sandbox()
                while box is not None and not self._stop_asked.is_set() and self._command(box):
                    time.sleep(self._random.uniform(0, 0.03))
        except BaseException as error:
            self._ledger.note_wrong(f"{type(error).__name__}: {error}")
            raise

    def _ask(self, method: str, path: str, body: Any = None, **query: Any) -> Answer | None:
        """The answer, however often it takes; None when the load is over first."""
        while True:
            try:
                answer = self._rest.request(method, path, body, **query)
            except UNANSWERED:
                answer = None
            if answer is not None and answer.status != 503:
                return answer
            if self._stop_asked.wait(0.05):
                return None

    def _sandbox(self) -> Box | None:
        sandbox_id = new_id("chaos")
        self._ledger.note_sandbox(sandbox_id)
        answer = self._ask("POST", "/sandboxes", {"image": IMAGE, "sandbox_id": sandbox_id})
        if answer is None:
            return None
        if answer.status >= 300:
            self._ledger.note_wrong(f"create: {answer}")
            return None
        answer = self._ask("GET", f"/sandboxes/{sandbox_id}/wait", timeout=30)
        if answer is None:
            return None
        if answer.status == 200 and answer.json["status"] == "ready":
            return Box(self._rest, sandbox_id)
        reason = answer.json.get("reason")
        if not reason:
            self._ledger.note_wrong(f"not ready and no reason: {answer}")
        self._ledger.note_lost(sandbox_id, str(reason))
        return None

    def _command(self, box: Box) -> bool:
        """One command; False when the sandbox is gone."""
        job_id = new_id("job")
        pause = f"{self._random.choice([0, 0, 0.02, 0.2, 0.6]):g}"
        command = f"echo {job_id} >> /tmp/ran; sleep {pause}; echo out-{job_id}"
        wait = self._random.random() < 0.6
        answer = self._ask(
            "POST",
            f"{box.path}/exec",
            {"command": command, "job_id": job_id, "wait": wait, "timeout_seconds": 60},
        )
        if answer is None:
            return True
        if 200 <= answer.status < 300:
            job = answer.json if answer.json.get("status") in ("succeeded", "failed") else None
            self._ledger.acknowledge(job_id, box.id, job)
            return True
        if answer.status == 404 and answer.code == "sandbox_dead":
            self._ledger.note_lost(box.id, answer.json["reason"])
            return False
        self._ledger.note_wrong(f"exec: {answer}")
        return False


def settle(rest: Rest, ledger: Ledger, within_s: float = 60.0) -> None:
    """Waits until every acknowledged job has ended; checks each against what is known of it."""
    deadline = time.monotonic() + within_s
    for acknowledged in ledger.jobs.values():
        left = max(1.0, deadline - time.monotonic())
        job = rest.get(f"/jobs/{acknowledged.job_id}/wait", timeout=left).expect(200)
        assert job["status"] in ("succeeded", "failed"), job
        if job["status"] == "succeeded":
            assert job["stdout"] == acknowledged.expected_output, job
        else:
            assert job["error"], f"a job that failed without a reason: {job}"
            assert job["sandbox_id"] in ledger.lost or job["infra"], job
        if acknowledged.result is not None:
            seen = acknowledged.result
            assert {k: job[k] for k in ("status", "stdout", "exit_code")} == {
                k: seen[k] for k in ("status", "stdout", "exit_code")
            }, f"a result changed after it was seen: {seen} became {job}"


def check_ran_once(rest: Rest, ledger: Ledger) -> None:
    """In every sandbox that lives: no command ran twice, and each that succeeded ran."""
    by_sandbox: dict[str, list[Acknowledged]] = {}
    for acknowledged in ledger.jobs.values():
        by_sandbox.setdefault(acknowledged.sandbox_id, []).append(acknowledged)
    for sandbox_id, jobs in by_sandbox.items():
        box = Box(rest, sandbox_id)
        if rest.get(box.path).status != 200:
            continue
        lines = box.out(["/bin/cat", "/tmp/ran"]).split()
        assert len(lines) == len(set(lines)), (
            f"ran twice: {sorted(x for x in lines if lines.count(x) > 1)[:5]}"
        )
        assert {job.job_id for job in jobs} <= set(lines), "an acknowledged command never ran"
