"""Which sandbox a request means: fresh ids, ids from keys, and when two requests are the same."""

from __future__ import annotations

import hashlib
import json
import os

from starlette.types import ASGIApp

from orchard.env.contract import CreateSandbox
from orchard.env.errors import Conflict
from orchard.env.orchestrator.sandbox import Sandbox


class Elsewhere(Exception):
    """The id that a creation names is known to another service. app: the way there."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__("another service has a sandbox of this id")
        self.app = app


def new_id(owner: str, idempotency_key: str | None) -> str:
    """A fresh id; the same one for the same key of the same owner, so that a repeated create finds it for as
    long as its record is kept."""
    if idempotency_key is None:
        return "sb-" + os.urandom(8).hex()
    return "sb-" + hashlib.sha256(f"{owner}\0{idempotency_key}".encode()).hexdigest()[:32]


def same_or_conflict(known: Sandbox, owner: str, digest: str, *, by_key: bool) -> Sandbox:
    """`known` if the request is the one that made it. Raises `Conflict` for another one, and for one that has ended."""
    what = "this idempotency_key" if by_key else f"the id {known.sandbox_id}"
    if known.owner != owner or known.digest != digest:
        raise Conflict(
            f"{what} is taken by a sandbox that was created with another request; choose another one"
        )
    if not known.live and not known.never_ready:
        raise Conflict(
            f"{what} belongs to a sandbox that has ended ({known.reason.value if known.reason else 'ended'});"
            " an id never means two sandboxes: choose another one"
        )
    return known


def encoded(body: CreateSandbox) -> bytes:
    """A request of the same digest, as JSON."""
    return json.dumps(body.model_dump(mode="json", exclude_none=True)).encode()


def body_digest(body: CreateSandbox) -> str:
    """Same digest, same request: `null` and left out mean the same."""
    text = json.dumps(body.model_dump(mode="json", exclude_none=True, exclude={"sandbox_id"}), sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
