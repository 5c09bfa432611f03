"""The local image store: what it holds, how a reference becomes something to run, and how things leave it."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from orchard.env.errors import Conflict, InfrastructureError, InvalidRequest
from orchard.env.images import documents, reference
from orchard.env.images.area import StoreArea, explained, tree_size
from orchard.env.images.cache import PullCache
from orchard.env.images.catalog import Catalog
from orchard.env.images.directory import DirectoryImages
from orchard.env.images.host import HostImage
from orchard.env.images.importer import Base, Imported, Importer, Progress
from orchard.env.images.limits import ImportLimits
from orchard.env.images.model import ImageMount, ResolvedImage
from orchard.env.images.record import ImageRecord, StoredImage
from orchard.env.images.usage import Users

_MAX_CACHED = 4096

Records = list[ImageRecord]


@dataclass(frozen=True, slots=True)
class _Cached:
    """A resolved name and the files it was read from: (path, inode, time). below: the `host` it stands on."""

    files: tuple[tuple[Path, int, int], ...]
    below: ResolvedImage | None
    image: ResolvedImage


class ImageStore:
    """The images under one directory, `STATE/images`. Methods may be called from any thread and process.

    directories: where images of the kind `dir:PATH` may lie; None allows every directory, an empty collection none.
    durable: have the disk confirm an import before it is announced. machine: the root of the file system that `host`
    shows.
    """

    def __init__(
        self,
        root: Path,
        *,
        directories: Collection[Path] | None = None,
        limits: ImportLimits | None = None,
        durable: bool = True,
        machine: Path = Path("/"),
    ) -> None:
        root = root.absolute()
        allowed = None if directories is None else tuple(each.resolve() for each in directories)
        self._area = StoreArea(root, durable=durable)
        self._catalog = Catalog(self._area)
        self._users = Users(self._area, root.parent / "sandboxes")
        # The store may be borrowed from another state directory, by a link.
        self._directories = DirectoryImages((root.parent, root.resolve().parent), allowed)
        self._host = HostImage(self._area, machine)
        self._limits = limits or ImportLimits()
        self._cache: dict[str, _Cached] = {}

    def prepare(self) -> None:
        """Make the directories, clear leftovers, build `host`: so that the first sandbox does not wait for it."""
        self._area.make()
        self._users.register()
        self._host.resolve()

    @property
    def area(self) -> StoreArea:
        """The store's directory, for what fills it (pulls)."""
        return self._area

    # -- resolving -----------------------------------------------------------------------------------------

    def resolve(self, ref: str) -> ResolvedImage:
        """What to run for `ref`: `host`, `dir:/path`, a name with or without tag, or `sha256:` and digits.

        Raises ImageNotFound with what is near and how to import; InvalidRequest for text that names no image;
        PathInvalid or Forbidden for a directory that cannot or may not be an image.
        """
        self._area.make()
        self._users.register()
        cached = self._cache.get(ref)
        if cached is not None and self._is_current(cached):
            return cached.image
        parsed = reference.parse(ref)
        if parsed.kind == "host":
            return self._host.resolve()
        if parsed.kind == "directory":
            return self._directories.resolve(ref, parsed.value)
        return self._resolve_stored(ref, parsed)

    def _is_current(self, cached: _Cached) -> bool:
        try:
            for path, inode, mtime_ns in cached.files:
                info = path.stat()
                if (info.st_ino, info.st_mtime_ns) != (inode, mtime_ns):
                    return False
        except OSError:
            return False
        return cached.below is None or self._host.resolve() is cached.below

    def _resolve_stored(self, ref: str, parsed: reference.Reference) -> ResolvedImage:
        stored = self._catalog.find(parsed)
        files = [self._catalog.image_file(stored.record.digest)]
        if parsed.kind == "name":
            known = self._catalog.known_name(parsed.value)
            files.append(self._catalog.name_file(known))
            if known != parsed.value:
                files.append(self._area.names)  # the name itself may appear and then goes before
        # Stamped before the content is read again: a change in between only costs the cache its entry.
        stamps = tuple((path, info.st_ino, info.st_mtime_ns) for path in files if (info := _stat(path)))
        stored = self._catalog.find(parsed)
        below = self.resolve(stored.bottom) if stored.bottom else None
        image = self._stack(ref, stored, below)
        if stored.bottom in (None, reference.HOST) and len(stamps) == len(files):
            if len(self._cache) >= _MAX_CACHED:
                self._cache.clear()
            self._cache[ref] = _Cached(stamps, below, image)
        return image

    def _stack(self, ref: str, stored: StoredImage, below: ResolvedImage | None) -> ResolvedImage:
        own = tuple(self._area.layers / name / "tree" for name in stored.layers)
        for path in own:
            if not path.is_dir():
                raise InfrastructureError(
                    f"The files of image {ref!r} are missing at {str(path)!r}; remove the image and import it again."
                )
        record = stored.record
        return ResolvedImage(
            ref=ref,
            digest=record.digest,
            layers=(*own, *(below.layers if below else ())),
            mounts=tuple(_stacked(own, mount) for mount in below.mounts) if below else (),
            env=dict(record.env),
            working_dir=record.working_dir,
            user=record.user,
        )

    # -- looking -------------------------------------------------------------------------------------------

    def list(self) -> Records:
        """All images: `host`, then by name; those that lost their name to a later import appear by digest."""
        self._area.make()
        images = {stored.record.digest: stored.record for stored in self._catalog.images()}
        names = self._catalog.names()
        named = [(name, digest) for name, digest in sorted(names.items()) if digest in images]
        nameless = [(digest, digest) for digest in sorted(set(images) - set(names.values()))]
        found = [replace(images[digest], name=name) for name, digest in [*named, *nameless]]
        return [self._host_record(), *found]

    def _host_record(self) -> ImageRecord:
        image = self._host.resolve()
        return ImageRecord(
            name=reference.HOST,
            digest=image.digest,
            size_bytes=0,
            created_at=image.layers[0].stat().st_mtime,
            kind="host",
            architecture=documents.machine_architecture(),
            env=dict(image.env),
            notes=("this machine's system directories, read-only",),
        )

    # -- changing ------------------------------------------------------------------------------------------

    def import_archive(
        self,
        path: Path,
        name: str | None = None,
        *,
        base: str | None = None,
        progress: Progress = lambda line: None,
        pulled_digest: str | None = None,
        recipe: str | None = None,
    ) -> ImageRecord:
        """Add an image from an OCI layout (directory or tar), a `docker save` archive or a plain root file system
        tar; tars may be compressed with gzip, bzip2, xz or, where Python can, Zstandard.

        name: what to call it, default what the archive says, else the archive's own name; where the archive holds
        several images, the one to take. base: an image to stack the archive's layers on, which then inherits its
        environment, working directory and user. An import of what is already there stores nothing twice. A name
        that is taken moves to the new image. progress receives a line per layer. pulled_digest: a further digest that
        finds it. recipe: the digest of what it was built from, for `find_built`.

        Raises FileMissing, ImageInvalid (damaged, hostile, for another platform), InvalidRequest (name, ambiguity),
        ImageNotFound (base), TooLarge, DiskFull, InfrastructureError. Nothing is left when it raises.
        """
        if name is not None:
            reference.full_name(name)
        self._area.make()
        self._area.clear_scratch()
        stacked = None if base is None else self._base(base)
        with explained(f"importing {str(path)!r}"), self._area.scratch() as scratch:
            done = Importer(self._area, self._limits, name, stacked, progress).run(Path(path), scratch)
            if done.layer is not None:
                self._area.settle(done.layer)
            return self._commit(_marked(done, pulled_digest, recipe))

    def _base(self, ref: str) -> Base:
        parsed = reference.parse(ref)
        image = self.resolve(ref)
        if parsed.kind in ("host", "directory"):
            return Base(ref, image, (), ref)
        stored = self._catalog.find(parsed)
        return Base(ref, image, stored.layers, stored.bottom)

    def _commit(self, done: Imported) -> ImageRecord:
        stored = done.stored
        with self._area.writing():
            place = self._area.layers / stored.layers[0]
            if not place.exists() and done.layer is not None:
                done.layer.rename(place)
            if not all((self._area.layers / layer).is_dir() for layer in stored.layers):
                raise InfrastructureError("Layers were removed during the import; import the archive again.")
            stored = self._with_known_digests(stored)
            self._catalog.put(stored, done.names)
        return stored.record

    def _with_known_digests(self, stored: StoredImage) -> StoredImage:
        known = {each.record.digest: each for each in self._catalog.images()}.get(stored.record.digest)
        if known is None:
            return stored
        digests = dict.fromkeys((*known.pulled_digests, *stored.pulled_digests))
        return replace(stored, pulled_digests=tuple(digests))

    def find_built(self, recipe: str) -> ImageRecord | None:
        """The image that was built from a recipe of this digest, where it is still here."""
        self._area.make()
        for stored in self._catalog.images():
            if stored.record.recipe == recipe:
                return stored.record
        return None

    def tag(self, ref: str, name: str) -> ImageRecord:
        """Give a stored image a further name; a name that is taken moves to it. Raises ImageNotFound."""
        full = reference.full_name(name)
        self._area.make()
        with self._area.writing():
            stored = self._catalog.find(reference.parse(ref))
            self._catalog.put(stored, [full])
        return replace(stored.record, name=full)

    def remove(self, name: str, in_use: Collection[str] = ()) -> None:
        """Take away a name, or with a digest an image with all its names; with the last name go the files that no
        other image needs.

        in_use: digests known to be in use, besides those that live sandboxes have noted in the state directory.
        Raises ImageNotFound, Conflict while sandboxes use it, InvalidRequest for `host` and `dir:`.
        """
        self._area.make()
        parsed = reference.parse(name)
        if parsed.kind in ("host", "directory"):
            raise InvalidRequest(f"{name!r} is not stored here, so there is nothing to remove.")
        with self._area.writing():
            digest = self._catalog.find(parsed).record.digest
            names = [each for each, held in self._catalog.names().items() if held == digest]
            leaving = names if parsed.kind == "digest" else [self._catalog.known_name(parsed.value)]
            if set(leaving) >= set(names):
                self._refuse_if_used(name, digest, in_use)
                self._catalog.drop_image(digest)
            for each in leaving:
                self._catalog.drop_name(each)
        self._sweep(self._unneeded_layers)

    def _refuse_if_used(self, name: str, digest: str, in_use: Collection[str]) -> None:
        holders = sorted(self._users.in_use().of(digest))
        if holders or digest in in_use:
            who = ", ".join(holders[:5]) or "a sandbox that is starting"
            raise Conflict(
                f"The image {name!r} is in use by {who}; delete the sandboxes first.", sandboxes=holders
            )

    def prune(self, in_use: Collection[str] = ()) -> int:
        """Remove images without a name, layers without an image, what pulls have cached, old skeletons of `host` and
        leftovers of killed imports; never what a live sandbox uses. in_use as for `remove`. The number of bytes freed.
        """
        self._area.make()
        freed = self._area.clear_scratch() + PullCache(self._area).clear()
        current = self._host.resolve()
        users = self._users.in_use()
        if users.unknown:
            return freed  # nobody can tell what those use
        used = {*users.by_digest, *in_use}

        def unneeded() -> Iterator[Path]:
            named = set(self._catalog.names().values())
            for stored in list(self._catalog.images()):
                if stored.record.digest not in named | used:
                    self._catalog.drop_image(stored.record.digest)
            yield from self._unneeded_layers()
            yield from self._unneeded_skeletons(current, used)

        return freed + self._sweep(unneeded)

    def _unneeded_layers(self) -> Iterator[Path]:
        needed = {layer for stored in self._catalog.images() for layer in stored.layers}
        yield from (path for path in self._area.layers.iterdir() if path.name not in needed)

    def _unneeded_skeletons(self, current: ResolvedImage, used: set[str]) -> Iterator[Path]:
        on_host = [each for each in self._catalog.images() if each.bottom == reference.HOST]
        if any(each.record.digest in used for each in on_host):
            return  # it runs on some skeleton, and does not say on which
        for path in self._host.skeletons():
            if path != current.layers[0].parent and f"sha256:{path.name}" not in used:
                yield path

    def _sweep(self, find: Callable[[], Iterator[Path]]) -> int:
        """Remove what `find` names, so that a kill in between leaves only scratch space; the bytes freed."""
        with explained("removing files"), self._area.scratch() as away:
            with self._area.writing():
                for path in list(find()):
                    path.rename(away / path.name)
            return tree_size(away)


def _marked(done: Imported, pulled_digest: str | None, recipe: str | None) -> Imported:
    stored = done.stored
    if pulled_digest is not None:
        stored = replace(stored, pulled_digests=(pulled_digest,))
    if recipe is not None:
        stored = replace(stored, record=replace(stored.record, recipe=recipe))
    return replace(done, stored=stored)


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _stacked(own: tuple[Path, ...], mount: ImageMount) -> ImageMount:
    """A tree that the base mounts, with what the layers above have at the same place on top of it; writable, since
    the derived image is the user's own."""
    relative = mount.target.lstrip("/")
    above = tuple(layer / relative for layer in own if (layer / relative).is_dir())
    return replace(mount, layers=(*above, *mount.layers), read_only=False)
