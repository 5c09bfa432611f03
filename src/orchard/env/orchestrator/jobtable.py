"""Which jobs there are: the live ones in memory, finished ones in memory while recent and in the store."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from orchard.env.contract import ExecRequest, JobStatus
from orchard.env.errors import OrchardError
from orchard.env.orchestrator.auth import Principal
from orchard.env.orchestrator.metrics import Metrics
from orchard.env.orchestrator.responses import json_bytes
from orchard.env.orchestrator.sandbox import Sandbox
from orchard.env.orchestrator.stores.base import NO_OUTPUT, JobRecord, Store
from orchard.env.orchestrator.tracing import Tracing

#: A job that runs longer than this gets a record of its start; shorter ones only one of their end.
_SAVE_STARTS_EVERY_S = 0.02


@dataclass(slots=True, eq=False)
class LiveJob:
    """One job that has not finished. acknowledged: somebody was told of it, so it must end with a result.

    record: its result, once it has one. keeps_lease: it holds the sandbox's lease while it lives. terminal: it has one;
    pid is that of its process inside the sandbox then.
    trace: where its span belongs.
    """

    job_id: str
    sandbox: Sandbox
    command: str | list[str]
    digest: str
    created_at: float = field(default_factory=time.time)
    acknowledged: bool = False
    keeps_lease: bool = False
    saved: bool = False
    record: JobRecord | None = None
    refused: OrchardError | None = None
    terminal: bool = False
    pid: int | None = None
    trace: Any = None
    _done: asyncio.Future[JobRecord] | None = None

    @property
    def key(self) -> tuple[str, str]:
        return self.sandbox.owner, self.job_id

    def head(self, status: JobStatus = JobStatus.QUEUED, **fields: Any) -> dict[str, Any]:
        """The job's JSON fields but its output, as known here."""
        return {
            "job_id": self.job_id,
            "sandbox_id": self.sandbox.sandbox_id,
            "command": self.command,
            "status": status.value,
            "exit_code": None,
            "created_at": self.created_at,
            "started_at": None,
            "completed_at": None,
            "error": None,
            "error_code": None,
            "timed_out": False,
            "signal": None,
            "stdout_bytes": 0,
            "stderr_bytes": 0,
            "stdout_truncated": False,
            "stderr_truncated": False,
            "duration_seconds": None,
            "queue_seconds": None,
            "oom_killed": False,
            "session_reset": False,
            "infra": False,
            **fields,
        }

    async def finished(self) -> JobRecord:
        """Its result, when it has one. Raises what it was refused with."""
        if self.record is not None:
            return self.record
        if self.refused is not None:
            raise self.refused
        if self._done is None:
            self._done = asyncio.get_running_loop().create_future()
        return await asyncio.shield(self._done)

    def interrupt(self, error: OrchardError) -> None:
        """Whoever waits has to come back later."""
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)
            self._done.exception()

    def resolve(self) -> None:
        """Wake everybody who waits."""
        if self._done is None or self._done.done():
            return
        if self.record is not None:
            self._done.set_result(self.record)
        elif self.refused is not None:
            self._done.set_exception(self.refused)
            self._done.exception()


class JobTable:
    def __init__(
        self, store: Store, metrics: Metrics, cache_bytes: int, tracing: Tracing | None = None
    ) -> None:
        self._store = store
        self._metrics = metrics
        self._tracing = tracing
        self._live: dict[tuple[str, str], LiveJob] = {}
        #: With the monotonic time of their end.
        self._recent: OrderedDict[tuple[str, str], tuple[JobRecord, float]] = OrderedDict()
        self._recent_bytes = 0
        self._cache_bytes = cache_bytes
        self._unsaved: list[LiveJob] = []
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._live)

    # ------------------------------------------------------------------------------------------ finding

    def live(self, owner: str, job_id: str) -> LiveJob | None:
        return self._live.get((owner, job_id))

    async def finished(self, owner: str, job_id: str) -> JobRecord | None:
        """A finished job of an owner, from memory or the store."""
        if (recent := self._recent.get((owner, job_id))) is not None:
            return recent[0]
        record = await self._store.job(owner, job_id)
        return record if record is not None and record.finished_at is not None else None

    async def visible(self, principal: Principal, job_id: str) -> LiveJob | JobRecord | None:
        """The caller's own job of that id; for an admin, else anybody's."""
        own = self._live.get((principal.owner, job_id)) or await self.finished(principal.owner, job_id)
        if own is not None or not principal.admin:
            return own
        for (_, known), job in self._live.items():
            if known == job_id:
                return job
        record = await self._store.job(None, job_id)
        return record if record is not None and record.finished_at is not None else None

    def known(self) -> Iterator[JobRecord]:
        """Records of all that is in memory, the finished ones first."""
        for record, _ in self._recent.values():
            yield record
        for job in self._live.values():
            if job.saved or job.acknowledged:
                yield _start_record(job)

    # ----------------------------------------------------------------------------------------- changing

    def add(self, job: LiveJob) -> None:
        self._live[job.key] = job
        job.sandbox.jobs[job.job_id] = job
        if self._tracing is not None:
            job.trace = self._tracing.current()
        self._unsaved.append(job)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_SAVE_STARTS_EVERY_S, self._save_starts)

    def _save_starts(self) -> None:
        self._timer = None
        unsaved, self._unsaved = self._unsaved, []
        for job in unsaved:
            if job.record is None and job.refused is None:
                self.save_start(job)

    def save_start(self, job: LiveJob) -> None:
        """Make it known to the next run of the service; durable at the store's next flush."""
        if not job.saved and job.record is None:
            job.saved = True
            self._store.put_job(_start_record(job))

    def complete(self, job: LiveJob, head: dict[str, Any], output: bytes) -> JobRecord:
        """It has finished: `head` are its JSON fields, `output` the rest of that object (see `JobRecord`)."""
        if job.record is not None:
            return job.record
        finished_at = head["completed_at"] or time.time()
        record = JobRecord(
            job.sandbox.owner,
            job.job_id,
            job.sandbox.sandbox_id,
            job.digest,
            finished_at,
            json_bytes(head),
            output,
        )
        job.record = record
        self._drop(job)
        self._store.put_job(record)
        self._cache(job.key, record)
        self._count(head)
        if self._tracing is not None:
            self._tracing.record_command(job.trace, head)
        job.resolve()
        return record

    def refuse(self, job: LiveJob, error: OrchardError) -> None:
        """It was never started. Forgotten, unless somebody was told of it: then it has failed with that error."""
        if job.record is not None or job.refused is not None:
            return
        if job.acknowledged:
            self.fail(job, error.detail, error.code, infra=error.infra)
            return
        job.refused = error
        self._drop(job)
        if job.saved:
            self._store.drop_job(*job.key)
        job.resolve()

    def fail(self, job: LiveJob, error: str, code: str, *, infra: bool) -> JobRecord:
        """It ends without a result of its own."""
        fields = {"error": error, "error_code": code, "infra": infra, "completed_at": time.time()}
        return self.complete(job, job.head(JobStatus.FAILED, **fields), NO_OUTPUT)

    def _drop(self, job: LiveJob) -> None:
        self._live.pop(job.key, None)
        job.sandbox.jobs.pop(job.job_id, None)

    def _cache(self, key: tuple[str, str], record: JobRecord) -> None:
        size = len(record.head) + len(record.output) + 500
        if size > self._cache_bytes // 8:
            return
        self._recent[key] = record, time.monotonic()
        self._recent_bytes += size
        while self._recent_bytes > self._cache_bytes:
            oldest, _ = self._recent.popitem(last=False)[1]
            self._recent_bytes -= len(oldest.head) + len(oldest.output) + 500

    def expire(self, age_s: float) -> None:
        """Forget finished ones of more than `age_s` seconds ago; the store forgets its own."""
        before = time.monotonic() - age_s
        while self._recent:
            key, (record, ended) = next(iter(self._recent.items()))
            if ended >= before:
                return
            del self._recent[key]
            self._recent_bytes -= len(record.head) + len(record.output) + 500

    def _count(self, head: dict[str, Any]) -> None:
        kind = "infra" if head["infra"] else "timeout" if head["timed_out"] else head["status"]
        self._metrics.job_finished[kind].inc()
        if head["duration_seconds"] is not None:
            self._metrics.job_seconds.observe(head["duration_seconds"])

    def close(self, error: OrchardError) -> None:
        """Whoever waits is told `error`; the jobs themselves go on."""
        if self._timer is not None:
            self._timer.cancel()
        self._save_starts()
        for job in self._live.values():
            job.interrupt(error)


def _start_record(job: LiveJob) -> JobRecord:
    head = json_bytes(job.head())
    return JobRecord(job.sandbox.owner, job.job_id, job.sandbox.sandbox_id, job.digest, None, head)


def finished_head(job: LiveJob, answer: dict[str, Any]) -> dict[str, Any]:
    """The JSON fields of a job as its agent tells of it."""
    error_code = answer["error_code"]
    return {
        "job_id": job.job_id,
        "sandbox_id": job.sandbox.sandbox_id,
        "command": job.command,
        "status": answer["status"],
        "exit_code": answer["exit_code"],
        "created_at": answer["created_at"],
        "started_at": answer["started_at"],
        "completed_at": answer["completed_at"],
        "error": answer["error"],
        "error_code": error_code,
        "timed_out": answer["timed_out"],
        "signal": answer["signal"],
        "stdout_bytes": answer["stdout_bytes"],
        "stderr_bytes": answer["stderr_bytes"],
        "stdout_truncated": answer["stdout_truncated"],
        "stderr_truncated": answer["stderr_truncated"],
        "duration_seconds": answer["duration_s"],
        "queue_seconds": answer["queue_s"],
        "oom_killed": answer["oom_killed"],
        "session_reset": answer["session_reset"],
        "infra": error_code == "infrastructure_error",
    }


def output_json(answer: dict[str, Any], payload: bytes) -> bytes:
    """The output part of a job's JSON; bytes that are no UTF-8 become U+FFFD."""
    size = answer["stdout_size"]
    if not payload:
        return NO_OUTPUT
    stdout = payload[:size].decode("utf-8", "replace")
    stderr = payload[size : size + answer["stderr_size"]].decode("utf-8", "replace")
    return b',"stdout":' + json_bytes(stdout) + b',"stderr":' + json_bytes(stderr) + b"}"


def exec_digest(body: ExecRequest) -> str:
    """Same digest, same command: what a repeated request with one job id must agree in."""
    same = (
        body.command,
        body.cwd,
        body.env,
        body.user,
        body.stdin,
        bool(body.login_shell),
        bool(body.background),
        body.session,
    )
    text = json.dumps(same, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
