"""Applying patches inside a sandbox, byte for byte, with the tools that its image has."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

from orchard.env.contract import DEFAULT_MAX_OUTPUT_BYTES, PatchRequest
from orchard.env.errors import OrchardError, PatchToolMissing
from orchard.env.orchestrator.agents import Agents
from orchard.env.orchestrator.sandbox import Sandbox
from orchard.env.orchestrator.settings import ServiceSettings

# Whoever owns the tree: the sandbox itself is the boundary, and images often hold checkouts of another user.
_GIT = ["git", "-c", "safe.directory=*"]
# No .orig files: whoever diffs the tree afterwards wants the patch in it and nothing else. Rejected parts are told
# on stdout instead of being left in .rej files. "binary" keeps carriage returns.
_GNU_OPTIONS = ["--batch", "--forward", "--binary", "--no-backup-if-mismatch", "--reject-file=-"]


@dataclass(frozen=True, slots=True)
class _Ran:
    missing: bool
    exit_code: int | None
    stdout: str
    stderr: str
    error: str | None


class Patches:
    def __init__(self, agents: Agents, settings: ServiceSettings) -> None:
        self._agents = agents
        self._settings = settings

    async def apply(self, sandbox: Sandbox, body: PatchRequest, patch: bytes) -> dict[str, Any]:
        """Apply `patch` in `body.cwd`; the fields of `PatchResult`. All of it is applied, or with git nothing.

        In a git work tree by `git apply`, else by `patch`, else by git all the same. Raises `PatchToolMissing`.
        """
        deadline = time.monotonic() + min(
            body.timeout_seconds or self._settings.command_timeout_s,
            max(1.0, sandbox.ttl_deadline - time.monotonic()),
        )
        strip = 1 if body.strip is None else body.strip
        # Whatever the repository's configuration says, white space is part of the patch.
        git_apply = [*_GIT, "apply", f"-p{strip}", "--whitespace=nowarn", "-"]
        inside = await self._run(sandbox, body, deadline, [*_GIT, "rev-parse", "--is-inside-work-tree"])
        if not inside.missing and inside.exit_code == 0 and inside.stdout.strip() == "true":
            return _result(await self._run(sandbox, body, deadline, git_apply, patch))
        ran = await self._run(sandbox, body, deadline, ["patch", f"-p{strip}", *_GNU_OPTIONS], patch)
        if ran.exit_code and "BusyBox" in ran.stderr and "option" in ran.stderr:
            # Refused before anything was done; this one knows no long options.
            ran = await self._run(sandbox, body, deadline, ["patch", f"-p{strip}", "-N"], patch)
        if ran.missing and not inside.missing:
            ran = await self._run(sandbox, body, deadline, git_apply, patch)
        if ran.missing:
            raise PatchToolMissing(
                "neither git nor patch is in this image: install one of them, or write the changed files with"
                f" POST /sandboxes/{sandbox.sandbox_id}/files"
            )
        return _result(ran)

    async def _run(self, sandbox: Sandbox, body: PatchRequest, deadline: float, command: list[str],
                   stdin: bytes = b"") -> _Ran:  # fmt: skip
        arguments: dict[str, Any] = {"cwd": body.cwd} if body.cwd else {}
        job_id = "patch-" + os.urandom(8).hex()
        header, payload = await self._agents.call(
            sandbox, "exec", stdin, job_id=job_id, command=command, wait=True,
            internal=True, concurrent=True, stdin_size=len(stdin), max_output_bytes=DEFAULT_MAX_OUTPUT_BYTES,
            timeout_s=max(0.1, deadline - time.monotonic()), **arguments,
        )  # fmt: skip
        job = header["job"]
        await self._forget(sandbox, job_id)
        size = job["stdout_size"]
        return _Ran(
            missing=job["error_code"] == "command_not_found",
            exit_code=job["exit_code"],
            stdout=payload[:size].decode("utf-8", "replace"),
            stderr=payload[size:].decode("utf-8", "replace"),
            error=job["error"],
        )

    async def _forget(self, sandbox: Sandbox, job_id: str) -> None:
        try:
            await self._agents.call(sandbox, "forget", job_ids=[job_id])
        except OrchardError:
            pass  # the agent forgets by itself in the end


def encode_patch(text: str) -> bytes:
    """The bytes of a patch given as JSON text: lone surrogates stand for bytes that are no UTF-8 (as Python's
    `surrogateescape` makes them), so a patch in any encoding goes through unchanged."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")


def _result(ran: _Ran) -> dict[str, Any]:
    stderr = ran.stderr
    if ran.error:
        stderr = f"{stderr}{ran.error}\n"
    return {"success": ran.exit_code == 0, "stdout": ran.stdout, "stderr": stderr, "exit_code": ran.exit_code}
