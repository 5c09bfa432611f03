"""Runtimes by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from orchard.env.errors import RuntimeRefused
from orchard.env.images.pull import PullSettings
from orchard.env.runtimes.base import Runtime


def _local(state_dir: Path, pull: PullSettings, pull_missing: bool) -> Runtime:
    from orchard.env.images.pulls import Pulls
    from orchard.env.images.store import ImageStore
    from orchard.env.runtimes.local.runtime import LocalRuntime

    images = ImageStore(state_dir / "images")
    return LocalRuntime(state_dir, images=images, pulls=Pulls(images, pull), pull_missing=pull_missing)


#: name → factory, given the state directory and how and when to pull images.
#: Imported only when chosen: each has dependencies of its own.
RUNTIMES: dict[str, Callable[[Path, PullSettings, bool], Runtime]] = {"local": _local}
_PLANNED = ("docker", "kubernetes")


def make_runtime(
    name: str, state_dir: Path, *, pull: PullSettings | None = None, pull_missing: bool = False
) -> Runtime:
    """The runtime of that name. pull: how it reaches registries; pull_missing: whether a sandbox's image that is not
    there is pulled. Raises `RuntimeRefused` for one that is unknown or not in this version."""
    factory = RUNTIMES.get(name)
    if factory is None:
        what = "is not in this version" if name in _PLANNED else "is unknown"
        raise RuntimeRefused(f"runtime {name!r} {what}; use --runtime {' or '.join(RUNTIMES)}")
    return factory(state_dir, pull or PullSettings(), pull_missing)
