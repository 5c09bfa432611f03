"""Which images sandboxes use, by the note that the runtime leaves with each.

Several services may share one store (an embedded one borrows the images of the machine's state directory), so each
that resolves images leaves the place of its sandboxes in the store. An entry whose place is gone means nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from orchard.env.images.area import StoreArea

NOTE = "sandbox.json"


@dataclass(slots=True)
class InUse:
    """Sandboxes by the digest of their image. unknown: those whose note cannot be read."""

    by_digest: dict[str, list[str]] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)

    def of(self, digest: str) -> list[str]:
        """The sandboxes that use an image, or may use it as nobody can tell."""
        return [*self.by_digest.get(digest, ()), *self.unknown]


class Users:
    """The services that use a store. sandboxes: the directory of our own, `STATE/sandboxes`."""

    def __init__(self, area: StoreArea, sandboxes: Path) -> None:
        self._area = area
        self._own = sandboxes
        self._known = False

    def register(self) -> None:
        """Have others count our sandboxes; only the first call does work."""
        if self._known:
            return
        place = os.fsencode(self._own.parent.resolve() / self._own.name)
        with self._area.writing():
            entry = self._area.users / hashlib.sha256(place).hexdigest()
            self._area.write_file(entry, place)
        self._known = True

    def in_use(self) -> InUse:
        """What the sandboxes of every service use now."""
        found = InUse()
        places = {self._own.parent.resolve() / self._own.name}
        for entry in self._area.users.glob("[!.]*"):
            place = Path(os.fsdecode(entry.read_bytes()))
            if place.parent.is_dir():
                places.add(place)
            else:
                entry.unlink(missing_ok=True)
        for place in places:
            _read_notes(place, found)
        return found


def _read_notes(sandboxes: Path, found: InUse) -> None:
    """Read `SANDBOX/sandbox.json`, `{"ref": …, "digest": …, …}`, of every sandbox directory."""
    for path in sandboxes.glob(f"*/{NOTE}"):
        sandbox_id = path.parent.name
        try:
            digest = json.loads(path.read_bytes())["digest"]
            found.by_digest.setdefault(str(digest), []).append(sandbox_id)
        except FileNotFoundError:
            continue  # deleted meanwhile
        except (OSError, ValueError, KeyError, TypeError):
            found.unknown.append(sandbox_id)
