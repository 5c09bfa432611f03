"""Properties over generated trees and layers."""

from __future__ import annotations

import io
import os
import stat
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchard.env.errors import ImageInvalid, InvalidRequest
from orchard.env.images import ImageStore, reference
from tests.env.images import overlay
from tests.env.images.archives import (
    Item,
    directory,
    docker_archive,
    file,
    hardlink,
    opaque,
    symlink,
    tar,
    tree,
    whiteout,
)

quick = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@contextmanager
def a_store() -> Iterator[tuple[ImageStore, Path]]:
    """A store and a folder to put archives into; one per example."""
    with tempfile.TemporaryDirectory() as name:
        yield ImageStore(Path(name) / "state/images", durable=False), Path(name)


# -- a tree survives the way through an archive --------------------------------------------------------------

_names = (
    st.binary(min_size=1, max_size=40)
    .map(lambda raw: raw.replace(b"\0", b"0").replace(b"/", b"_"))
    .filter(lambda raw: raw not in (b".", b"..") and not raw.startswith(b".wh."))
    .map(os.fsdecode)
)
_modes = st.integers(0, 0o7777)
_leaves = st.one_of(
    st.tuples(st.just("file"), st.binary(max_size=2000), _modes),
    st.tuples(st.just("link"), _names, st.just(0)),
    st.tuples(st.just("fifo"), st.just(b""), _modes),
)
_trees: st.SearchStrategy[Any] = st.recursive(
    st.dictionaries(_names, _leaves, max_size=4),
    lambda inner: st.dictionaries(_names, st.one_of(_leaves, inner), max_size=4),
    max_leaves=12,
)


def _make(root: Path, content: dict[str, Any]) -> None:
    for name, value in content.items():
        path = root / name
        if isinstance(value, dict):
            path.mkdir()
            _make(path, value)
            continue
        kind, data, mode = value
        if kind == "link":
            path.symlink_to(data)
        elif kind == "fifo":
            os.mkfifo(path)
        else:
            path.write_bytes(data)
        if kind != "link":
            path.chmod(mode)


@quick
@given(_trees, st.sampled_from([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT]))
def test_a_tree_comes_out_as_it_went_in(content: dict[str, Any], form: int) -> None:
    with a_store() as (store, folder):
        source = folder / "source"
        source.mkdir()
        _make(source, content)
        layer = io.BytesIO()
        with tarfile.open(
            fileobj=layer, mode="w", format=form, encoding="utf-8", errors="surrogateescape"
        ) as archive:
            archive.add(source, ".")
        (folder / "image.tar").write_bytes(docker_archive(layer.getvalue()))
        store.import_archive(folder / "image.tar", "made")
        (result,) = store.resolve("made").layers
        assert tree(result) == tree(source)
        for path in source.rglob("*"):
            copy = result / path.relative_to(source)
            assert copy.lstat().st_mtime_ns // 10**9 == path.lstat().st_mtime_ns // 10**9
            assert (copy.lstat().st_uid, copy.lstat().st_gid) == (path.lstat().st_uid, path.lstat().st_gid)


# -- flattening and overlaying agree ---------------------------------------------------------------------------

_parts = st.sampled_from("abc")
_paths = st.lists(_parts, min_size=1, max_size=3).map("/".join)
_targets = st.one_of(_paths, _paths.map("/{}".format), st.sampled_from(["..", "../a", "/", ".", "a/../../b"]))
_items: st.SearchStrategy[Item] = st.one_of(
    st.builds(file, _paths, st.binary(max_size=3), st.sampled_from([0o644, 0o755])),
    st.builds(directory, _paths, st.sampled_from([0o755, 0o700])),
    st.builds(symlink, _paths, _targets),
    st.builds(hardlink, _paths, _paths),
    st.builds(whiteout, _paths),
    st.builds(opaque, _paths),
)
_layers = st.lists(_items, max_size=8).map(lambda items: tar(*items))


def _shape(found: dict[str, tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
    """Without the marks that an archive may carry along as ordinary attributes of a tree."""
    return {path: value for path, value in found.items() if not stat.S_ISCHR(value[0])}


def _imported(
    store: ImageStore, path: Path, layers: list[bytes], name: str, base: str | None = None
) -> str | None:
    path.write_bytes(docker_archive(*layers))
    try:
        store.import_archive(path, name, base=base)
    except ImageInvalid as error:
        return error.code
    return None


@settings(quick, max_examples=40)
@given(st.lists(_layers, min_size=1, max_size=2), st.lists(_layers, min_size=1, max_size=3))
def test_a_stack_over_a_base_shows_what_flattening_all_layers_gives(
    lower: list[bytes], upper: list[bytes]
) -> None:
    if not overlay.works():
        return
    with a_store() as (store, folder):
        if _imported(store, folder / "lower.tar", lower, "lower"):
            return
        flat = _imported(store, folder / "flat.tar", [*lower, *upper], "flat")
        stacked = _imported(store, folder / "upper.tar", upper, "stacked", "lower")
        assert stacked == flat
        if flat is None:
            (layer,) = store.resolve("flat").layers
            assert _shape(overlay.shown(store.resolve("stacked"))) == tree(layer)


# -- names -----------------------------------------------------------------------------------------------------


@given(st.text(max_size=60))
def test_a_full_name_is_its_own_full_name(text: str) -> None:
    try:
        name = reference.full_name(text)
    except InvalidRequest:
        return
    assert reference.full_name(name) == name
    assert reference.parse(name) == reference.Reference("name", name)


@given(st.text(alphabet="aA1.-_ /", min_size=1, max_size=60))
def test_every_name_suggested_by_a_file_is_a_name(text: str) -> None:
    try:
        name = reference.name_from_path(Path(text + ".tar.gz"))
    except InvalidRequest:
        return
    assert reference.full_name(name) == name
