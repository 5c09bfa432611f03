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
    max_cpu: float | str | None = None
    max_memory: int | str | None = None
    creates_per_minute: int | None = None
    tunnel_targets: list[str] | None = None
    key: str = field(default_factory=lambda: secrets.token_hex(16))

    def entry(self) -> dict[str, object]:
        digest = "sha256:" + hashlib.sha256(self.key.encode()).hexdigest()
        names = ("max_sandboxes", "max_cpu", "max_memory", "creates_per_minute", "tunnel_targets")
        quotas = {name: value for name in names if (value := getattr(self, name)) is not None}
        return {"owner": self.owner, "role": self.role, "hash": digest, **quotas}


def write_keys_file(path: Path, tenants: Iterable[Tenant]) -> Path:
    path.write_text(json.dumps([tenant.entry() for tenant in tenants]))
    path.chmod(0o600)
    return path
