"""What the store knows of an image, and its JSON form on disk."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

#: Where an image came from: this machine's system directories; an OCI layout; a `docker save` archive; a plain
#: tar of a root file system, which carries no configuration of its own.
ImageKind = Literal["host", "oci", "docker", "rootfs"]


@dataclass(frozen=True, slots=True)
class ImageRecord:
    """One image as it is listed.

    name: `name:tag`, or the digest for an image that lost its name to a later import. digest: `sha256:…` of the
    image's configuration (for `docker save` and OCI archives the image id that Docker shows). size_bytes: bytes of
    file content this image adds to its base. created_at: when it was imported, seconds since the epoch. base: the
    image it was stacked on. notes: what the import left out or changed, for people to read. recipe: the digest of the
    recipe and base that it was built from.
    """

    name: str
    digest: str
    size_bytes: int
    created_at: float
    kind: ImageKind
    architecture: str
    base: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    working_dir: str | None = None
    user: str | None = None
    notes: tuple[str, ...] = ()
    recipe: str | None = None

    def to_json(self) -> dict[str, Any]:
        """A JSON object with the fields' own names."""
        fields = asdict(self)
        fields["notes"] = list(self.notes)
        return fields


@dataclass(frozen=True, slots=True)
class StoredImage:
    """An imported image on disk, under its digest; names point to it.

    layers: directories of the store, topmost first. bottom: what lies below them outside the store, `host` or
    `dir:PATH`, or None. manifest_digest: of the OCI manifest it came from, another name people know it by.
    pulled_digests: those that it was pulled by, which may be of an index for several machines.
    """

    record: ImageRecord
    layers: tuple[str, ...]
    bottom: str | None = None
    manifest_digest: str | None = None
    pulled_digests: tuple[str, ...] = ()

    @property
    def digests(self) -> tuple[str, ...]:
        """Every digest that stands for this image."""
        other = (self.manifest_digest,) if self.manifest_digest else ()
        return (self.record.digest, *other, *self.pulled_digests)

    def dumps(self) -> bytes:
        """The JSON text of its file."""
        fields = {
            "record": self.record.to_json(),
            "layers": list(self.layers),
            "bottom": self.bottom,
            "manifest_digest": self.manifest_digest,
            "pulled_digests": list(self.pulled_digests),
        }
        return json.dumps(fields, indent=1, sort_keys=True).encode()

    @classmethod
    def loads(cls, text: bytes) -> StoredImage:
        """Read back what `dumps` wrote. Raises ValueError, KeyError or TypeError on anything else."""
        fields = json.loads(text)
        record = dict(fields["record"])
        record["notes"] = tuple(record["notes"])
        return cls(
            record=ImageRecord(**record),
            layers=tuple(fields["layers"]),
            bottom=fields["bottom"],
            manifest_digest=fields["manifest_digest"],
            pulled_digests=tuple(fields.get("pulled_digests", ())),
        )
