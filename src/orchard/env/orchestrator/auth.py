"""API keys: who is calling, and what they may see.

A keys file is a YAML or JSON list of tenants::

    - owner: alice
      role: user            # user (default): own sandboxes and jobs only; admin: everyone's
      hash: sha256:9f86d0…   # of the key; `hash_key` makes it
      max_sandboxes: 200    # optional: live sandboxes of this owner

Keys are long random texts, so a plain SHA-256 of them is as good as a slow hash, and costs a microsecond.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from orchard.env.errors import SettingsError, Unauthorized
from orchard.env.orchestrator.settings import ServiceSettings, read_document

DEFAULT_OWNER = "default"
_OWNER = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.@-]{0,62}[A-Za-z0-9])?\Z")
_HASH = re.compile(r"sha256:([0-9a-f]{64})\Z")


class Role(StrEnum):
    USER = "user"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class Principal:
    """Who calls. max_sandboxes: quota of live sandboxes, None for none."""

    owner: str
    role: Role = Role.USER
    max_sandboxes: int | None = None

    @property
    def admin(self) -> bool:
        return self.role is Role.ADMIN

    def may_see(self, owner: str) -> bool:
        return self.owner == owner or self.role is Role.ADMIN


def hash_key(key: str) -> str:
    """The `hash` of a key for a keys file."""
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


class KeyRing:
    """Finds the principal of a key. Without any key everyone is the default owner."""

    def __init__(self, entries: Iterable[tuple[str, Principal]] = ()) -> None:
        """entries: pairs of `hash_key` texts and principals."""
        self._by_digest: dict[bytes, Principal] = {}
        for text, principal in entries:
            match = _HASH.match(text)
            if match is None:
                raise SettingsError(f"the key hash of {principal.owner!r} must be sha256: and 64 hex digits")
            digest = bytes.fromhex(match[1])
            if digest in self._by_digest:
                raise SettingsError(
                    f"a key of {principal.owner!r} is listed twice; every key belongs to one tenant"
                )
            self._by_digest[digest] = principal
        self.open = not self._by_digest
        self._anyone = Principal(DEFAULT_OWNER, Role.ADMIN)

    @classmethod
    def from_settings(cls, settings: ServiceSettings) -> KeyRing:
        """Keys of the settings and of their keys file. Raises `SettingsError`."""
        admin = Principal(DEFAULT_OWNER, Role.ADMIN)
        entries = [(hash_key(key), admin) for key in dict.fromkeys(settings.api_keys)]
        if settings.keys_file is not None:
            entries += read_keys_file(settings.keys_file)
            if not entries:
                raise SettingsError(f"{settings.keys_file} holds no tenant; nobody could call the service")
        return cls(entries)

    def principal(self, key: bytes | None) -> Principal:
        """The owner of `key`. Raises `Unauthorized`."""
        if self.open:
            return self._anyone
        if not key:
            raise Unauthorized("no API key: send it in the X-API-Key header")
        # A look-up by hash needs no constant-time comparison: a caller cannot steer the digest of a guess towards
        # a stored one, so what the time tells of it is worth nothing.
        found = self._by_digest.get(hashlib.sha256(key).digest())
        if found is None:
            raise Unauthorized("this API key is not known here: check X-API-Key")
        return found


def read_keys_file(file: Path) -> list[tuple[str, Principal]]:
    """Hashes and principals of a keys file. Raises `SettingsError` that names the entry at fault."""
    data = read_document(file)
    if not isinstance(data, list):
        raise SettingsError(f"{file}: expected a list of tenants, each with owner and hash")
    return [_tenant(f"{file}, entry {number}", entry) for number, entry in enumerate(data, 1)]


def _tenant(where: str, entry: Any) -> tuple[str, Principal]:
    if not isinstance(entry, dict):
        raise SettingsError(f"{where}: expected a mapping with owner and hash")
    unknown = set(entry) - {"owner", "role", "hash", "max_sandboxes"}
    if unknown:
        raise SettingsError(f"{where}: unknown {', '.join(sorted(map(str, unknown)))}")
    owner = entry.get("owner")
    if not isinstance(owner, str) or not _OWNER.match(owner):
        raise SettingsError(f"{where}: owner must be 1 to 64 of letters, digits and '_.@-'")
    try:
        role = Role(entry.get("role", "user"))
    except ValueError:
        raise SettingsError(f"{where}: role must be user or admin") from None
    quota = entry.get("max_sandboxes")
    if quota is not None and (not isinstance(quota, int) or isinstance(quota, bool) or quota < 0):
        raise SettingsError(f"{where}: max_sandboxes must be a whole number")
    text = entry.get("hash")
    if not isinstance(text, str):
        raise SettingsError(f"{where}: hash is missing; make it with orchard.env.orchestrator.auth.hash_key")
    return text, Principal(owner, role, quota)
