"""Choosing one image from an archive: an OCI layout, a `docker save` archive, or a plain root file system."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from orchard.env.errors import ImageInvalid, InvalidRequest
from orchard.env.images import documents, reference
from orchard.env.images.bundles import Bundle, DirectoryBundle, TarBundle
from orchard.env.images.documents import (
    Descriptor,
    DockerImage,
    ImageConfig,
    Index,
    LayoutMark,
    Manifest,
    Platform,
)
from orchard.env.images.limits import ImportLimits

_INDEX_TYPES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
_CONTAINER_NAME = "io.containerd.image.name"
_REF_NAME = "org.opencontainers.image.ref.name"
_HEX = re.compile(r"(?:sha256:)?([0-9a-f]{64})(?:\.json)?")
_MAX_NESTING = 4


@dataclass(frozen=True, slots=True)
class LayerFile:
    """One layer in the archive. digest: of the file as stored; diff_id: of its content, decompressed."""

    file: str
    digest: str | None = None
    size: int | None = None
    diff_id: str | None = None


@dataclass(frozen=True, slots=True)
class ArchivedImage:
    """An image of an archive. config_digest: its id; both it and config are None for a plain root file system,
    whose tar is the bundle itself. names: what the archive calls it."""

    kind: Literal["oci", "docker", "rootfs"]
    names: tuple[str, ...] = ()
    config: ImageConfig | None = None
    config_digest: str | None = None
    manifest_digest: str | None = None
    layers: tuple[LayerFile, ...] = ()


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A manifest (OCI) or an entry of manifest.json (docker), not yet read further."""

    names: tuple[str, ...]
    manifest: Descriptor | None = None
    docker: DockerImage | None = None
    platform: Platform | None = None

    @property
    def identity(self) -> str:
        return self.manifest.digest if self.manifest else self.docker.config if self.docker else ""

    @property
    def title(self) -> str:
        if self.names:
            return self.names[0]
        return self.manifest.digest[:19] if self.manifest else "an image without a name"


class ArchiveReader:
    """Reads the documents of one bundle."""

    def __init__(self, bundle: DirectoryBundle | TarBundle, path: Path, limits: ImportLimits) -> None:
        self._bundle: Bundle = bundle
        self._path = path
        self._limits = limits
        self._rootfs = isinstance(bundle, TarBundle)

    def image(self, name: str | None) -> ArchivedImage:
        """The image for this machine; `name` chooses where the archive holds several.

        Raises ImageInvalid for damage or another machine's images, InvalidRequest listing the names where the
        choice is open.
        """
        candidates = self._candidates()
        if candidates is None:
            return ArchivedImage("rootfs")
        fitting = [found for found in candidates if self._fits(self._platform(found))]
        if not fitting:
            platforms = [self._platform(found) for found in candidates]
            there = sorted({_describe(each) for each in platforms if each.os != "unknown"}) or ["none"]
            raise ImageInvalid(
                f"{self._bundle.label} has no image for linux/{documents.machine_architecture()}; it has: "
                f"{', '.join(there)}. Export it for this platform."
            )
        return self._read(self._choose(fitting, name))

    def _candidates(self) -> list[_Candidate] | None:
        if self._bundle.size("manifest.json") is not None:
            text = self._document("manifest.json")
            if text.lstrip()[:1] == b"[":
                images = documents.parse(documents.DockerImages, text, f"{self._bundle.label}: manifest.json")
                return [_Candidate(self._named(image.tags or ()), docker=image) for image in images.root]
        if self._bundle.size("index.json") is not None and self._bundle.size("oci-layout") is not None:
            documents.parse(LayoutMark, self._document("oci-layout"), f"{self._bundle.label}: oci-layout")
            index = documents.parse(Index, self._document("index.json"), f"{self._bundle.label}: index.json")
            return list(self._walk(index, (), _MAX_NESTING))
        if self._rootfs:
            return None
        raise ImageInvalid(
            f"{self._bundle.label} is a directory without `oci-layout` and `index.json`. To use a directory as a root "
            f"file system in place, create sandboxes with the image `dir:{self._bundle.label}`."
        )

    def _walk(self, index: Index, names: tuple[str, ...], depth: int) -> Iterator[_Candidate]:
        for descriptor in index.manifests:
            own = self._annotated(descriptor.annotations or {}) or names
            if descriptor.media_type in _INDEX_TYPES:
                if depth == 0:
                    raise ImageInvalid(f"{self._bundle.label}: its indexes are nested too deeply.")
                inner = documents.parse(Index, self._blob(descriptor), descriptor.digest)
                yield from self._walk(inner, own, depth - 1)
            else:
                yield _Candidate(own, manifest=descriptor, platform=descriptor.platform)

    def _annotated(self, annotations: dict[str, str]) -> tuple[str, ...]:
        """The names in a descriptor's annotations: a full one, or only the tag."""
        if full := annotations.get(_CONTAINER_NAME):
            return self._named((full,))
        ref = annotations.get(_REF_NAME, "")
        if "/" in ref or ":" in ref:
            return self._named((ref,))
        try:
            stem, _ = reference.split_tag(reference.name_from_path(self._path))
        except InvalidRequest:
            return ()
        return self._named((f"{stem}:{ref}",)) if ref else ()

    def _named(self, names: tuple[str, ...] | list[str]) -> tuple[str, ...]:
        found = []
        for name in names:
            try:
                found.append(reference.full_name(name))
            except InvalidRequest:
                continue  # a name we cannot keep; the importer falls back to the archive's own
        return tuple(found)

    def _fits(self, platform: Platform) -> bool:
        return platform.os in ("", "linux") and platform.architecture == documents.machine_architecture()

    def _platform(self, candidate: _Candidate) -> Platform:
        if candidate.platform is not None:
            return candidate.platform
        if candidate.docker is not None:
            config, _ = self._docker_config(candidate.docker)
        else:
            assert candidate.manifest is not None
            manifest = documents.parse(Manifest, self._blob(candidate.manifest), candidate.manifest.digest)
            config = documents.parse(ImageConfig, self._blob(manifest.config), manifest.config.digest)
        # An image without a stated architecture is taken at its word: it runs anywhere, or its author forgot.
        architecture = config.architecture or documents.machine_architecture()
        return Platform(architecture=architecture, os=config.os, variant=config.variant)

    def _choose(self, candidates: list[_Candidate], name: str | None) -> _Candidate:
        if name is not None:
            wanted = reference.full_name(name)
            candidates = [found for found in candidates if wanted in found.names] or candidates
        different = {found.identity: found for found in reversed(candidates)}
        if len(different) > 1 and candidates[0].names and len({found.names for found in candidates}) == 1:
            # Variants of one architecture under one name: the plainest runs on every machine of it.
            plain = [found for found in candidates if not (found.platform and found.platform.variant)]
            return (plain or candidates)[0]
        if len(different) > 1:
            titles = ", ".join(sorted(found.title for found in different.values()))
            raise InvalidRequest(
                f"{self._bundle.label} holds several images: {titles}. Name one of them, or export one alone."
            )
        chosen = candidates[0]
        names = dict.fromkeys(name for found in candidates for name in found.names)
        return replace(chosen, names=tuple(names))

    def _read(self, candidate: _Candidate) -> ArchivedImage:
        if candidate.docker is not None:
            return self._read_docker(candidate.names, candidate.docker)
        assert candidate.manifest is not None
        descriptor = candidate.manifest
        manifest = documents.parse(Manifest, self._blob(descriptor), descriptor.digest)
        config = documents.parse(ImageConfig, self._blob(manifest.config), manifest.config.digest)
        files = [LayerFile(_blob_name(layer.digest), layer.digest, layer.size) for layer in manifest.layers]
        return ArchivedImage(
            kind="oci",
            names=candidate.names,
            config=config,
            config_digest=manifest.config.digest,
            manifest_digest=descriptor.digest,
            layers=self._layers(files, config),
        )

    def _read_docker(self, names: tuple[str, ...], image: DockerImage) -> ArchivedImage:
        config, digest = self._docker_config(image)
        files = [LayerFile(name, _digest_in(name) if "blobs/" in name else None) for name in image.layers]
        return ArchivedImage(
            kind="docker",
            names=names,
            config=config,
            config_digest=digest,
            layers=self._layers(files, config),
        )

    def _layers(self, files: list[LayerFile], config: ImageConfig) -> tuple[LayerFile, ...]:
        if len(files) != len(config.rootfs.diff_ids):
            raise ImageInvalid(
                f"{self._bundle.label}: the manifest has {len(files)} layers, the configuration "
                f"{len(config.rootfs.diff_ids)}; it is damaged, or an artefact and no container image."
            )
        if len(files) > self._limits.layers:
            raise ImageInvalid(f"{self._bundle.label}: more than the allowed {self._limits.layers} layers.")
        return tuple(
            replace(file, diff_id=diff_id)
            for file, diff_id in zip(files, config.rootfs.diff_ids, strict=True)
        )

    def _docker_config(self, image: DockerImage) -> tuple[ImageConfig, str]:
        text = self._document(image.config)
        digest = f"sha256:{hashlib.sha256(text).hexdigest()}"
        _check(f"{self._bundle.label}: {image.config}", _digest_in(image.config) or digest, digest)
        return documents.parse(ImageConfig, text, f"{self._bundle.label}: {image.config}"), digest

    def _blob(self, descriptor: Descriptor) -> bytes:
        name = _blob_name(descriptor.digest)
        size = self._bundle.size(name)
        if size is not None and size != descriptor.size:
            raise ImageInvalid(
                f"{self._bundle.label}: {name} has {size} bytes instead of {descriptor.size}; fetch it again."
            )
        text = self._document(name)
        _check(
            f"{self._bundle.label}: {name}", descriptor.digest, f"sha256:{hashlib.sha256(text).hexdigest()}"
        )
        return text

    def _document(self, name: str) -> bytes:
        with self._bundle.open(name) as file:
            size = self._bundle.size(name) or 0
            if size > self._limits.document_bytes:
                raise ImageInvalid(
                    f"{self._bundle.label}: {name} is too large for a JSON document ({size} bytes)."
                )
            return file.read()


def _blob_name(digest: str) -> str:
    return "blobs/" + digest.replace(":", "/")


def _digest_in(name: str) -> str | None:
    """The digest that a file is named after, where it is."""
    match = _HEX.fullmatch(name.rpartition("/")[2])
    return f"sha256:{match[1]}" if match else None


def _check(what: str, expected: str, actual: str) -> None:
    if expected != actual:
        raise ImageInvalid(
            f"{what} does not have its digest: expected {expected}, found {actual}; fetch it again."
        )


def _describe(platform: Platform) -> str:
    return "/".join(
        part for part in (platform.os or "linux", platform.architecture, platform.variant) if part
    )
