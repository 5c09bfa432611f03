"""API keys: who is calling, and what they may see.

A keys file is a YAML or JSON list of tenants::

    - owner: alice
      role: user            # user (default): own sandboxes and jobs only; admin: everyone's
      hash: sha256:9f86d0…   # of the key; `hash_key` makes it
      max_sandboxes: 200    # optional, as are the other quotas: live sandboxes of this owner
      max_cpu: 64           # cores over its live sandboxes; each must then give `cpu`
      max_memory: 256Gi     # bytes over its live sandboxes; each must then give `memory`
      creates_per_minute: 60
      tunnel_targets: [model]   # optional: which of the service's targets; [] for none

Keys without quotas, admin or not, may use what the service has. Keys are long random texts, so a plain SHA-256 of
them is as good as a slow hash, and costs a microsecond.
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
from orchard.env.orchestrator.quotas import NO_QUOTAS, QUOTA_NAMES, Quotas
from orchard.env.orchestrator.settings import ServiceSettings, read_document

DEFAULT_OWNER = "default"
_OWNER = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.@-]{0,62}[A-Za-z0-9])?\Z")
_HASH = re.compile(r"sha256:([0-9a-f]{64})\Z")


class Role(StrEnum):
    USER = "user"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class Principal:
    """Who calls, and what the key that was used allows. tunnel_targets: by name; None for all that there are."""

    owner: str
    role: Role = Role.USER
    quotas: Quotas = NO_QUOTAS
    tunnel_targets: frozenset[str] | None = None

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

    def take_over(self, other: KeyRing) -> None:
        """Know the keys of `other` from now on, and no others. Raises `SettingsError` if that would let anyone in."""
        if other.open and not self.open:
            raise SettingsError("no key is left; nobody could call the service")
        self._by_digest = other._by_digest

    def __len__(self) -> int:
        return len(self._by_digest)

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
    return [check_entry(f"{file}, entry {number}", entry) for number, entry in enumerate(data, 1)]


def check_entry(where: str, entry: Any) -> tuple[str, Principal]:
    """Hash and principal of one entry of a keys file. Raises `SettingsError` that begins with `where`."""
    if not isinstance(entry, dict):
        raise SettingsError(f"{where}: expected a mapping with owner and hash")
    unknown = set(entry) - {"owner", "role", "hash", "tunnel_targets"} - QUOTA_NAMES
    if unknown:
        raise SettingsError(f"{where}: unknown {', '.join(sorted(map(str, unknown)))}")
    owner = entry.get("owner")
    if not isinstance(owner, str) or not _OWNER.match(owner):
        raise SettingsError(f"{where}: owner must be 1 to 64 of letters, digits and '_.@-'")
    where = f"{where} ({owner})"
    try:
        role = Role(entry.get("role", "user"))
    except ValueError:
        raise SettingsError(f"{where}: role must be user or admin") from None
    quotas = Quotas.parse(where, entry)
    text = entry.get("hash")
    if not isinstance(text, str):
        raise SettingsError(f"{where}: hash is missing; `orchard keys new` makes a key and its entry")
    if not _HASH.match(text):
        raise SettingsError(
            f"{where}: hash must be sha256: and 64 hex digits, as `orchard keys new` prints it"
        )
    targets = entry.get("tunnel_targets")
    if targets is not None and not (
        isinstance(targets, list) and all(isinstance(each, str) for each in targets)
    ):
        raise SettingsError(
            f"{where}: tunnel_targets must be a list of names, as [model], not {targets!r:.80}"
        )
    return text, Principal(owner, role, quotas, None if targets is None else frozenset(targets))
