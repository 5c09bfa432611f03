"""From an archive to a finished layer in scratch space; the store then gives it its place."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from orchard.env.errors import ImageInvalid, InvalidRequest, OrchardError
from orchard.env.images import documents, reference
from orchard.env.images.archives import ArchivedImage, ArchiveReader, LayerFile
from orchard.env.images.area import StoreArea, tree_size
from orchard.env.images.bundles import DirectoryBundle, TarBundle, open_bundle
from orchard.env.images.entries import TarEntries
from orchard.env.images.limits import MIB, ImportLimits
from orchard.env.images.model import ResolvedImage
from orchard.env.images.record import ImageRecord, StoredImage
from orchard.env.images.streams import DAMAGE, Hashing, Slice, decompressed
from orchard.env.images.tree import TreeWriter
from orchard.env.images.view import ImageView

#: Overlay lookups stay cheap below this many layers.
MAX_LAYERS = 60

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Base:
    """The image to stack on: as given, as resolved, and the store's own part of it."""

    ref: str
    image: ResolvedImage
    layers: tuple[str, ...]
    bottom: str | None


@dataclass(frozen=True, slots=True)
class Imported:
    """A finished import. layer: its directory in scratch space, None when the store has it already."""

    stored: StoredImage
    names: tuple[str, ...]
    layer: Path | None


class Importer:
    """One import. name: the image's name, where the archive's own is not wanted."""

    def __init__(
        self, area: StoreArea, limits: ImportLimits, name: str | None, base: Base | None, progress: Progress
    ) -> None:
        self._area = area
        self._limits = limits
        self._name = name
        self._base = base
        self._progress = progress

    def run(self, path: Path, scratch: Path) -> Imported:
        """Unpack the archive at `path` below `scratch`. Raises what `ImageStore.import_archive` raises."""
        if self._base is not None and len(self._base.layers) >= MAX_LAYERS:
            raise InvalidRequest(
                f"{self._base.ref!r} has {MAX_LAYERS} layers already; build on an image lower down."
            )
        with open_bundle(path, scratch, self._limits) as bundle:
            image = ArchiveReader(bundle, path, self._limits).image(self._name)
            names = self._names(image, path)
            if image.kind == "rootfs":
                assert isinstance(bundle, TarBundle)
                diff_ids, notes = self._unpack_rootfs(bundle, scratch)
            else:
                diff_ids = [layer.diff_id for layer in image.layers if layer.diff_id]
                if (self._area.layers / self._layer_id(diff_ids)).is_dir():
                    return self._imported(image, diff_ids, names, None, [])
                notes = self._unpack_layers(bundle, image.layers, scratch)
            return self._imported(image, diff_ids, names, scratch / "layer", notes)

    def _names(self, image: ArchivedImage, path: Path) -> tuple[str, ...]:
        if self._name is not None:
            return (reference.full_name(self._name),)
        return image.names or (reference.name_from_path(path),)

    # -- unpacking -----------------------------------------------------------------------------------------

    def _writer(self, scratch: Path, *, keep_links: bool) -> TreeWriter:
        tree = scratch / "layer" / "tree"
        tree.mkdir(parents=True, mode=0o755)
        tree.chmod(0o755)
        view = None
        if self._base is not None:
            view = ImageView(self._base.image)
            _copy_root(view, tree)
        fd = os.open(tree, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        return TreeWriter(fd, self._limits, view, keep_links=keep_links)

    def _unpack_rootfs(self, bundle: TarBundle, scratch: Path) -> tuple[list[str], list[str]]:
        writer = self._writer(scratch, keep_links=self._base is not None)
        stream = Hashing(bundle.whole())
        try:
            self._progress("unpacking the root file system")
            entries = TarEntries(stream, self._limits, label=bundle.label)
            writer.add_layer(entries, entries.content)
            writer.finish()
        finally:
            writer.close()
        stream.drain(self._limits.unpacked_bytes)
        return [stream.digest], _counted(writer)

    def _unpack_layers(
        self, bundle: DirectoryBundle | TarBundle, layers: tuple[LayerFile, ...], scratch: Path
    ) -> list[str]:
        for layer in layers:
            size = bundle.size(layer.file)
            if size is not None and layer.size is not None and size != layer.size:
                raise ImageInvalid(
                    f"{bundle.label}: {layer.file} has {size} bytes instead of {layer.size}; fetch it again."
                )
        writer = self._writer(scratch, keep_links=False)
        try:
            for number, layer in enumerate(layers, 1):
                size_mib = (bundle.size(layer.file) or 0) / MIB
                self._progress(f"unpacking layer {number} of {len(layers)} ({size_mib:.1f} MiB)")
                with bundle.open(layer.file) as file:
                    self._unpack_layer(f"{bundle.label}: {layer.file}", layer, file, writer)
            writer.finish()
        finally:
            writer.close()
        return _counted(writer)

    def _unpack_layer(self, label: str, layer: LayerFile, file: Slice, writer: TreeWriter) -> None:
        stored = Hashing(file)
        content = Hashing(decompressed(stored))
        try:
            entries = TarEntries(content, self._limits, label=label, sealed=True)
            writer.add_layer(entries, entries.content)
            content.drain(self._limits.unpacked_bytes)
        except ImageInvalid as error:
            # A damaged file fails in many ways; that it is not the file that was meant says it best.
            self._verify_stored(label, layer, stored, error)
            raise
        except OrchardError:
            raise
        except DAMAGE as error:
            self._verify_stored(label, layer, stored, error)
            raise ImageInvalid(f"{label} is damaged ({error}); fetch or export it again.") from error
        self._verify_stored(label, layer, stored, None)
        if layer.diff_id is not None and content.digest != layer.diff_id:
            raise ImageInvalid(
                f"{label} does not have the content that the image's configuration names: expected "
                f"{layer.diff_id}, found {content.digest}; fetch or export it again."
            )

    def _verify_stored(
        self, label: str, layer: LayerFile, stored: Hashing, cause: BaseException | None
    ) -> None:
        if layer.digest is None:
            return
        stored.drain(self._limits.unpacked_bytes)
        if stored.digest != layer.digest:
            raise ImageInvalid(
                f"{label} does not have its digest: expected {layer.digest}, found {stored.digest}; fetch it again."
            ) from cause

    # -- describing ----------------------------------------------------------------------------------------

    def _layer_id(self, diff_ids: list[str]) -> str:
        """The name of a layer directory: the digest of what it was made from, in order."""
        over = self._base.image.digest if self._base else None
        return _digest_of({"layers": diff_ids, "over": over})

    def _imported(
        self,
        image: ArchivedImage,
        diff_ids: list[str],
        names: tuple[str, ...],
        layer: Path | None,
        notes: list[str],
    ) -> Imported:
        layer_id = self._layer_id(diff_ids)
        if layer is not None:
            size = tree_size(layer / "tree")
            _write_json(layer / "layer.json", {"size_bytes": size, "notes": notes})
        else:
            known = json.loads((self._area.layers / layer_id / "layer.json").read_bytes())
            size, notes = known["size_bytes"], known["notes"]
        if image.kind == "rootfs":
            notes = ["a plain root file system: the archive has no image configuration", *notes]
        record = self._record(image, layer_id, size, tuple(notes))
        base = self._base
        stored = StoredImage(
            record=replace(record, name=names[0]),
            layers=(layer_id, *(base.layers if base else ())),
            bottom=base.bottom if base else None,
            manifest_digest=image.manifest_digest if base is None else None,
        )
        return Imported(stored, names, layer)

    def _record(self, image: ArchivedImage, layer_id: str, size: int, notes: tuple[str, ...]) -> ImageRecord:
        base = self._base
        config = image.config.config if image.config else None
        own_env = image.config.environment() if image.config else {}
        inherited = base.image if base else None
        env = {**(inherited.env if inherited else {}), **own_env}
        working_dir = (config and config.working_dir) or (inherited and inherited.working_dir) or None
        user = (config and config.user) or (inherited and inherited.user) or None
        architecture = (image.config.architecture if image.config else "") or documents.machine_architecture()
        digest = image.config_digest if base is None else None
        if digest is None:
            digest = "sha256:" + _digest_of(
                {"layer": layer_id, "env": env, "working_dir": working_dir, "user": user, "kind": image.kind}
            )
        return ImageRecord(
            name="",
            digest=digest,
            size_bytes=size,
            created_at=time.time(),
            kind=image.kind,
            architecture=architecture,
            base=base.ref if base else None,
            env=env,
            working_dir=working_dir,
            user=user,
            notes=notes,
        )


def _copy_root(view: ImageView, tree: Path) -> None:
    """Give a layer's top directory the owner and mode of the base's: the topmost layer decides them."""
    stack = view.root()
    try:
        info = os.fstat(stack[0])
        if os.geteuid() == 0:
            os.chown(tree, info.st_uid, info.st_gid)
        tree.chmod(info.st_mode & 0o7777)
    finally:
        for fd in stack:
            os.close(fd)


def _counted(writer: TreeWriter) -> list[str]:
    return [f"{count} {what}" for what, count in sorted(writer.notes.items())]


def _digest_of(document: object) -> str:
    text = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    return hashlib.sha256(text).hexdigest()


def _write_json(path: Path, document: object) -> None:
    path.write_text(json.dumps(document))
