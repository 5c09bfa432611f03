# Generated from aio/client.py by tools/generate_sync_client.py; change that and run it.
"""The synchronous client of the environment service."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Self, TypeAlias

from orchard.env.client.aio.client import AsyncSandboxClient
from orchard.env.client.aio.sandbox import AsyncSandbox
from orchard.env.client.portal import Portal
from orchard.env.client.results import JobResult
from orchard.env.client.settings import ClientSettings
from orchard.env.client.sync.images import Images
from orchard.env.client.sync.sandbox import Sandbox
from orchard.env.contract import CreateSandbox, Health, OpenTunnel, Resources, SandboxEvent, ServiceInfo
from orchard.env.errors import OrchardError

SandboxIds: TypeAlias = list[str]

BatchOutcome: TypeAlias = list[Sandbox | OrchardError]

Errors: TypeAlias = list[OrchardError]


class SandboxClient:
    """A client of one environment service; safe for any number of threads.

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
        self._portal = Portal()
        self._async = AsyncSandboxClient(base_url, api_key, cleanup=cleanup, settings=settings)
        self._portal.at_close(self._async.close)

    @property
    def base_url(self) -> str:
        """Where the service is."""
        return self._async.base_url

    @property
    def images(self) -> Images:
        """The images that the service keeps."""
        return Images(self._portal, self._async.images)

    def create(
        self,
        image: str,
        *,
        block_network: bool = True,
        allow_egress: Sequence[str] | None = None,
        sandbox_id: str | None = None,
        cpu: str | float | None = None,
        memory: str | int | None = None,
        timeout: float | None = None,
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
    ) -> Sandbox:
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
        return Sandbox(
            self._portal,
            self._portal.call(
                self._async.create(
                    image,
                    block_network=block_network,
                    allow_egress=allow_egress,
                    sandbox_id=sandbox_id,
                    cpu=cpu,
                    memory=memory,
                    timeout=timeout,
                    labels=labels,
                    env=env,
                    working_dir=working_dir,
                    user=user,
                    disk=disk,
                    pids=pids,
                    ttl_seconds=ttl_seconds,
                    heartbeat_timeout=heartbeat_timeout,
                    idempotency_key=idempotency_key,
                    tunnels=tunnels,
                    wait=wait,
                )
            ),
        )

    create_sandbox = create

    def create_batch(
        self, requests: Sequence[CreateSandbox | Mapping[str, object]], *, wait: bool = True
    ) -> BatchOutcome:
        """Create many sandboxes with one request; the results are in the same order.

        Each request is a `CreateSandbox` or a mapping of its fields. What fails is in the result as the error
        it would have raised; it fails alone.
        """
        return [
            Sandbox(self._portal, each) if isinstance(each, AsyncSandbox) else each
            for each in self._portal.call(self._async.create_batch(requests, wait=wait))
        ]

    def get(self, sandbox_id: str) -> Sandbox:
        """A sandbox that exists. Raises `SandboxNotFound`, `SandboxDeleted` or `SandboxFailed`."""
        return Sandbox(self._portal, self._portal.call(self._async.get(sandbox_id)))

    get_sandbox = get

    def delete(self, sandbox_id: str) -> None:
        """Delete a sandbox. Repeating is fine; raises `SandboxNotFound` for an id that never was."""
        self._portal.call(self._async.delete(sandbox_id))

    delete_sandbox = delete

    def delete_all(self, labels: Mapping[str, str]) -> SandboxIds:
        """Delete all of your sandboxes that carry these labels (at least one); returns their ids."""
        return self._portal.call(self._async.delete_all(labels))

    def list(
        self,
        *,
        labels: Mapping[str, str] | None = None,
        status: str | Sequence[str] | None = None,
        page_size: int | None = None,
    ) -> Iterator[Sandbox]:
        """Iterate over your sandboxes (with an admin key: all).

        labels: only those that carry them all. status: only those with one of these; default: the live ones.
        """
        for each in self._portal.iterate(self._async.list(labels=labels, status=status, page_size=page_size)):
            yield Sandbox(self._portal, each)

    def events(
        self, *, labels: Mapping[str, str] | None = None, after: str | None = None
    ) -> Iterator[SandboxEvent]:
        """Iterate over what happens to your sandboxes (with an admin key: to all), without end.

        labels: only of those that carry them all. after: the `id` of an event, to go on after it. The first event
        is `open`; after it, and after a `gap` (events were lost), `list` tells how things stand. A lost
        connection is made anew and goes on where it was.
        """
        yield from self._portal.iterate(self._async.events(labels=labels, after=after))

    def get_job(self, job_id: str) -> JobResult:
        """A command by its id, as it is now. Raises `JobNotFound`."""
        return self._portal.call(self._async.get_job(job_id))

    def info(self) -> ServiceInfo:
        """The service's name and version."""
        return self._portal.call(self._async.info())

    def health(self) -> Health:
        """Whether the service answers."""
        return self._portal.call(self._async.health())

    def resources(self) -> Resources:
        """Capacity and use of the machine or cluster, and of the create queue."""
        return self._portal.call(self._async.resources())

    def cleanup_all(self) -> None:
        """Delete every sandbox that this client owns: created with `cleanup=True`, or in a `with` block."""
        self._portal.call(self._async.cleanup_all())

    def close(self) -> None:
        """Close the connections; with `cleanup=True`, first delete the sandboxes this client created."""
        if self._portal.closed:
            return
        try:
            self._portal.call(self._async.close())
        finally:
            self._portal.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._portal.closed:
            return
        try:
            self._portal.call(self._async.__aexit__(kind, error, trace))
        finally:
            self._portal.close()
