"""What an image is to a runtime: directories to stack, and defaults for commands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ImageMount:
    """A further file tree of the image at `target` (absolute, inside), stacked like the root.

    read_only: the sandbox cannot write there; which also makes it cheaper to start.
    """

    target: str
    layers: tuple[Path, ...]
    read_only: bool = False


@dataclass(frozen=True, slots=True)
class ResolvedImage:
    """An image ready to run.

    layers: read-only directories of the root file system, topmost first, owned by real uids (the runtime
    shifts them). mounts: trees that live elsewhere on this machine (`host` has `/usr` and the like).
    env, working_dir, user: the image's own defaults, as in an OCI configuration.
    """

    ref: str
    digest: str
    layers: tuple[Path, ...]
    mounts: tuple[ImageMount, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    working_dir: str | None = None
    user: str | None = None
