"""The store's records on disk: which names exist, which image each stands for, what each image is made of."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from orchard.env.errors import ImageNotFound, InfrastructureError
from orchard.env.images import reference
from orchard.env.images.area import StoreArea
from orchard.env.images.record import StoredImage
from orchard.env.images.reference import Reference

_HOW_TO_IMPORT = (
    "`orchard images pull NAME` fetches an image from a registry, `orchard images import ARCHIVE --name NAME` adds "
    "one from `docker save` or an OCI layout"
)


class Catalog:
    """Reads at any time; writes only while the caller holds `area.writing()`."""

    def __init__(self, area: StoreArea) -> None:
        self._area = area

    def find(self, parsed: Reference) -> StoredImage:
        """The image that a name or a digest (or its beginning) stands for. Raises ImageNotFound."""
        if parsed.kind == "digest":
            return self._find_digest(parsed.value)
        try:
            digest = _load(self.name_file(self.known_name(parsed.value)))["digest"]
            return _stored(self.image_file(digest))
        except FileNotFoundError:
            raise self._unknown(parsed.value) from None

    def known_name(self, name: str) -> str:
        """`name`, or the one stored name that is the same but for its registry: tools like to write it out."""
        if self.name_file(name).exists():
            return name
        same = [each for each in self.names() if reference.without_registry(each) == name]
        return same[0] if len(same) == 1 else name

    def images(self) -> Iterator[StoredImage]:
        """Every image, with or without a name."""
        for path in sorted(self._area.images.glob("[!.]*.json")):
            try:
                yield _stored(path)
            except FileNotFoundError:
                continue  # removed meanwhile

    def names(self) -> dict[str, str]:
        """Name → digest."""
        found = {}
        for path in self._area.names.glob("[!.]*.json"):
            try:
                found[unquote(path.stem)] = str(_load(path)["digest"])
            except FileNotFoundError:
                continue
        return found

    def put(self, stored: StoredImage, names: Iterable[str]) -> None:
        """Write an image and point `names` to it."""
        digest = stored.record.digest
        self._area.write_file(self.image_file(digest), stored.dumps())
        for name in names:
            self._area.write_file(self.name_file(name), json.dumps({"digest": digest}).encode())

    def drop_name(self, name: str) -> None:
        self.name_file(name).unlink(missing_ok=True)

    def drop_image(self, digest: str) -> None:
        self.image_file(digest).unlink(missing_ok=True)

    def name_file(self, name: str) -> Path:
        return self._area.names / f"{quote(name, safe='')}.json"

    def image_file(self, digest: str) -> Path:
        return self._area.images / f"{digest.removeprefix(reference.DIGEST_PREFIX)}.json"

    def _find_digest(self, prefix: str) -> StoredImage:
        found = [
            stored for stored in self.images() if any(digest.startswith(prefix) for digest in stored.digests)
        ]
        if len(found) == 1:
            return found[0]
        if not found:
            raise ImageNotFound(f"No image here has a digest that begins with {prefix!r}; {_HOW_TO_IMPORT}.")
        digests = ", ".join(sorted(stored.record.digest for stored in found))
        raise ImageNotFound(f"{prefix!r} fits several images: {digests}. Give more digits.")

    def _unknown(self, name: str) -> ImageNotFound:
        known = sorted(self.names())
        same = [each for each in known if _last_part(each) == _last_part(name)]
        near = [*same, *(each for each in difflib.get_close_matches(name, known, 3, 0.6) if each not in same)]
        hint = (
            f"; near it: {', '.join(near[:5])}"
            if near
            else f"; there are: {', '.join(known[:5])}"
            if known
            else ""
        )
        return ImageNotFound(
            f"There is no image {name!r} on this machine{hint}. {_HOW_TO_IMPORT}; a service started with "
            f"`--pull missing` pulls by itself. `host` and `dir:/path` are always there."
        )


def _last_part(name: str) -> str:
    return reference.split_tag(name)[0].rpartition("/")[2]


def _load(path: Path) -> Any:
    text = path.read_bytes()
    try:
        return json.loads(text)
    except ValueError as error:
        raise _damaged(path) from error


def _stored(path: Path) -> StoredImage:
    text = path.read_bytes()
    try:
        return StoredImage.loads(text)
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(path) from error


def _damaged(path: Path) -> InfrastructureError:
    return InfrastructureError(
        f"The image store's record {str(path)!r} is damaged; delete it and import again."
    )
