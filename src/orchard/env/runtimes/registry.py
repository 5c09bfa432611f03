"""Runtimes by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from orchard.env.errors import RuntimeRefused
from orchard.env.runtimes.base import Runtime


def _local(state_dir: Path) -> Runtime:
    from orchard.env.images.store import ImageStore
    from orchard.env.runtimes.local.runtime import LocalRuntime

    return LocalRuntime(state_dir, images=ImageStore(state_dir / "images"))


#: name → factory, given the state directory. Imported only when chosen: each has dependencies of its own.
RUNTIMES: dict[str, Callable[[Path], Runtime]] = {"local": _local}
_PLANNED = ("docker", "kubernetes")


def make_runtime(name: str, state_dir: Path) -> Runtime:
    """The runtime of that name. Raises `RuntimeRefused` for one that is unknown or not in this version."""
    factory = RUNTIMES.get(name)
    if factory is None:
        what = "is not in this version" if name in _PLANNED else "is unknown"
        raise RuntimeRefused(f"runtime {name!r} {what}; use --runtime {' or '.join(RUNTIMES)}")
    return factory(state_dir)
