"""Frames of the agent's protocol that its own encoder would refuse to make."""

from __future__ import annotations

import json
import struct
from typing import Any


def packed(header: Any, payload: bytes = b"") -> bytes:
    """A frame of anything that JSON, or Python's idea of it, can say."""
    head = json.dumps(header).encode()
    return struct.pack(">II", len(head), len(payload)) + head + payload
