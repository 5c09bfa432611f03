"""A store with its state directory, and a way to import bytes into it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchard.env.images import ImageRecord, ImageStore

Import = Callable[..., ImageRecord]


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def store(state: Path) -> ImageStore:
    return ImageStore(state / "images", durable=False)


@pytest.fixture
def add(store: ImageStore, tmp_path: Path) -> Import:
    """Write an archive's bytes to a file and import it."""

    def add(
        archive: bytes, name: str | None = None, *, file_name: str = "archive.tar", **more: Any
    ) -> ImageRecord:
        path = tmp_path / file_name
        path.write_bytes(archive)
        return store.import_archive(path, name, **more)

    return add


@pytest.fixture
def files(store: ImageStore) -> Callable[[str], Path]:
    """The directory of a flattened image's files."""

    def files(ref: str) -> Path:
        (layer,) = store.resolve(ref).layers
        return layer

    return files
