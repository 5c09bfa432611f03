"""What the service owes to its clients, in files: whatever a client was told before it was killed is in there."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Ledger:
    """Lines of JSON, each in one write: none is ever half there. Threads share it."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def note(self, kind: str, **fields: Any) -> None:
        os.write(self._fd, json.dumps({"kind": kind, **fields}).encode() + b"\n")


def notes(folder: Path) -> Iterator[dict[str, Any]]:
    """What all ledgers of a folder hold, with the name of the client process as `client`."""
    for path in sorted(folder.glob("*.ledger")):
        for line in path.read_text().splitlines():
            yield {"client": path.stem, **json.loads(line)}
