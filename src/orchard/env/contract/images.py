"""Images of the service."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from orchard.env.contract.base import Answer, Request, Text


class PullImage(Request):
    """POST /images. pull: the image's name in its registry, as `registry.example/project/tool:1.2` or `…@sha256:…`."""

    pull: Annotated[Text, Field(min_length=1, max_length=1024)]


class ImageInfo(Answer):
    """One image of the service. Sizes in bytes, times in Unix seconds. notes: what an import left out or changed."""

    name: str
    digest: str
    size_bytes: int
    created_at: float
    kind: str
    architecture: str
    base: str | None = None
    env: dict[str, str] = {}
    working_dir: str | None = None
    user: str | None = None
    notes: list[str] = []
    recipe: str | None = None


class PullInfo(Answer):
    """A pull, under way or ended not long ago. progress: its last lines. image: what came of it; error: why nothing did,
    as an error's body."""

    pull: str
    status: Literal["running", "succeeded", "failed"]
    progress: list[str]
    image: ImageInfo | None = None
    error: dict[str, Any] | None = None


class ImageList(Answer):
    images: list[ImageInfo]
    pulls: list[PullInfo]


class ImageRemoved(Answer):
    status: Literal["deleted"] = "deleted"
    image: str
