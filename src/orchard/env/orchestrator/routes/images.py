"""Routes about the images that sandboxes can be made of."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from orchard.env.contract import ImageList, ImageRemoved, PullImage, PullInfo, Seconds
from orchard.env.errors import Forbidden, InvalidRequest
from orchard.env.images.pulls import Pull
from orchard.env.orchestrator.logging import request_id
from orchard.env.orchestrator.responses import json_of
from orchard.env.orchestrator.routes.base import errors, orchestrator, principal, router
from orchard.env.runtimes.base import HoldsImages

routes = router("images")


def _holder(request: Request) -> HoldsImages:
    runtime = orchestrator(request).runtime
    if not isinstance(runtime, HoldsImages):
        raise InvalidRequest(
            f"the {runtime.name} runtime keeps its images elsewhere; create sandboxes with their names in a registry"
        )
    return runtime


def _admin_only(request: Request, what: str) -> None:
    if not principal(request).admin:
        raise Forbidden(f"{what} needs an admin key; ask the operator of this service for the image")


@routes.get("/images", response_model=ImageList, responses=errors(), summary="List images and pulls")
async def list_images(request: Request) -> Response:
    """Every image, and the pulls that run or ended not long ago (admin keys only)."""
    holder = _holder(request)
    records = await asyncio.to_thread(holder.images.list)
    pulls = [_described(pull) for pull in holder.pulls] if principal(request).admin else []
    return json_of({"images": [record.to_json() for record in records], "pulls": pulls})


@routes.post("/images", response_model=PullInfo, responses=errors(403, 404), summary="Pull an image")
async def pull_image(request: Request, body: PullImage, wait: Seconds | None = None) -> Response:
    """Answers at once; GET /images tells how it goes on. With `wait`, a number of seconds, it answers when the image is
    here, with the error when it could not be pulled, or when they are over, with what it is then. A repeat joins the
    pull that is under way. Needs an admin key."""
    _admin_only(request, "pulling an image")
    pull = _holder(request).pulls.start(body.pull)
    if wait is not None:
        await asyncio.wait([pull.done], timeout=wait)
        if (error := pull.error) is not None:
            raise error
    return json_of(_described(pull))


@routes.delete("/images/{name:path}", response_model=ImageRemoved, responses=errors(403, 404, 409),
               summary="Remove an image")  # fmt: skip
async def remove_image(request: Request, name: str) -> Response:
    """By name or digest; the files go with the last name. 409 while sandboxes use it. Needs an admin key."""
    _admin_only(request, "removing an image")
    await asyncio.to_thread(_holder(request).images.remove, name)
    return json_of({"status": "deleted", "image": name})


def _described(pull: Pull) -> dict[str, Any]:
    error = pull.error
    ended = pull.done.done()
    return {
        "pull": pull.ref,
        "status": "failed" if error else "succeeded" if ended else "running",
        "progress": list(pull.lines),
        "image": pull.done.result().to_json() if ended and error is None else None,
        "error": error.body(request_id.get()) if error else None,
    }
