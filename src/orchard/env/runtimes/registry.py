"""Runtimes by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from orchard.env.errors import RuntimeRefused
from orchard.env.images.pull import PullSettings
from orchard.env.runtimes.base import Runtime


def _local(state_dir: Path, pull: PullSettings, pull_missing: bool, egress_resolver: str | None) -> Runtime:
    from orchard.env.images.pulls import Pulls
    from orchard.env.images.store import ImageStore
    from orchard.env.runtimes.local.runtime import LocalRuntime

    images = ImageStore(state_dir / "images")
    return LocalRuntime(
        state_dir,
        images=images,
        pulls=Pulls(images, pull),
        pull_missing=pull_missing,
        egress_resolver=egress_resolver,
    )


#: name → factory, given the state directory, how and when to pull images, and what resolves names of `allow_egress`.
#: Imported only when chosen: each has dependencies of its own.
RUNTIMES: dict[str, Callable[[Path, PullSettings, bool, str | None], Runtime]] = {"local": _local}
_PLANNED = ("docker", "kubernetes")


def make_runtime(
    name: str,
    state_dir: Path,
    *,
    pull: PullSettings | None = None,
    pull_missing: bool = False,
    egress_resolver: str | None = None,
) -> Runtime:
    """The runtime of that name. pull: how it reaches registries; pull_missing: whether a sandbox's image that is not
    there is pulled; egress_resolver: what resolves the names of `allow_egress`. Raises `RuntimeRefused` for one that is
    unknown or not in this version."""
    factory = RUNTIMES.get(name)
    if factory is None:
        what = "is not in this version" if name in _PLANNED else "is unknown"
        raise RuntimeRefused(f"runtime {name!r} {what}; use --runtime {' or '.join(RUNTIMES)}")
    return factory(state_dir, pull or PullSettings(), pull_missing, egress_resolver)
