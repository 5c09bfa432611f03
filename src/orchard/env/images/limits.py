"""How much an archive may ask for, so that a hostile one ends in an error and not in a full disk or memory."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class ImportLimits:
    """Limits of one import; sizes in bytes.

    entries, directories, notes: how many. depth: path components of one name. unpacked_bytes: file content of all
    layers together, and of a compressed archive once opened. header_bytes: what one tar entry may carry besides its
    content (names, extended attributes). document_bytes: one JSON document of an image.
    """

    entries: int = 2_000_000
    directories: int = 500_000
    depth: int = 256
    layers: int = 512
    unpacked_bytes: int = 256 * GIB
    header_bytes: int = 2 * MIB
    document_bytes: int = 16 * MIB
