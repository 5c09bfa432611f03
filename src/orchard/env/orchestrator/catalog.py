"""All sandboxes the orchestrator knows: the live ones, the lately ended, and who may see which."""

from __future__ import annotations

import base64
import binascii
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator

from orchard.env.contract import SandboxStatus
from orchard.env.errors import InvalidRequest, SandboxNotFound, SandboxNotReady
from orchard.env.orchestrator.auth import Principal
from orchard.env.orchestrator.quotas import Use
from orchard.env.orchestrator.sandbox import LIVE, Sandbox
from orchard.env.orchestrator.stores.base import Store

#: Ended sandboxes kept in memory; older ones are read from the store.
_ENDED_IN_MEMORY = 5000
#: Characters of a cursor, at most.
MAX_CURSOR = 128


class Catalog:
    def __init__(self, store: Store, boot: str) -> None:
        self._store = store
        self._boot = boot
        self.live: dict[str, Sandbox] = {}
        self._ended: OrderedDict[str, Sandbox] = OrderedDict()
        self._use: dict[str, Use] = {}

    # ------------------------------------------------------------------------------------------ keeping

    def add(self, sandbox: Sandbox) -> None:
        """Take in a new one: live, or ended long ago (at a restart)."""
        if sandbox.live:
            self.live[sandbox.sandbox_id] = sandbox
            self._use.setdefault(sandbox.owner, Use()).count(sandbox.body)
        else:
            self._remember(sandbox)

    def retire(self, sandbox: Sandbox) -> None:
        """It holds nothing any more: it counts as ended from now on."""
        if self.live.pop(sandbox.sandbox_id, None) is not None:
            use = self._use[sandbox.owner]
            use.count(sandbox.body, -1)
            if not use.sandboxes:
                del self._use[sandbox.owner]
        self._remember(sandbox)

    def _remember(self, sandbox: Sandbox) -> None:
        self._ended[sandbox.sandbox_id] = sandbox
        while len(self._ended) > _ENDED_IN_MEMORY:
            self._ended.popitem(last=False)

    def forget(self, sandbox_ids: Iterable[str]) -> None:
        """Their records have expired: the ids are free again."""
        for sandbox_id in sandbox_ids:
            self._ended.pop(sandbox_id, None)

    def known(self) -> Iterator[Sandbox]:
        """All in memory, the ended ones first."""
        yield from self._ended.values()
        yield from self.live.values()

    def use_of(self, owner: str) -> Use:
        """What the live sandboxes of an owner hold, those being freed included."""
        return self._use.get(owner) or Use()

    def counts(self) -> dict[str, int]:
        return dict(Counter(sandbox.status.value for sandbox in self.live.values() if sandbox.live))

    # ------------------------------------------------------------------------------------------ finding

    async def find(self, sandbox_id: str) -> Sandbox | None:
        """By id, whoever owns it; None when never seen, or so long ago that its record has expired."""
        found = self.live.get(sandbox_id) or self._ended.get(sandbox_id)
        if found is not None:
            return found
        record = await self._store.sandbox(sandbox_id)
        # While the store was asked, it may have come into being.
        found = self.live.get(sandbox_id)
        if found is not None or record is None:
            return found
        return Sandbox.from_record(record, self._boot)

    async def get(self, principal: Principal, sandbox_id: str) -> Sandbox:
        """One the caller may see, in whatever state. Raises `SandboxNotFound`, the same for unknown and others'."""
        sandbox = self.live.get(sandbox_id) or await self.find(sandbox_id)
        if sandbox is None or not principal.may_see(sandbox.owner):
            raise SandboxNotFound(f"sandbox {sandbox_id:.80} does not exist; check the id, or create it")
        return sandbox

    async def live_one(self, principal: Principal, sandbox_id: str) -> Sandbox:
        """One that has not ended. Raises its own error if it has."""
        sandbox = await self.get(principal, sandbox_id)
        if (error := sandbox.gone()) is not None:
            raise error
        return sandbox

    async def ready_one(self, principal: Principal, sandbox_id: str) -> Sandbox:
        """One that takes commands and files. Raises its own error if it does not."""
        sandbox = self.live.get(sandbox_id)
        if sandbox is not None and sandbox.status is SandboxStatus.READY and principal.may_see(sandbox.owner):
            return sandbox
        sandbox = await self.live_one(principal, sandbox_id)
        if sandbox.status is not SandboxStatus.READY:
            raise SandboxNotReady(
                f"sandbox {sandbox_id} is {sandbox.status.value}; GET /sandboxes/{sandbox_id}/wait returns when it is ready",
                retry_after_s=1.0,
            )
        return sandbox

    # ------------------------------------------------------------------------------------------ listing

    def select(
        self, principal: Principal, labels: dict[str, str], statuses: set[SandboxStatus]
    ) -> Iterator[Sandbox]:
        """Those the caller may see, with all of the labels, in order of creation. Without statuses: the live ones."""
        groups: list[Iterable[Sandbox]] = [self.live.values()]
        if statuses - set(LIVE):
            groups.append(self._ended.values())
        wanted = statuses or set(LIVE)
        found = [
            sandbox
            for group in groups
            for sandbox in group
            if sandbox.status in wanted
            and principal.may_see(sandbox.owner)
            and all(sandbox.labels.get(name) == value for name, value in labels.items())
        ]
        found.sort(key=_place)
        return iter(found)

    def page(
        self,
        principal: Principal,
        labels: dict[str, str],
        statuses: set[SandboxStatus],
        limit: int,
        cursor: str | None,
    ) -> tuple[list[Sandbox], str | None]:
        """At most `limit` of `select`, after the cursor; and the cursor for what follows."""
        after = _decode_cursor(cursor) if cursor else None
        rows = [
            sandbox
            for sandbox in self.select(principal, labels, statuses)
            if after is None or _place(sandbox) > after
        ]
        page = rows[:limit]
        following = encode_cursor(*_place(page[-1])) if len(rows) > limit else None
        return page, following


def parse_labels(pairs: Iterable[str]) -> dict[str, str]:
    """Label filters `name=value`. Raises `InvalidRequest`."""
    labels: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise InvalidRequest(f"label {pair!r:.100}: write it as name=value")
        if labels.setdefault(name, value) != value:
            raise InvalidRequest(
                f"label {name!r:.100} is given twice with different values; nothing can match both"
            )
    return labels


def _place(sandbox: Sandbox) -> tuple[float, str]:
    """Its place in lists: the same in those of all services, also after a restart."""
    return sandbox.created_at, sandbox.sandbox_id


def encode_cursor(created_at: float, sandbox_id: str) -> str:
    """The cursor for what follows that sandbox."""
    return base64.urlsafe_b64encode(f"{created_at!r} {sandbox_id}".encode()).decode().rstrip("=")


def _decode_cursor(cursor: str) -> tuple[float, str]:
    try:
        text = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)).decode()
        created_at, space, sandbox_id = text.partition(" ")
        if not space:
            raise ValueError
        return float(created_at), sandbox_id
    except (ValueError, binascii.Error):
        raise InvalidRequest("cursor: use the next_cursor of the page before, unchanged") from None
