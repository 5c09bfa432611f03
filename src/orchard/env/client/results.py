"""What the client gives back that the REST models alone do not."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Self

from orchard.env.contract import Job, JobList, JobStatus, StreamName
from orchard.env.errors import CommandFailed, CommandTimeout, OrchardError, from_body

_SHOWN_CHARACTERS = 400


@dataclass(frozen=True, slots=True)
class OutputChunk:
    """Bytes that a command has written to one of its streams, beginning at `offset` of that stream."""

    stream: StreamName
    offset: int
    data: bytes

    @property
    def end(self) -> int:
        """Where the next bytes begin."""
        return self.offset + len(self.data)


@dataclass(frozen=True, slots=True)
class OutputGap:
    """Bytes of a stream that are not kept any more: from `start` up to, not including, `end`."""

    stream: StreamName
    start: int
    end: int


class JobResult(Job):
    """A command and what became of it (see `orchard.env.contract.Job`), with conveniences."""

    @property
    def ok(self) -> bool:
        """It ended with exit code 0."""
        return self.status is JobStatus.SUCCEEDED

    @property
    def succeeded(self) -> bool:
        """The same as `ok`."""
        return self.ok

    @property
    def failed(self) -> bool:
        """It ended in any other way than with exit code 0."""
        return self.status is JobStatus.FAILED

    @property
    def is_complete(self) -> bool:
        """It ended, one way or the other."""
        return self.status.terminal

    def check(self) -> Self:
        """This result if the command succeeded.

        Raises `CommandTimeout` or `CommandFailed` (their `job` is this result), or the infrastructure error
        that ended the command.
        """
        self.raise_for_infrastructure()
        if self.timed_out:
            raise CommandTimeout(f"{self._story('timed out')}; give it a longer timeout_s", job=self)
        if not self.is_complete:
            raise CommandFailed(self._story(f"has not ended (it is {self.status})"), job=self)
        if not self.ok:
            raise CommandFailed(self._story(self._ending()), job=self)
        return self

    def raise_for_infrastructure(self) -> None:
        """Raises the typed error (with `job` in its `extra`) if infrastructure, not the command, failed."""
        if not self.infra or not self.is_complete:
            return
        error: OrchardError = from_body(
            503,
            {
                "code": self.error_code or "infrastructure_error",
                "detail": self.error or "the command was lost to a failure of infrastructure",
                "infra": True,
                "job": self,
            },
        )
        raise error

    def _ending(self) -> str:
        if self.signal:
            text = f"was ended by signal {self.signal}"
        elif self.exit_code is None:
            text = "did not run to its end"
        else:
            text = f"exited with {self.exit_code}"
        if self.oom_killed:
            text += " (out of memory)"
        return f"{text}: {self.error}" if self.error else text

    def _story(self, ending: str) -> str:
        command = self.command if isinstance(self.command, str) else shlex.join(self.command)
        if len(command) > _SHOWN_CHARACTERS:
            command = command[:_SHOWN_CHARACTERS] + "…"
        story = f"command {command!r} {ending}"
        tail = self.stderr.strip()[-_SHOWN_CHARACTERS:]
        return f"{story}; stderr ends: {tail!r}" if tail else story


class JobResultList(JobList):
    """The answer of GET /sandboxes/{id}/jobs."""

    jobs: list[JobResult]  # type: ignore[assignment]
