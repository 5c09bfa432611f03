"""From which image a sandbox starts."""

from __future__ import annotations

from collections.abc import Callable

from orchard.env.contract import EndReason
from orchard.env.errors import ImageNotFound, OrchardError, PullDenied
from orchard.env.images import ImageStore
from orchard.env.images.model import ResolvedImage
from orchard.env.images.pull import is_remote
from orchard.env.images.pulls import Pulls
from orchard.env.runtimes.base import StartFailed


async def resolved(
    images: ImageStore, pulls: Pulls, ref: str, progress: Callable[[str], None], *, pull_missing: bool
) -> ResolvedImage:
    """The image of that name; with `pull_missing`, pulled first where it is not here. Raises `StartFailed`."""
    try:
        try:
            return images.resolve(ref)
        except ImageNotFound:
            if not pull_missing or not is_remote(ref):
                raise
        progress(f"pulling {ref}")
        await pulls.pull(ref, progress)
        return images.resolve(ref)
    except ImageNotFound as error:
        raise StartFailed(EndReason.IMAGE_NOT_FOUND, error.detail) from error
    except PullDenied as error:
        raise StartFailed(EndReason.PULL_DENIED, error.detail) from error
    except OrchardError as error:
        raise StartFailed(EndReason.RUNTIME_ERROR, error.detail) from error
