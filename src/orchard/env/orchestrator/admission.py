"""Whether a creation is let in: what the key may ask for, its quotas, the limits of the service."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Protocol

from orchard.env.contract import CreateSandbox
from orchard.env.errors import Forbidden, Overloaded, QuotaExceeded
from orchard.env.orchestrator.auth import Principal
from orchard.env.orchestrator.catalog import Catalog
from orchard.env.orchestrator.metrics import Metrics
from orchard.env.orchestrator.quotas import Others, Rates, check_use


class Neighbourhood(Protocol):
    """Other services that share the work."""

    def creation(
        self, principal: Principal, body: CreateSandbox, sandbox_id: str
    ) -> AbstractAsyncContextManager[Others | None]:
        """The sole right to make this sandbox; what others hold, as far as it matters. Raises `Elsewhere`."""
        ...

    async def created(self, principal: Principal) -> None:
        """Have others count a creation for its owner's rate."""
        ...


class Admission:
    """max_sandboxes: live ones of all owners, None for no limit."""

    def __init__(self, catalog: Catalog, metrics: Metrics, max_sandboxes: int | None) -> None:
        self._catalog = catalog
        self._metrics = metrics
        self._max_sandboxes = max_sandboxes
        self._rates = Rates()

    def check(self, principal: Principal, body: CreateSandbox, others: Others | None = None) -> None:
        """others: what other services hold. Raises `QuotaExceeded`, `Overloaded`, or `InvalidRequest` where a quota
        needs to know more."""
        quotas = principal.quotas
        use, live = self._catalog.use_of(principal.owner), len(self._catalog.live)
        if others is not None:
            use, live = use + others.use, live + others.live
        try:
            check_use(principal.owner, quotas, use, body)
            self._rates.check(principal.owner, quotas.creates_per_minute)
        except QuotaExceeded as error:
            self._metrics.quota_refusals.labels(error.extra["quota"]).inc()
            raise
        limit = self._max_sandboxes
        if limit is not None and live >= limit:
            raise Overloaded(
                f"the service holds {limit} sandboxes, its limit; try again when some have ended",
                retry_after_s=5.0,
            )

    @property
    def limits_all(self) -> bool:
        """What all owners hold matters."""
        return self._max_sandboxes is not None

    def admitted(self, principal: Principal) -> None:
        """It was let in: it counts for the rate of its owner."""
        self._rates.take(principal.owner, principal.quotas.creates_per_minute)

    def taken(self, owner: str, per_minute: int) -> None:
        """Another service let one in: it counts here as well."""
        self._rates.take(owner, per_minute)


def check_image(principal: Principal, image: str) -> None:
    """A directory of the machine as an image would let a tenant read whatever lies there. Raises `Forbidden`."""
    if image.startswith("dir:") and not principal.admin:
        raise Forbidden("images of the kind dir:PATH are for admin keys; use an image that was imported")
