"""Which images the sandboxes of a state directory use, by the note that the runtime leaves with each."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

NOTE = "image.json"


@dataclass(slots=True)
class InUse:
    """Sandboxes by the digest of their image. unknown: those whose note cannot be read."""

    by_digest: dict[str, list[str]] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)

    def of(self, digest: str) -> list[str]:
        """The sandboxes that use an image, or may use it as nobody can tell."""
        return [*self.by_digest.get(digest, ()), *self.unknown]


def images_in_use(sandboxes: Path) -> InUse:
    """Read `SANDBOX/image.json`, `{"ref": …, "digest": …}`, of every sandbox directory."""
    found = InUse()
    for path in sandboxes.glob(f"*/{NOTE}"):
        sandbox_id = path.parent.name
        try:
            digest = json.loads(path.read_bytes())["digest"]
            found.by_digest.setdefault(str(digest), []).append(sandbox_id)
        except FileNotFoundError:
            continue  # deleted meanwhile
        except (OSError, ValueError, KeyError, TypeError):
            found.unknown.append(sandbox_id)
    return found
