"""The asynchronous client of the environment service."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self, TypeAlias

from orchard.env.client.aio import jobs
from orchard.env.client.aio.sandbox import AsyncSandbox
from orchard.env.client.exits import OwnedSandboxes
from orchard.env.client.results import JobResult
from orchard.env.client.settings import ClientSettings
from orchard.env.client.transport import Transport, build, encode, path_of
from orchard.env.contract import (
    BatchCreate,
    BatchResult,
    CreateSandbox,
    DeletedMany,
    Health,
    Resources,
    SandboxInfo,
    SandboxList,
    ServiceInfo,
)
from orchard.env.errors import NotFound, OrchardError, from_body

logger = logging.getLogger(__name__)

#: A class with a method `list` cannot name these types in its annotations.
SandboxIds: TypeAlias = list[str]
BatchOutcome: TypeAlias = list[AsyncSandbox | OrchardError]

_CLEANUP_PARALLEL = 32


class AsyncSandboxClient:
    """A client of one environment service; safe for any number of tasks.

    base_url: default ORCHARD_BASE_URL, SANDBOX_BASE_URL or http://localhost:8000. api_key: default
    ORCHARD_API_KEY or SANDBOX_API_KEY. cleanup: delete the sandboxes that this client created when it closes
    or the program ends (also by SIGTERM or Ctrl-C); without it they live on until their time to live ends,
    except those used as context managers. settings: everything else, see `ClientSettings`.

    Requests are sent again after connection errors and 503, with backoff, where a repeat is safe: every
    command and every creation carries an id for that purpose. All errors are `OrchardError`s.
    """

    def __init__(
        self,
        base_url: str | None = None,
        api_key: str | None = None,
        *,
        cleanup: bool = False,
        settings: ClientSettings | None = None,
    ) -> None:
        given = settings or ClientSettings()
        self._settings = replace(
            given,
            base_url=base_url or given.base_url,
            api_key=api_key or given.api_key,
            cleanup=cleanup or given.cleanup,
        )
        self._transport = Transport(self._settings)
        self._owned = OwnedSandboxes(self._settings)
        if self._settings.cleanup:
            self._owned.prepare()

    @property
    def base_url(self) -> str:
        """Where the service is."""
        return self._settings.base_url

    # ---------------------------------------------------------------------------------------------- sandboxes

    async def create(
        self,
        image: str,
        *,
        block_network: bool = True,
        sandbox_id: str | None = None,
        cpu: str | float | None = None,
        memory: str | int | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 - the contract's name, carried out by the service
        labels: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
        working_dir: str | None = None,
        user: str | None = None,
        disk: str | int | None = None,
        pids: int | None = None,
        ttl_seconds: float | None = None,
        heartbeat_timeout: float | None = None,
        idempotency_key: str | None = None,
        wait: bool = True,
    ) -> AsyncSandbox:
        """Create a sandbox and wait until it is ready.

        image: "host", "dir:PATH" or the name of an image. block_network: only loopback inside. cpu: cores,
        "2" or "500m". memory, disk: bytes, "8Gi". timeout: seconds to become ready (default 600). labels: to
        find it with `list`. env, working_dir, user: defaults of its commands. pids: most processes at once.
        ttl_seconds: longest life (default 24 h). heartbeat_timeout: a lease in seconds, from creation on.
        idempotency_key: your own; a repeat with the same key returns the same sandbox. wait=False: return at
        once, see `Sandbox.wait_ready`.

        Raises `SandboxFailed` with the reason when it cannot start. A sandbox that this call does not return
        (an error, a cancelled wait) is deleted, unless you chose its id or key.
        """
        request = build(
            CreateSandbox,
            image=image,
            block_network=block_network,
            sandbox_id=sandbox_id or f"sb-{uuid.uuid4().hex[:20]}",
            cpu=cpu,
            memory=memory,
            timeout=timeout,
            labels=None if labels is None else dict(labels),
            env=None if env is None else dict(env),
            working_dir=working_dir,
            user=user,
            disk=disk,
            pids=pids,
            ttl_seconds=ttl_seconds,
            heartbeat_timeout=heartbeat_timeout,
            idempotency_key=idempotency_key or uuid.uuid4().hex,
        )
        chosen = sandbox_id is not None or idempotency_key is not None
        return await self._create(request, wait=wait, discard=not chosen)

    create_sandbox = create

    async def create_batch(
        self, requests: Sequence[CreateSandbox | Mapping[str, object]], *, wait: bool = True
    ) -> BatchOutcome:
        """Create many sandboxes with one request; the results are in the same order.

        Each request is a `CreateSandbox` or a mapping of its fields. What fails is in the result as the error
        it would have raised; it fails alone.
        """
        prepared = [
            request if isinstance(request, CreateSandbox) else build(CreateSandbox, **request)
            for request in requests
        ]
        keyed = [
            request.model_copy(update={"idempotency_key": request.idempotency_key or uuid.uuid4().hex})
            for request in prepared
        ]
        body = encode(build(BatchCreate, sandboxes=keyed))
        answer = await self._transport.call("POST", "/sandboxes/batch", BatchResult, body=body)
        outcome: BatchOutcome = []
        for entry in answer.results:
            if entry.sandbox is not None:
                outcome.append(self._adopt(entry.sandbox))
            else:
                outcome.append(from_body(500, entry.error or {}))
        if not wait:
            return outcome

        async def ready(each: AsyncSandbox | OrchardError) -> AsyncSandbox | OrchardError:
            if isinstance(each, AsyncSandbox):
                try:
                    await each.wait_ready()
                except OrchardError as error:
                    return error
            return each

        return await asyncio.gather(*(ready(each) for each in outcome))

    async def get(self, sandbox_id: str) -> AsyncSandbox:
        """A sandbox that exists. Raises `SandboxNotFound`, `SandboxDeleted` or `SandboxFailed`."""
        info = await self._transport.call("GET", path_of("sandboxes", sandbox_id), SandboxInfo)
        return AsyncSandbox(self._transport, self._owned, info)

    get_sandbox = get

    async def delete(self, sandbox_id: str) -> None:
        """Delete a sandbox. Repeating is fine; raises `SandboxNotFound` for an id that never was."""
        await self._transport.request("DELETE", path_of("sandboxes", sandbox_id))
        self._owned.discard(sandbox_id)

    delete_sandbox = delete

    async def delete_all(self, labels: Mapping[str, str]) -> SandboxIds:
        """Delete all of your sandboxes that carry these labels (at least one); returns their ids."""
        query = [("label", f"{name}={value}") for name, value in labels.items()]
        answer = await self._transport.call("DELETE", "/sandboxes", DeletedMany, query=query)
        for sandbox_id in answer.sandbox_ids:
            self._owned.discard(sandbox_id)
        return answer.sandbox_ids

    async def list(
        self,
        *,
        labels: Mapping[str, str] | None = None,
        status: str | Sequence[str] | None = None,
        page_size: int | None = None,
    ) -> AsyncIterator[AsyncSandbox]:
        """Iterate over your sandboxes (with an admin key: all).

        labels: only those that carry them all. status: only those with one of these; default: the live ones.
        """
        query = [("label", f"{name}={value}") for name, value in (labels or {}).items()]
        if status is not None:
            wanted = [status] if isinstance(status, str) else status
            query += [("status", str(each)) for each in wanted]
        if page_size is not None:
            query.append(("limit", str(page_size)))
        cursor: str | None = None
        while True:
            here = [*query, ("cursor", cursor)] if cursor else query
            page = await self._transport.call("GET", "/sandboxes", SandboxList, query=here)
            for info in page.sandboxes:
                yield AsyncSandbox(self._transport, self._owned, info)
            cursor = page.next_cursor
            if not cursor:
                return

    # ------------------------------------------------------------------------------------------------ service

    async def get_job(self, job_id: str) -> JobResult:
        """A command by its id, as it is now. Raises `JobNotFound`."""
        return await jobs.fetch(self._transport, job_id)

    async def info(self) -> ServiceInfo:
        """The service's name and version."""
        return await self._transport.call("GET", "/", ServiceInfo)

    async def health(self) -> Health:
        """Whether the service answers."""
        return await self._transport.call("GET", "/health", Health)

    async def resources(self) -> Resources:
        """Capacity and use of the machine or cluster, and of the create queue."""
        return await self._transport.call("GET", "/resources", Resources)

    # -------------------------------------------------------------------------------------- end of the client

    async def cleanup_all(self) -> None:
        """Delete every sandbox that this client owns: created with `cleanup=True`, or in a `with` block."""
        gate = asyncio.Semaphore(_CLEANUP_PARALLEL)

        async def remove(sandbox_id: str) -> None:
            async with gate:
                try:
                    await self.delete(sandbox_id)
                except NotFound:
                    self._owned.discard(sandbox_id)

        results = await asyncio.gather(*map(remove, self._owned.ids()), return_exceptions=True)
        errors = [result for result in results if isinstance(result, BaseException)]
        if errors:
            raise errors[0]

    async def close(self) -> None:
        """Close the connections; with `cleanup=True`, first delete the sandboxes this client created."""
        try:
            if self._settings.cleanup:
                await self.cleanup_all()
        finally:
            await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            await self.close()
        except OrchardError as failure:
            if error is None:
                raise
            # The error of the block matters more; the exit hook tries once more.
            logger.warning("sandboxes could not be cleaned up: %s", failure)

    def _adopt(self, info: SandboxInfo) -> AsyncSandbox:
        if self._settings.cleanup:
            self._owned.add(info.sandbox_id)
        return AsyncSandbox(self._transport, self._owned, info)

    async def _create(self, request: CreateSandbox, *, wait: bool, discard: bool) -> AsyncSandbox:
        sandbox_id = str(request.sandbox_id)
        try:
            info = await self._transport.call("POST", "/sandboxes", SandboxInfo, body=encode(request))
        except BaseException as error:
            refused = isinstance(error, OrchardError) and not error.extra.get("sent")
            if discard and not refused:
                await self._discard(sandbox_id)
            raise
        sandbox = self._adopt(info)
        if not wait:
            return sandbox
        try:
            await sandbox.wait_ready()
        except BaseException as error:
            if discard and not isinstance(error, NotFound):
                await self._discard(sandbox_id)
            self._owned.discard(sandbox_id)
            raise
        return sandbox

    async def _discard(self, sandbox_id: str) -> None:
        """Remove what nobody will ever hear of; best effort, the time to live does the rest."""
        try:
            await asyncio.wait_for(self.delete(sandbox_id), timeout=10)
        except (OrchardError, TimeoutError) as error:
            logger.debug("sandbox %s could not be discarded: %s", sandbox_id, error)
        self._owned.discard(sandbox_id)
