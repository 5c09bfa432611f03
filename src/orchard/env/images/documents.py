"""The JSON documents of OCI layouts and `docker save` archives, as far as importing needs them."""

from __future__ import annotations

import platform
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, RootModel, StringConstraints, ValidationError

from orchard.env.errors import ImageInvalid

Digest = Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]

_ARCHITECTURES = {
    "x86_64": "amd64", "aarch64": "arm64", "armv8l": "arm", "armv7l": "arm", "armv6l": "arm", "i386": "386",
    "i686": "386", "ppc64le": "ppc64le", "s390x": "s390x", "riscv64": "riscv64", "loongarch64": "loong64",
}  # fmt: skip


def machine_architecture() -> str:
    """This machine's architecture in the words of OCI, such as `amd64`."""
    machine = platform.machine().lower()
    return _ARCHITECTURES.get(machine, machine)


class _Document(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, populate_by_name=True)


class Platform(_Document):
    architecture: str = ""
    os: str = ""
    variant: str = ""


class Descriptor(_Document):
    media_type: str = Field("", alias="mediaType")
    digest: Digest
    size: int = Field(ge=0)
    platform: Platform | None = None
    annotations: dict[str, str] | None = None


class Index(_Document):
    """An OCI image index, or Docker's manifest list."""

    manifests: list[Descriptor]


class Manifest(_Document):
    config: Descriptor
    layers: list[Descriptor]


class RunConfig(_Document):
    user: str | None = Field(None, alias="User")
    env: list[str] | None = Field(None, alias="Env")
    working_dir: str | None = Field(None, alias="WorkingDir")


class RootFs(_Document):
    diff_ids: list[Digest]


class ImageConfig(_Document):
    """The configuration of an image, whose digest is the image's id."""

    architecture: str = ""
    os: str = "linux"
    variant: str = ""
    config: RunConfig | None = None
    rootfs: RootFs

    def environment(self) -> dict[str, str]:
        """`Env` as a mapping; entries without `=` set nothing."""
        pairs = self.config.env or [] if self.config else []
        return {
            key: value for key, equals, value in (pair.partition("=") for pair in pairs) if key and equals
        }


class LayoutMark(_Document):
    """The file `oci-layout`."""

    version: str = Field(alias="imageLayoutVersion")


class DockerImage(_Document):
    """One image of `manifest.json` in a `docker save` archive."""

    config: str = Field(alias="Config")
    tags: list[str] | None = Field(None, alias="RepoTags")
    layers: list[str] = Field(alias="Layers")


class DockerImages(RootModel[list[DockerImage]]):
    """The whole of `manifest.json`."""


_M = TypeVar("_M", bound=BaseModel)


def parse(model: type[_M], text: bytes, what: str) -> _M:
    """Read a document. Raises ImageInvalid, naming `what` and the first thing wrong."""
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the document"
        raise ImageInvalid(f"{what} is damaged: {where}: {first['msg']}.") from error
