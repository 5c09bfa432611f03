"""The asynchronous client of the environment service."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import replace
from types import TracebackType
from typing import Self, TypeAlias

from orchard.env.client.aio import jobs
from orchard.env.client.aio.events import follow
from orchard.env.client.aio.images import AsyncImages
from orchard.env.client.aio.sandbox import AsyncSandbox
from orchard.env.client.exits import OwnedSandboxes
from orchard.env.client.results import JobResult
from orchard.env.client.settings import ClientSettings
from orchard.env.client.transport import Transport, build, encode, path_of, wait_query
from orchard.env.contract import (
    BatchCreate,
    BatchResult,
    CreateSandbox,
    DeletedMany,
    Health,
    OpenTunnel,
    Resources,
    SandboxEvent,
    SandboxInfo,
    SandboxList,
    ServiceInfo,
)
from orchard.env.errors import NotFound, OrchardError, from_body

logger = logging.getLogger(__name__)

#: A class with a method `list` cannot name these types in its annotations.
SandboxIds: TypeAlias = list[str]
BatchOutcome: TypeAlias = list[AsyncSandbox | OrchardError]

Errors: TypeAlias = list[OrchardError]

_CLEANUP_PARALLEL = 32
_DISCARD_TIMEOUT_S = 10.0


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

    @property
    def images(self) -> AsyncImages:
        """The images that the service keeps."""
        return AsyncImages(self._transport)

    # ---------------------------------------------------------------------------------------------- sandboxes

    async def create(
        self,
        image: str,
        *,
        block_network: bool = True,
        allow_egress: Sequence[str] | None = None,
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
        tunnels: Sequence[OpenTunnel | Mapping[str, object]] | None = None,
        wait: bool = True,
    ) -> AsyncSandbox:
        """Create a sandbox and wait until it is ready.

        image: "host", "dir:PATH" or the name of an image. block_network: only loopback inside. allow_egress: all
        that it may reach, as "example.org", "*.example.org:443", "10.1.2.0/24:5432". cpu: cores,
        "2" or "500m". memory, disk: bytes, "8Gi". timeout: seconds to become ready (default 600). labels: to
        find it with `list`. env, working_dir, user: defaults of its commands. pids: most processes at once.
        ttl_seconds: longest life (default 24 h). heartbeat_timeout: a lease in seconds, from creation on.
        idempotency_key: your own; a repeat with the same key returns the same sandbox. tunnels: there when it is
        ready, as `{"target": NAME, "listen_port": PORT}`; see `Sandbox.tunnels`. wait=False: return at
        once, see `Sandbox.wait_ready`.

        Raises `SandboxFailed` with the reason when it cannot start. A sandbox that this call does not return
        (an error, a cancelled wait) is deleted, unless you chose its id or key.
        """
        request = build(
            CreateSandbox,
            image=image,
            block_network=block_network,
            allow_egress=None if allow_egress is None else list(allow_egress),
            sandbox_id=sandbox_id or _new_sandbox_id(),
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
            tunnels=None if tunnels is None else [_tunnel(each) for each in tunnels],
        )
        mine = sandbox_id is None and idempotency_key is None
        with_id = [str(request.sandbox_id)] if mine else []
        # The first part of a wait comes with the request: mostly there is no second.
        slice_s = self._transport.settings.wait_slice_s if wait else 0.0
        async with self._discarding(with_id, unless=_was_refused):
            info = await self._transport.call(
                "POST",
                "/sandboxes",
                SandboxInfo,
                body=encode(request),
                query=wait_query(slice_s, "wait") if wait else (),
                silence_s=slice_s + self._transport.settings.request_timeout_s,
            )
        sandbox = self._adopt(info)
        if wait and not info.ready:
            async with self._discarding(with_id, unless=_has_ended):
                await sandbox.wait_ready()
        return sandbox

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
        with_id: SandboxIds = []
        entries = [_with_id_and_key(request, with_id) for request in prepared]
        body = encode(build(BatchCreate, sandboxes=entries))
        async with self._discarding(with_id, unless=_was_refused):
            answer = await self._transport.call("POST", "/sandboxes/batch", BatchResult, body=body)
        outcome: BatchOutcome = [
            from_body(500, entry.error or {}) if entry.sandbox is None else self._adopt(entry.sandbox)
            for entry in answer.results
        ]
        if not wait:
            return outcome
        async with self._discarding(with_id, unless=_has_ended):
            return await asyncio.gather(*map(_when_ready, outcome))

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

    async def events(
        self, *, labels: Mapping[str, str] | None = None, after: str | None = None
    ) -> AsyncIterator[SandboxEvent]:
        """Iterate over what happens to your sandboxes (with an admin key: to all), without end.

        labels: only of those that carry them all. after: the `id` of an event, to go on after it. The first event
        is `open`; after it, and after a `gap` (events were lost), `list` tells how things stand. A lost
        connection is made anew and goes on where it was.
        """
        query = [("label", f"{name}={value}") for name, value in (labels or {}).items()]
        async with aclosing(follow(self._transport, query, after)) as following:
            async for event in following:
                yield event

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
        errors = await self._delete_many(self._owned.ids())
        if errors:
            raise errors[0]

    async def close(self) -> None:
        """Close the connections; with `cleanup=True`, first delete the sandboxes this client created."""
        try:
            if self._settings.cleanup:
                await self.cleanup_all()
        finally:
            self._owned.release()
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

    @asynccontextmanager
    async def _discarding(
        self, sandbox_ids: SandboxIds, *, unless: Callable[[BaseException], bool]
    ) -> AsyncIterator[None]:
        """When the block fails, delete the sandboxes that nobody will ever hear of; the error goes on.

        Best effort: what cannot be reached now ends with its time to live.
        """
        try:
            yield
        except BaseException as error:
            if not unless(error):
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._delete_many(sandbox_ids), _DISCARD_TIMEOUT_S)
            for sandbox_id in sandbox_ids:
                self._owned.discard(sandbox_id)
            raise

    async def _delete_many(self, sandbox_ids: SandboxIds) -> Errors:
        """Delete all, side by side; what went wrong. One that is no more is fine."""
        gate = asyncio.Semaphore(_CLEANUP_PARALLEL)
        errors: Errors = []

        async def remove(sandbox_id: str) -> None:
            async with gate:
                try:
                    await self.delete(sandbox_id)
                except NotFound:
                    self._owned.discard(sandbox_id)
                except OrchardError as error:
                    errors.append(error)

        await asyncio.gather(*map(remove, sandbox_ids))
        return errors


def _was_refused(error: BaseException) -> bool:
    """The creation surely did not happen."""
    return isinstance(error, OrchardError) and not error.extra.get("sent")


def _has_ended(error: BaseException) -> bool:
    """The sandbox is gone already."""
    return isinstance(error, NotFound)


def _with_id_and_key(request: CreateSandbox, with_id: SandboxIds) -> CreateSandbox:
    """The request with a key that makes repeats safe; an id of ours (added to `with_id`) if it is all ours."""
    if request.idempotency_key is not None:
        return request
    fields = {"idempotency_key": uuid.uuid4().hex}
    if request.sandbox_id is None:
        fields["sandbox_id"] = _new_sandbox_id()
        with_id.append(fields["sandbox_id"])
    return request.model_copy(update=fields)


def _tunnel(tunnel: OpenTunnel | Mapping[str, object]) -> OpenTunnel:
    return tunnel if isinstance(tunnel, OpenTunnel) else build(OpenTunnel, **tunnel)


def _new_sandbox_id() -> str:
    return f"sb-{uuid.uuid4().hex[:20]}"


async def _when_ready(each: AsyncSandbox | OrchardError) -> AsyncSandbox | OrchardError:
    if isinstance(each, AsyncSandbox):
        try:
            await each.wait_ready()
        except OrchardError as error:
            return error
    return each
