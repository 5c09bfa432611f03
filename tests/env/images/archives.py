"""Image archives made by hand, so that the tests rest on the formats and not on a tool that happens to be there."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import stat
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchard.env.images.documents import machine_architecture

MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar"
INDEX_TYPE = "application/vnd.oci.image.index.v1+json"


@dataclass(frozen=True)
class Item:
    """One tar entry; `kind` is a tarfile type."""

    name: str
    data: bytes = b""
    kind: bytes = tarfile.REGTYPE
    mode: int = 0o644
    uid: int = 0
    gid: int = 0
    mtime: float = 1_700_000_000
    link: str = ""
    pax: Mapping[str, str] | None = None
    device: tuple[int, int] = (1, 3)


def file(name: str, data: bytes | str = b"", mode: int = 0o644, **more: Any) -> Item:
    return Item(name, data.encode() if isinstance(data, str) else data, mode=mode, **more)


def directory(name: str, mode: int = 0o755, **more: Any) -> Item:
    return Item(name, kind=tarfile.DIRTYPE, mode=mode, **more)


def symlink(name: str, target: str) -> Item:
    return Item(name, kind=tarfile.SYMTYPE, link=target, mode=0o777)


def hardlink(name: str, target: str) -> Item:
    return Item(name, kind=tarfile.LNKTYPE, link=target)


def whiteout(name: str) -> Item:
    head, _, last = name.rpartition("/")
    return file(f"{head}/.wh.{last}" if head else f".wh.{last}")


def opaque(name: str) -> Item:
    return file(f"{name}/.wh..wh..opq" if name else ".wh..wh..opq")


def tar(*items: Item, end: bool = True) -> bytes:
    """A tar of the items, in order."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT, encoding="utf-8") as archive:
        for item in items:
            info = tarfile.TarInfo(item.name)
            info.type, info.mode, info.uid, info.gid = item.kind, item.mode, item.uid, item.gid
            info.mtime, info.linkname, info.pax_headers = item.mtime, item.link, dict(item.pax or {})
            info.devmajor, info.devminor = item.device
            info.size = len(item.data)
            archive.addfile(info, io.BytesIO(item.data))
        content_end = archive.offset
    return buffer.getvalue() if end else buffer.getvalue()[:content_end]


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def config(layers: Iterable[bytes], *, architecture: str | None = None, **run: Any) -> bytes:
    """An image configuration for uncompressed layers; `run` are keys of its `config`, such as Env."""
    return json.dumps(
        {
            "architecture": architecture or machine_architecture(),
            "os": "linux",
            "config": run,
            "rootfs": {"type": "layers", "diff_ids": [digest(layer) for layer in layers]},
        }
    ).encode()


def docker_archive(
    *layers: bytes, tags: Iterable[str] = ("made:1",), architecture: str | None = None, **run: Any
) -> bytes:
    """What `docker save` writes, as far as an importer looks: manifest.json last."""
    text = config(layers, architecture=architecture, **run)
    name = f"{digest(text)[7:]}.json"
    files = [file(f"{number}/layer.tar", layer) for number, layer in enumerate(layers)]
    manifest = [
        {"Config": name, "RepoTags": list(tags), "Layers": [f"{n}/layer.tar" for n in range(len(layers))]}
    ]
    return tar(*files, file(name, text), file("manifest.json", json.dumps(manifest)))


class Layout:
    """An OCI layout in memory."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.index: list[dict[str, Any]] = []

    def add_blob(self, data: bytes, media_type: str) -> dict[str, Any]:
        self.blobs[digest(data)] = data
        return {"mediaType": media_type, "digest": digest(data), "size": len(data)}

    def manifest(
        self, *layers: bytes, compress: bool = True, architecture: str | None = None, **run: Any
    ) -> dict[str, Any]:
        """Add an image; the descriptor of its manifest."""
        stored = [gzip.compress(layer, mtime=0) if compress else layer for layer in layers]
        text = config(layers, architecture=architecture, **run)
        document = {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "config": self.add_blob(text, CONFIG_TYPE),
            "layers": [self.add_blob(data, LAYER_TYPE + ("+gzip" if compress else "")) for data in stored],
        }
        return self.add_blob(json.dumps(document).encode(), MANIFEST_TYPE)

    def add(self, descriptor: dict[str, Any], name: str | None = None, **more: Any) -> Layout:
        annotations = {"annotations": {"org.opencontainers.image.ref.name": name}} if name else {}
        self.index.append({**descriptor, **annotations, **more})
        return self

    def files(self) -> dict[str, bytes]:
        index = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": self.index}
        return {
            "oci-layout": json.dumps({"imageLayoutVersion": "1.0.0"}).encode(),
            "index.json": json.dumps(index).encode(),
            **{f"blobs/{key.replace(':', '/')}": data for key, data in self.blobs.items()},
        }

    def write(self, path: Path) -> Path:
        for name, data in self.files().items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(data)
        return path

    def tar(self) -> bytes:
        return tar(*(file(name, data) for name, data in self.files().items()))


def tree(root: Path) -> dict[str, tuple[Any, ...]]:
    """Everything below `root`: path → (type, mode, content or target), symbolic links not followed."""
    found: dict[str, tuple[Any, ...]] = {}
    for path in root.rglob("*"):
        info = path.lstat()
        content: Any = None
        if stat.S_ISREG(info.st_mode):
            content = path.read_bytes()
        elif stat.S_ISLNK(info.st_mode):
            content = os.fsencode(path.readlink())
        mode = None if stat.S_ISLNK(info.st_mode) else stat.S_IMODE(info.st_mode)
        found[str(path.relative_to(root))] = (stat.S_IFMT(info.st_mode), mode, content)
    return found
