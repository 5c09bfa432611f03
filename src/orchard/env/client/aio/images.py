"""The images of a service: what sandboxes can be made of."""

from __future__ import annotations

from typing import TypeAlias

from orchard.env.client.transport import Transport, build, encode, path_of
from orchard.env.contract import ImageInfo, ImageList, ImageRemoved, PullImage, PullInfo
from orchard.env.errors import InfrastructureError, SandboxTimeout, from_body

#: A class with a method `list` cannot name the type in its annotations.
ImageInfos: TypeAlias = list[ImageInfo]
PullInfos: TypeAlias = list[PullInfo]

#: One request waits at most this long for a pull; then it is asked again.
_WAIT_S = 60.0


class AsyncImages:
    """The images that the service keeps: `client.images`."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._path = path_of("images")

    async def list(self) -> ImageInfos:
        """All images, by name."""
        return (await self._transport.call("GET", self._path, ImageList)).images

    async def pulls(self) -> PullInfos:
        """The pulls that run, or ended not long ago; none without an admin key."""
        return (await self._transport.call("GET", self._path, ImageList)).pulls

    async def pull(self, name: str, *, timeout_s: float = 1800.0) -> ImageInfo:
        """Fetch an image from its registry, and wait until it is here. Needs an admin key.

        name: as `registry.example/project/tool:1.2` or `…@sha256:…`. Raises `ImageNotFound`, `PullDenied`,
        `RegistryUnreachable`, `RegistryRateLimited`; or `SandboxTimeout` after timeout_s seconds, when it goes on all
        the same.
        """
        left_s = timeout_s
        while True:
            wait_s = min(left_s, _WAIT_S)
            info = await self._ask(name, wait_s)
            if info.image is not None:
                return info.image
            if info.error is not None:
                raise from_body(503, info.error)
            left_s -= wait_s
            if left_s <= 0:
                raise SandboxTimeout(f"{name} is not here after {timeout_s:g} s; the pull goes on")

    async def start_pull(self, name: str) -> PullInfo:
        """Begin to fetch an image; `pulls` tells how it goes on. Needs an admin key."""
        return await self._ask(name, None)

    async def remove(self, name: str) -> None:
        """Remove an image by name or digest; its files go with its last name. Needs an admin key.

        Raises `ImageNotFound`, or `Conflict` while sandboxes use it.
        """
        await self._transport.call("DELETE", path_of("images", name), ImageRemoved)

    async def _ask(self, name: str, wait_s: float | None) -> PullInfo:
        query = [] if wait_s is None else [("wait", f"{wait_s:g}")]
        silence_s = None if wait_s is None else wait_s + 30
        body = encode(build(PullImage, pull=name))
        info = await self._transport.call(
            "POST", self._path, PullInfo, body=body, query=query, silence_s=silence_s
        )
        if info.status == "failed" and info.error is None:
            raise InfrastructureError(f"the pull of {name} failed, and the service does not say why")
        return info
