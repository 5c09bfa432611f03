# Generated from aio/images.py by tools/generate_sync_client.py; change that and run it.
"""The images of a service: what sandboxes can be made of."""

from __future__ import annotations

from typing import TypeAlias

from orchard.env.client.aio.images import AsyncImages
from orchard.env.client.portal import Portal
from orchard.env.contract import ImageInfo, PullInfo

ImageInfos: TypeAlias = list[ImageInfo]

PullInfos: TypeAlias = list[PullInfo]


class Images:
    """The images that the service keeps: `client.images`."""

    def __init__(self, portal: Portal, wrapped: AsyncImages) -> None:
        self._portal = portal
        self._async = wrapped

    def list(self) -> ImageInfos:
        """All images, by name."""
        return self._portal.call(self._async.list())

    def pulls(self) -> PullInfos:
        """The pulls that run, or ended not long ago; none without an admin key."""
        return self._portal.call(self._async.pulls())

    def pull(self, name: str, *, timeout_s: float = 1800.0) -> ImageInfo:
        """Fetch an image from its registry, and wait until it is here. Needs an admin key.

        name: as `registry.example/project/tool:1.2` or `…@sha256:…`. Raises `ImageNotFound`, `PullDenied`,
        `RegistryUnreachable`, `RegistryRateLimited`; or `SandboxTimeout` after timeout_s seconds, when it goes on all
        the same.
        """
        return self._portal.call(self._async.pull(name, timeout_s=timeout_s))

    def start_pull(self, name: str) -> PullInfo:
        """Begin to fetch an image; `pulls` tells how it goes on. Needs an admin key."""
        return self._portal.call(self._async.start_pull(name))

    def remove(self, name: str) -> None:
        """Remove an image by name or digest; its files go with its last name. Needs an admin key.

        Raises `ImageNotFound`, or `Conflict` while sandboxes use it.
        """
        self._portal.call(self._async.remove(name))
