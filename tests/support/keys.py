"""Tenants of a service and the keys file that names them."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Tenant:
    """An owner and its key."""

    owner: str
    role: str = "user"
    max_sandboxes: int | None = None
    key: str = field(default_factory=lambda: secrets.token_hex(16))

    def entry(self) -> dict[str, object]:
        digest = "sha256:" + hashlib.sha256(self.key.encode()).hexdigest()
        quota = {} if self.max_sandboxes is None else {"max_sandboxes": self.max_sandboxes}
        return {"owner": self.owner, "role": self.role, "hash": digest, **quota}


def write_keys_file(path: Path, tenants: Iterable[Tenant]) -> Path:
    path.write_text(json.dumps([tenant.entry() for tenant in tenants]))
    path.chmod(0o600)
    return path
