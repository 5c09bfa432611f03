"""Running a command to its end over connections that may break.

The job lives in the sandbox under an id that the client chose. Whatever happens to the connection, the client
asks for that id again; it sends the command again (under the same id, so that it runs once) only when the
service has never heard of it.
"""

from __future__ import annotations

import asyncio
import time
import uuid

from orchard.env.client.results import JobResult
from orchard.env.client.transport import FOREVER, Repeat, Transport, encode, path_of, wait_query
from orchard.env.contract import ExecRequest, JobQueued, OnDisconnect
from orchard.env.errors import ConnectionFailed, JobNotFound, SandboxTimeout

#: How often a command is sent anew to a service that answers but does not know its job.
_MAX_SUBMISSIONS = 5
_RESUBMIT_PAUSE_S = 0.1


def new_job_id() -> str:
    """An id that no other command has."""
    return f"job-{uuid.uuid4().hex}"


async def start(transport: Transport, sandbox_id: str, request: ExecRequest) -> JobQueued:
    """Hand the command over; returns once the service has accepted it."""
    body = encode(request.model_copy(update={"wait": False}))
    return await transport.call("POST", path_of("sandboxes", sandbox_id, "exec"), JobQueued, body=body)


async def run(transport: Transport, sandbox_id: str, request: ExecRequest) -> JobResult:
    """Run the command and wait for its end. `request.job_id` must be set."""
    job_id = request.job_id
    assert job_id is not None
    body = encode(request.model_copy(update={"wait": True}))
    path = path_of("sandboxes", sandbox_id, "exec")
    if request.on_disconnect is OnDisconnect.KILL:
        return await _run_attached(transport, path, body, job_id)
    submissions = 0
    while True:
        submissions += 1
        try:
            job = await transport.call(
                "POST",
                path,
                JobResult,
                body=body,
                repeat=Repeat.UNLESS_LOST,
                silence_s=transport.settings.wait_slice_s,
            )
        except ConnectionFailed as error:
            # Silence of a slice lands here too: the command may simply be a long one.
            if not error.extra.get("sent"):
                raise
        else:
            if job.is_complete:
                return job
        try:
            return await wait(transport, job_id)
        except JobNotFound:
            if submissions == _MAX_SUBMISSIONS:
                raise
            await asyncio.sleep(_RESUBMIT_PAUSE_S * submissions)


async def wait(transport: Transport, job_id: str, timeout_s: float | None = None) -> JobResult:
    """The job once it has ended, by server-side waits of a slice each.

    Raises `SandboxTimeout` when `timeout_s` ends first; the job goes on.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    path = path_of("jobs", job_id, "wait")
    while True:
        slice_s = transport.settings.wait_slice_s
        if deadline is not None:
            slice_s = max(0.0, min(slice_s, deadline - time.monotonic()))
        try:
            job = await transport.call(
                "GET",
                path,
                JobResult,
                query=wait_query(slice_s),
                silence_s=slice_s + transport.settings.request_timeout_s,
            )
        except SandboxTimeout:
            pass
        else:
            if job.is_complete:
                return job
        if deadline is not None and time.monotonic() >= deadline:
            raise SandboxTimeout(f"job {job_id} has not ended after {timeout_s:g} s; it goes on, wait again")


async def fetch(transport: Transport, job_id: str) -> JobResult:
    """The job as it is now."""
    return await transport.call("GET", path_of("jobs", job_id), JobResult)


async def _run_attached(transport: Transport, path: str, body: bytes, job_id: str) -> JobResult:
    """With on_disconnect=kill the first request must stay open: its end is the command's end.

    A repeat after a lost connection attaches to the job, which the service has stopped by then. Beside the
    silent request the job is looked at every slice, so that a dead connection is not waited for forever.
    """
    post = asyncio.ensure_future(transport.call("POST", path, JobResult, body=body, silence_s=FOREVER))
    unknown = 0
    try:
        while not post.done():
            await asyncio.wait({post}, timeout=transport.settings.wait_slice_s)
            if post.done():
                break
            try:
                job = await fetch(transport, job_id)
            except JobNotFound:
                # Not yet sent, or never to arrive.
                unknown += 1
                if unknown > _MAX_SUBMISSIONS:
                    raise
                continue
            if job.is_complete:
                return job
        job = post.result()
    finally:
        post.cancel()
        await asyncio.wait({post})
        if not post.cancelled():
            post.exception()  # seen: it was raised above, or the job was found by its id
    return job if job.is_complete else await wait(transport, job_id)
