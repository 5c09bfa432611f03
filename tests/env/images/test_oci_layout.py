"""Importing OCI layouts, as directories and as tars."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from orchard.env.errors import ImageInvalid, InvalidRequest
from orchard.env.images import ImageStore
from tests.env.images.archives import INDEX_TYPE, Layout, file, symlink, tar, tree, whiteout
from tests.env.images.conftest import Import

Files = Callable[[str], Path]


@pytest.mark.parametrize("compress", [True, False], ids=["gzip", "plain"])
def test_a_layout_directory_is_imported(
    store: ImageStore, tmp_path: Path, files: Files, compress: bool
) -> None:
    layout = Layout()
    layout.add(
        layout.manifest(tar(file("a"), file("b")), tar(whiteout("a")), compress=compress, Env=["PATH=/x"]),
        "app:1",
    )
    record = store.import_archive(layout.write(tmp_path / "layout"))
    assert (record.name, record.kind, record.env) == ("app:1", "oci", {"PATH": "/x"})
    assert set(tree(files("app:1"))) == {"b"}


def test_a_layout_tar_is_the_same_image_as_its_directory(
    store: ImageStore, tmp_path: Path, add: Import
) -> None:
    layout = Layout()
    layout.add(layout.manifest(tar(file("a"))), "app:1")
    from_directory = store.import_archive(layout.write(tmp_path / "layout"), "one")
    assert add(layout.tar(), "two").digest == from_directory.digest


def test_the_manifest_digest_finds_the_image_too(store: ImageStore, add: Import) -> None:
    layout = Layout()
    descriptor = layout.manifest(tar(file("a")))
    record = add(layout.add(descriptor).tar(), "app")
    assert store.resolve(f"app@{descriptor['digest']}").digest == record.digest


def test_a_bare_reference_name_is_the_tag_of_the_archives_own_name(add: Import) -> None:
    layout = Layout()
    assert (
        add(layout.add(layout.manifest(tar(file("a"))), "3.2").tar(), file_name="tool.tar").name == "tool:3.2"
    )


def test_the_platform_of_this_machine_is_taken_from_a_nested_index(store: ImageStore, add: Import) -> None:
    layout = Layout()
    mine = layout.manifest(tar(file("mine")))
    other = layout.manifest(tar(file("other")), architecture="vax")
    unknown = {**other, "platform": {"architecture": "unknown", "os": "unknown"}}
    index = json.dumps({"schemaVersion": 2, "manifests": [unknown, other, mine]}).encode()
    layout.add(layout.add_blob(index, INDEX_TYPE), "multi:1")
    add(layout.tar())
    assert (store.resolve("multi:1").layers[0] / "mine").exists()


def test_without_an_image_for_this_machine_the_error_lists_the_platforms(add: Import) -> None:
    layout = Layout()
    layout.add(layout.manifest(tar(file("a")), architecture="vax"))
    layout.add(layout.manifest(tar(file("a")), architecture="pdp11"))
    with pytest.raises(ImageInvalid, match="linux/pdp11, linux/vax"):
        add(layout.tar())


def test_several_names_need_a_choice(store: ImageStore, add: Import) -> None:
    layout = Layout()
    layout.add(layout.manifest(tar(file("a", "1"))), "x/one:1").add(
        layout.manifest(tar(file("a", "2"))), "x/two:1"
    )
    with pytest.raises(InvalidRequest, match="x/one:1, x/two:1"):
        add(layout.tar())
    add(layout.tar(), "x/two:1")
    assert (store.resolve("x/two:1").layers[0] / "a").read_text() == "2"


def _blob_of(layout: Layout, kind: str) -> str:
    manifest = next(
        json.loads(data) for data in layout.blobs.values() if data.startswith(b'{"schemaVersion"')
    )
    descriptor = manifest["layers"][0] if kind == "layer" else manifest["config"]
    return str(descriptor["digest"])


@pytest.mark.parametrize("kind", ["layer", "config"])
def test_a_missing_blob_is_named(add: Import, kind: str) -> None:
    layout = Layout()
    layout.add(layout.manifest(tar(file("a"))))
    missing = _blob_of(layout, kind)
    del layout.blobs[missing]
    with pytest.raises(ImageInvalid, match=f"lacks 'blobs/sha256/{missing[7:]}'"):
        add(layout.tar(), "x")


@pytest.mark.parametrize("kind", ["layer", "config"])
def test_a_changed_blob_is_a_digest_error(add: Import, kind: str) -> None:
    layout = Layout()
    layout.add(layout.manifest(tar(file("a", "content")), compress=False))
    changed = _blob_of(layout, kind)
    data = layout.blobs[changed]
    layout.blobs[changed] = (
        data.replace(b"content", b"CONTENT") if kind == "layer" else data.replace(b"linux", b"lunix")
    )
    with pytest.raises(ImageInvalid, match="does not have its digest"):
        add(layout.tar(), "x")


def test_a_shortened_blob_is_told_by_its_size(add: Import) -> None:
    layout = Layout()
    layout.add(layout.manifest(tar(file("a", "content"))))
    short = _blob_of(layout, "layer")
    layout.blobs[short] = layout.blobs[short][:-1]
    with pytest.raises(ImageInvalid, match="bytes instead of"):
        add(layout.tar(), "x")


def test_layer_content_that_the_configuration_does_not_name_is_refused(add: Import) -> None:
    layout = Layout()
    descriptor = layout.manifest(tar(file("a", "named")), compress=False)
    manifest = json.loads(layout.blobs[descriptor["digest"]])
    manifest["layers"] = [layout.add_blob(tar(file("a", "other")), manifest["layers"][0]["mediaType"])]
    layout.add(layout.add_blob(json.dumps(manifest).encode(), descriptor["mediaType"]))
    with pytest.raises(ImageInvalid, match="does not have the content"):
        add(layout.tar(), "x")


def test_symbolic_links_in_a_layout_are_not_followed(store: ImageStore, tmp_path: Path) -> None:
    layout = Layout()
    layout.add(layout.manifest(tar(file("a"))))
    place = layout.write(tmp_path / "layout")
    config = place / "blobs/sha256" / _blob_of(layout, "config")[7:]
    (tmp_path / "elsewhere").write_bytes(config.read_bytes())
    config.unlink()
    config.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ImageInvalid, match="symbolic link"):
        store.import_archive(place, "x")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("index.json", b"{"),
        ("index.json", b"[" * 100_000),
        ("index.json", b'{"manifests": [{"digest": "md5:0", "size": 1}]}'),
        ("index.json", b'{"manifests": [{"digest": "sha256:../../x", "size": 1}]}'),
        ("oci-layout", b"\xff\xfe"),
    ],
)
def test_damaged_documents_are_named(add: Import, name: str, text: bytes) -> None:
    layout = Layout()
    layout.add(layout.manifest(tar(file("a"))))
    with pytest.raises(ImageInvalid, match=name):
        add(tar(*(file(n, text if n == name else d) for n, d in layout.files().items())), "x")


def test_a_directory_that_is_no_layout_points_to_dir_images(store: ImageStore, tmp_path: Path) -> None:
    (tmp_path / "rootfs").mkdir()
    with pytest.raises(ImageInvalid, match="dir:"):
        store.import_archive(tmp_path / "rootfs")


def test_an_index_that_contains_itself_ends(add: Import) -> None:
    layout = Layout()
    document = layout.manifest(tar(file("a")))
    for _ in range(8):
        index = json.dumps({"manifests": [document]}).encode()
        document = layout.add_blob(index, INDEX_TYPE)
    with pytest.raises(ImageInvalid, match="nested too deeply"):
        add(layout.add(document).tar(), "x")


def test_a_linked_document_in_a_layout_tar_names_no_file_of_this_machine(
    add: Import, tmp_path: Path, files: Files
) -> None:
    layout = Layout()
    layout.add(layout.manifest(tar(file("a"))))
    written = layout.files()
    (tmp_path / "index.json").write_bytes(written.pop("index.json"))
    link = symlink("index.json", str(tmp_path / "index.json"))
    record = add(tar(*(file(name, data) for name, data in written.items()), link), "x")
    assert record.kind == "rootfs"  # without an index it is a tar of some files, and the link is one of them
    assert (files("x") / "index.json").is_symlink()
