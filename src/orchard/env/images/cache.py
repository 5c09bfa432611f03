"""What pulls have fetched: blobs of registries by digest, so that a layer is fetched once.

cache/
  .lock             shared while a pull is at work, exclusive while the cache is cleared
  blobs/sha256/…    whole blobs; a file appears by one rename
  NAME.lock         held while that reference is pulled
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from orchard.env.errors import InfrastructureError
from orchard.env.images.area import StoreArea, remove_tree, tree_size

_LOCK_POLL_S = 0.1


class PullCache:
    """The cache of one store. Its locks exclude threads and processes alike."""

    def __init__(self, area: StoreArea) -> None:
        self._area = area
        self.blobs = area.cache / "blobs"

    @contextmanager
    def pulling(self, name: str, stop: threading.Event) -> Iterator[bool]:
        """The right to pull `name`; False when another had it first, so that the image may be here now.

        Raises InfrastructureError when `stop` is set while waiting for the other.
        """
        self._area.make()
        shared = self._open(".lock")
        try:
            fcntl.flock(shared, fcntl.LOCK_SH)
            self.blobs.mkdir(exist_ok=True, mode=0o700)
            own = self._open(f"{hashlib.sha256(name.encode()).hexdigest()}.lock")
            try:
                yield _take(own, name, stop)
            finally:
                os.close(own)
        finally:
            os.close(shared)

    def link(self, digests: Iterable[str], layout: Path) -> None:
        """Give an OCI layout its blobs, as further names of those here. Raises FileNotFoundError for one not here."""
        folder = layout / "blobs" / "sha256"
        folder.mkdir(parents=True, exist_ok=True)
        for digest in set(digests):
            os.link(self.path(digest), folder / self.path(digest).name)

    def drop(self, digests: Iterable[str]) -> None:
        """Forget blobs, so that they are fetched anew."""
        for digest in digests:
            self.path(digest).unlink(missing_ok=True)

    def path(self, digest: str) -> Path:
        """Where a blob lies."""
        algorithm, _, digits = digest.partition(":")
        return self.blobs / algorithm / digits

    def clear(self) -> int:
        """Remove everything, unless a pull is at work; the bytes freed."""
        shared = self._open(".lock")
        try:
            fcntl.flock(shared, fcntl.LOCK_EX | fcntl.LOCK_NB)
            freed = tree_size(self.blobs) if self.blobs.is_dir() else 0
            remove_tree(self.blobs)
            # Nobody holds or waits for one of them: that takes the shared lock first.
            for path in self._area.cache.glob("[!.]*.lock"):
                path.unlink(missing_ok=True)
            return freed
        except BlockingIOError:
            return 0
        finally:
            os.close(shared)

    def _open(self, name: str) -> int:
        return os.open(self._area.cache / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _take(lock: int, name: str, stop: threading.Event) -> bool:
    first = True
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return first
        except BlockingIOError:
            first = False
        if stop.wait(_LOCK_POLL_S):
            raise InfrastructureError(f"The pull of {name!r} was stopped; pull again.")
