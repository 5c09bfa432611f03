"""Pulling images from registries into the store, by skopeo, through a cache of blobs."""

from __future__ import annotations

import ipaddress
import os
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from orchard.env.errors import ImageInvalid, ImageNotFound, InfrastructureError, InvalidRequest
from orchard.env.images import documents, reference, skopeo
from orchard.env.images.cache import PullCache
from orchard.env.images.importer import Progress
from orchard.env.images.record import ImageRecord
from orchard.env.images.store import ImageStore

_DOCKER_HUB = "docker.io"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_PAUSES_S = (0.5, 2.0)
_SHOWN_TAGS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PullSettings:
    """How to pull.

    auth_file: registry credentials as `skopeo login` and Docker write them; None: where those tools look.
    insecure_registries: `HOST` or `HOST:PORT` of registries that may do without verified HTTPS; those on this
    machine's loopback always may. stall_timeout_s: a pull that receives nothing for this long is given up.
    """

    auth_file: Path | None = None
    insecure_registries: tuple[str, ...] = ()
    stall_timeout_s: float = 180.0


@dataclass(frozen=True, slots=True)
class Remote:
    """An image in a registry. name: what it is called in the store."""

    repository: str
    tag: str
    digest: str | None

    @classmethod
    def parse(cls, ref: str) -> Remote:
        """Read `NAME[:TAG]` or `NAME[:TAG]@sha256:…`. Raises InvalidRequest for what no registry can have."""
        name, at, digest = ref.partition("@")
        if ref == reference.HOST or name.startswith((reference.DIRECTORY_PREFIX, reference.DIGEST_PREFIX)):
            raise InvalidRequest(
                f"{ref!r} is not an image of a registry. Names look like `registry.example/project/tool:1.2`, with "
                f"`@sha256:…` for an exact one; without a registry {_DOCKER_HUB} is meant."
            )
        if at and not _DIGEST.fullmatch(digest):
            raise InvalidRequest(f"{ref!r}: a pull by digest needs `sha256:` and all 64 hexadecimal digits.")
        repository, tag = reference.split_tag(reference.full_name(name))
        return cls(repository, tag, digest if at else None)

    @property
    def name(self) -> str:
        # An image pulled by digest needs a name too, else it would look like one that lost it.
        plain_tag = f"sha256-{self.digest[7:19]}" if self.digest else self.tag
        return f"{self.repository}:{plain_tag}"

    @property
    def registry(self) -> str:
        first, slash, _ = self.repository.partition("/")
        named = slash and ("." in first or ":" in first or first == "localhost")
        return first if named else _DOCKER_HUB

    @property
    def source(self) -> str:
        """What skopeo calls it; a digest goes before the tag, which then is only a comment."""
        return f"docker://{self.repository}" + (f"@{self.digest}" if self.digest else f":{self.tag}")


def is_remote(ref: str) -> bool:
    """Whether a registry could have an image of this name."""
    try:
        Remote.parse(ref)
    except InvalidRequest:
        return False
    return True


class Puller:
    """Pulls into one store. `pull` may be called from any thread."""

    def __init__(self, store: ImageStore, settings: PullSettings | None = None) -> None:
        self._store = store
        self._settings = settings or PullSettings()
        self._cache = PullCache(store.area)

    def pull(
        self, ref: str, progress: Progress = lambda line: None, stop: threading.Event | None = None
    ) -> ImageRecord:
        """Fetch `ref` for this machine's architecture; layers that are here already are not fetched again.

        A pull of what is here asks the registry whether the tag has moved. Pulls of one reference at the same time
        are one pull. Setting `stop` ends it with InfrastructureError; whatever ends it, whole layers stay cached.

        Raises InvalidRequest, ImageNotFound (no such name, or tag), PullDenied, RegistryRateLimited (with
        `retry_after_s`), RegistryUnreachable, ImageInvalid (no image for this machine; wrong digest), DiskFull,
        RuntimeRefused (no skopeo).
        """
        remote = Remote.parse(ref)
        skopeo.find()
        if self._settings.auth_file is not None and not self._settings.auth_file.is_file():
            raise InvalidRequest(
                f"There is no file {str(self._settings.auth_file)!r} with registry credentials."
            )
        stop = stop or threading.Event()
        before = self._here(remote)
        with self._cache.pulling(remote.name, stop) as first:
            now = self._here(remote)
            if not first and now is not None and now != before:
                return now
            return _Pull(self._store, self._cache, self._settings, remote, ref, progress, stop).run()

    def _here(self, remote: Remote) -> ImageRecord | None:
        return next((each for each in self._store.list() if each.name == remote.name), None)


class _Damaged(Exception):
    """A cached blob is missing or not what its name says; it was dropped, so that another attempt fetches it."""


@dataclass(frozen=True, slots=True)
class _Pull:
    store: ImageStore
    cache: PullCache
    settings: PullSettings
    remote: Remote
    ref: str
    progress: Progress
    stop: threading.Event

    def run(self) -> ImageRecord:
        pauses_s = [*_PAUSES_S, None]
        for pause_s in pauses_s:
            with self.store.area.scratch() as scratch:
                layout = scratch / "layout"
                outcome = self._copy(layout)
                if not outcome.failure:
                    try:
                        return self._import(layout)
                    except _Damaged as error:
                        if pause_s is None:
                            raise ImageInvalid(f"{error.__cause__}") from error.__cause__
            if outcome.failure and (pause_s is None or not skopeo.is_transient(outcome.failure)):
                raise self._explained(outcome)
            self.progress("the transfer failed; trying again with the layers that have arrived")
            if self.stop.wait(pause_s):
                raise InfrastructureError(f"The pull of {self.ref!r} was stopped; pull again.")
        raise AssertionError("unreachable")

    def _copy(self, layout: Path) -> skopeo.Outcome:
        layout.mkdir()
        copy = ["copy", *self._access("--src-"), "--dest-oci-accept-uncompressed-layers"]
        target = ["--dest-shared-blob-dir", str(self.cache.blobs), self.remote.source, f"oci:{layout}:pulled"]
        return self._skopeo([*copy, *target], self.progress, lambda: _bytes_in(layout))

    def _skopeo(
        self,
        arguments: list[str],
        progress: Progress = lambda line: None,
        activity: Callable[[], object] = lambda: None,
    ) -> skopeo.Outcome:
        return skopeo.run(
            arguments,
            stop=self.stop,
            progress=progress,
            activity=activity,
            stall_timeout_s=self.settings.stall_timeout_s,
        )

    def _access(self, prefix: str) -> list[str]:
        """Credentials and whether plain HTTP will do, as skopeo's options."""
        options = []
        if self.settings.auth_file is not None:
            options += ["--authfile", str(self.settings.auth_file)]
        registry = self.remote.registry
        host = registry.rpartition(":")[0] if re.search(r":\d+$", registry) else registry
        if _is_loopback(host) or {registry, host} & set(self.settings.insecure_registries):
            options.append(f"{prefix}tls-verify=false")
        return options

    def _import(self, layout: Path) -> ImageRecord:
        digests: list[str] = []
        try:
            digests = self._digests(layout)
            self.cache.link(digests, layout)
            return self.store.import_archive(
                layout, self.remote.name, progress=self.progress, pulled_digest=self.remote.digest
            )
        except FileNotFoundError as error:
            raise _Damaged from error
        except ImageInvalid as error:
            if not any(word in error.detail for word in ("digest", "bytes instead of", "damaged")):
                raise
            self.cache.drop(digests)
            raise _Damaged from error

    def _digests(self, layout: Path) -> list[str]:
        """Of all blobs that the layout's one image consists of."""
        index = documents.parse(documents.Index, (layout / "index.json").read_bytes(), self.ref)
        manifest_digest = index.manifests[0].digest
        try:
            text = self.cache.path(manifest_digest).read_bytes()
            manifest = documents.parse(documents.Manifest, text, self.ref)
        except ImageInvalid:
            self.cache.drop([manifest_digest])
            raise
        return [manifest_digest, manifest.config.digest, *(layer.digest for layer in manifest.layers)]

    def _explained(self, outcome: skopeo.Outcome) -> Exception:
        error = skopeo.explain(outcome, self.ref, self.remote.registry, documents.machine_architecture())
        if not isinstance(error, ImageNotFound) or self.remote.digest:
            return error
        # Registries answer alike for a name and a tag that they do not have; their list of tags tells.
        listing = self._skopeo(["list-tags", *self._access("--"), f"docker://{self.remote.repository}"])
        if listing.failure:
            return ImageNotFound(
                f"{self.remote.registry} has no image of the name {self.remote.repository!r}; check the spelling."
            )
        tags = re.findall(r'^\s+"([^"]+)",?$', listing.output, re.MULTILINE)
        if self.remote.tag in tags:
            return error
        shown = ", ".join(tags[-_SHOWN_TAGS:]) or "none"
        return ImageNotFound(
            f"{self.remote.repository!r} has no tag {self.remote.tag!r} in {self.remote.registry}; it has: {shown}."
        )


def _bytes_in(folder: Path) -> int:
    """Of the files that are on their way, so that one can see whether more arrive."""
    total = 0
    try:
        for entry in os.scandir(folder):
            total += entry.stat(follow_symlinks=False).st_size
    except FileNotFoundError:
        pass  # it was finished meanwhile
    return total


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
