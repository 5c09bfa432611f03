"""The store protocol: what of the orchestrator's state outlives the process.

Writes are buffered by `put_*` and become durable, together and in order, at the next `flush`; an orchestrator
acknowledges nothing before that. Records carry their content as opaque JSON bytes, so a store needs no
knowledge of it and a key-value server serves as well as a database.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class SandboxRecord:
    """One sandbox. data: JSON for the orchestrator alone. ended_at: Unix seconds, None while it lives."""

    sandbox_id: str
    ended_at: float | None
    data: bytes


@dataclass(frozen=True, slots=True)
class JobRecord:
    """One command of one owner.

    digest: of what was asked for, to tell a repeated request from another one; "" when unknown.
    finished_at: Unix seconds, None while it is queued or running. head: the job as a JSON object without its
    output. output: the rest of that object, `,"stdout":…,"stderr":…}`; empty while unfinished.
    """

    owner: str
    job_id: str
    sandbox_id: str
    digest: str
    finished_at: float | None
    head: bytes
    output: bytes = b""

    def json(self) -> bytes:
        """The whole job as JSON."""
        return self.head[:-1] + (self.output or NO_OUTPUT)

    def summary(self) -> bytes:
        """The job as JSON without its output."""
        return self.head[:-1] + NO_OUTPUT


@dataclass(frozen=True, slots=True)
class Expired:
    """What one call of `Store.expire` dropped."""

    jobs: int
    sandbox_ids: tuple[str, ...]


NO_OUTPUT = b',"stdout":"","stderr":""}'


class Store(Protocol):
    """See the module's docstring. Reads see earlier writes of the same store, flushed or not.

    on_lost: called when the store finds that it has lost what it had confirmed; whoever knows, puts it again.
    """

    on_lost: Callable[[], None]

    async def open(self) -> None:
        """Connect or create. Raises `OrchardError` when the place cannot be used."""
        ...

    async def close(self) -> None:
        """Make everything durable and let go."""
        ...

    def put_sandbox(self, record: SandboxRecord) -> None:
        """Insert or replace, at the next flush."""
        ...

    def put_job(self, record: JobRecord) -> None:
        """Insert or replace, at the next flush."""
        ...

    def drop_job(self, owner: str, job_id: str) -> None:
        """Remove it, at the next flush; fine when it is not there."""
        ...

    async def flush(self) -> None:
        """Return when everything put so far is durable: it survives the death of this process."""
        ...

    async def sandbox(self, sandbox_id: str) -> SandboxRecord | None: ...

    async def sandboxes(self) -> list[SandboxRecord]:
        """All kept, live and ended, oldest first."""
        ...

    async def job(self, owner: str | None, job_id: str) -> JobRecord | None:
        """One job with its output; `owner` None finds it under any owner (the latest if several)."""
        ...

    async def unfinished_jobs(self) -> list[JobRecord]:
        """All that are not known to have finished, oldest first."""
        ...

    async def expire(self, job_age_s: float, sandbox_age_s: float) -> Expired:
        """Drop some of the finished jobs and ended sandboxes that were put longer ago than that, in seconds; to be
        repeated until nothing is dropped. Their age is by the store's own clock: the times in the records are of wall
        clocks, which may step."""
        ...
