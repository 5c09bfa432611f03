"""The output of a command as it is written, from any offset on, through broken connections and restarts.

What is sent is asked of the agent piece by piece: a reader that stops reading asks for nothing, and costs nothing. The
agent keeps the newest output in its spool, so that the command is never held up.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from orchard.env.errors import AgentUnreachable, JobNotFound
from orchard.env.orchestrator.jobtable import LiveJob
from orchard.env.orchestrator.stores.base import JobRecord
from orchard.env.runtimes.base import Runtime

#: An idle stream says something this often, so that neither side nor anything between takes it for dead.
KEEPALIVE_S = 10.0
_RETRY_MIN_S, _RETRY_MAX_S = 0.02, 1.0


@dataclass(slots=True, frozen=True)
class Piece:
    """Bytes of a stream ("stdout", "stderr"), and where in it they begin."""

    stream: str
    offset: int
    data: bytes


@dataclass(slots=True, frozen=True)
class Gap:
    """Bytes of a stream that are not kept any more: from `start` up to, not including, `end`."""

    stream: str
    start: int
    end: int


@dataclass(slots=True, frozen=True)
class Ended:
    """The command has finished and all of its output was told."""

    record: JobRecord


@dataclass(slots=True, frozen=True)
class Silence:
    """Nothing has happened for `KEEPALIVE_S`."""


Happening = Piece | Gap | Ended | Silence


class Streams:
    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    async def follow(
        self, job: LiveJob | JobRecord, offsets: dict[str, int], limit_bytes: int
    ) -> AsyncGenerator[Happening]:
        """What is written from `offsets` (by stream; others are left out) on, ending with `Ended`.

        limit_bytes: of what is asked for at once. Raises what interrupts a running command's waiters (the service
        stops).
        """
        at = dict(offsets)
        pause_s = _RETRY_MIN_S
        while True:
            live = isinstance(job, LiveJob) and job.record is None
            try:
                answer, payload = await self._ask(job, at, limit_bytes)
            except (AgentUnreachable, JobNotFound):
                if not live:
                    break  # the agent is gone, or has forgotten it: only its record is left
                # It is on its way to the agent, or the connection or the whole sandbox is gone: its end tells.
                if not await self._finished_within(job, pause_s):
                    pause_s = min(2 * pause_s, _RETRY_MAX_S)
                continue
            pause_s = _RETRY_MIN_S
            quiet = True
            for happening in _told(at, answer, payload):
                quiet = False
                yield happening
            if answer["finished"] and all(at[name] >= answer[f"{name}_total"] for name in at):
                break
            if quiet:
                yield Silence()
                # An agent is silent only after a while; one that is so at once must not keep the service busy.
                await asyncio.sleep(_RETRY_MIN_S)
        record = job if isinstance(job, JobRecord) else await job.finished()
        for happening in _rest(record, at):
            yield happening
        yield Ended(record)

    async def _ask(
        self, job: LiveJob | JobRecord, at: dict[str, int], limit_bytes: int
    ) -> tuple[dict[str, Any], bytes]:
        sandbox_id = job.sandbox.sandbox_id if isinstance(job, LiveJob) else job.sandbox_id
        channel = await self._runtime.channel(sandbox_id)
        offsets = {f"{name}_offset": offset for name, offset in at.items()}
        return await channel.call(
            "output", job_id=job.job_id, limit=limit_bytes, timeout_s=KEEPALIVE_S, **offsets
        )

    async def _finished_within(self, job: LiveJob | JobRecord, seconds: float) -> bool:
        assert isinstance(job, LiveJob)
        try:
            async with asyncio.timeout(seconds):
                await job.finished()
            return True
        except TimeoutError:
            return False


def _told(at: dict[str, int], answer: dict[str, Any], payload: bytes) -> list[Happening]:
    """What one answer of the agent tells; `at` moves on."""
    happenings: list[Happening] = []
    begin = 0
    for name in at:
        start, size = answer[f"{name}_offset"], answer[f"{name}_size"]
        if start > at[name]:
            happenings.append(Gap(name, at[name], start))
        if size:
            happenings.append(Piece(name, start, payload[begin : begin + size]))
            begin += size
        at[name] = max(at[name], start + size)
    return happenings


def _rest(record: JobRecord, at: dict[str, int]) -> list[Happening]:
    """What of the output only the record can still tell: the bytes where its text is exact, else that they are gone."""
    head = json.loads(record.head)
    happenings: list[Happening] = []
    for name, offset in at.items():
        total = head[f"{name}_bytes"]
        if offset >= total:
            continue
        text: str = json.loads(record.json())[name]
        data = text.encode("utf-8", "surrogatepass")
        if len(data) == total and "\ufffd" not in text:
            happenings.append(Piece(name, offset, data[offset:]))
        else:
            happenings.append(Gap(name, offset, total))
        at[name] = total
    return happenings
