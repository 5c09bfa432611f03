"""Names of images: what a reference means before anything is looked up."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from orchard.env.errors import InvalidRequest

HOST = "host"
DIRECTORY_PREFIX = "dir:"
DIGEST_PREFIX = "sha256:"
#: Below this a digest prefix is more likely a slip than a choice.
MIN_DIGEST_DIGITS = 6

_DIGEST = re.compile(r"sha256:[0-9a-f]{1,64}")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_COMPONENT = re.compile(r"[A-Za-z0-9]+(?:[._-]+[A-Za-z0-9]+)*")
_AUTHORITY = re.compile(r"[A-Za-z0-9.-]+:[0-9]{1,5}")
_MAX_NAME = 200


@dataclass(frozen=True, slots=True)
class Reference:
    """A parsed reference. value: the full `name:tag`, the digest (or its beginning), the directory, or `host`."""

    kind: Literal["host", "directory", "digest", "name"]
    value: str


def parse(ref: str) -> Reference:
    """What `ref` means. Raises InvalidRequest for text that can name no image."""
    if ref == HOST:
        return Reference("host", HOST)
    if ref.startswith(DIRECTORY_PREFIX):
        return Reference("directory", ref.removeprefix(DIRECTORY_PREFIX))
    digest = ref.partition("@")[2] or ref
    if digest.startswith(DIGEST_PREFIX):
        if not _DIGEST.fullmatch(digest) or len(digest) < len(DIGEST_PREFIX) + MIN_DIGEST_DIGITS:
            raise InvalidRequest(
                f"{ref!r} is no image digest: give `sha256:` and at least {MIN_DIGEST_DIGITS} hexadecimal digits."
            )
        return Reference("digest", digest)
    return Reference("name", full_name(ref))


def full_name(name: str) -> str:
    """`name` with its tag, `latest` where it has none. Raises InvalidRequest for what is no image name."""
    repository, tag = split_tag(name)
    parts = repository.split("/")
    authority_first = len(parts) > 1 and bool(_AUTHORITY.fullmatch(parts[0]))
    plain = parts[1:] if authority_first else parts
    well_formed = all(_COMPONENT.fullmatch(part) for part in plain) and bool(_TAG.fullmatch(tag))
    if not well_formed or len(repository) + len(tag) >= _MAX_NAME or repository == "sha256":
        raise InvalidRequest(
            f"{name!r} is no image name. Names look like `project/tool:1.2`: letters, digits, and `.`, `_`, `-` or "
            f"`/` between them, fewer than {_MAX_NAME} characters; `host` and `dir:/path` are the other kinds."
        )
    if repository == HOST:
        raise InvalidRequest(
            f"{name!r}: the name `{HOST}` belongs to the image of this machine; choose another name."
        )
    return f"{repository}:{tag}"


def split_tag(name: str) -> tuple[str, str]:
    """Repository and tag; a colon before the last slash belongs to a port, not to a tag."""
    head, slash, last = name.rpartition("/")
    stem, colon, tag = last.partition(":")
    return f"{head}{slash}{stem}", tag if colon else "latest"


def without_registry(name: str) -> str:
    """`name` less the registry before its first slash, and less `library/` where registries keep plain names."""
    first, slash, rest = name.partition("/")
    if not slash or not ("." in first or ":" in first):
        return name
    return rest.removeprefix("library/")


def name_from_path(path: Path) -> str:
    """An image name made from the name of an archive: `My App-1.2.tar.gz` gives `my-app-1.2:latest`."""
    stem = re.sub(r"\.(tar|tgz|tbz2?|txz|tzst|oci)(\.(gz|bz2|xz|zst))?$", "", path.name, flags=re.IGNORECASE)
    cleaned = re.sub(r"[^a-z0-9.]+", "-", stem.lower())
    cleaned = re.sub(r"[.-]*\.[.-]*", ".", cleaned).strip("-.")[:100].strip("-.")
    if not cleaned or cleaned == HOST:
        raise InvalidRequest(f"The archive {str(path)!r} suggests no image name; give one.")
    return f"{cleaned}:latest"
