"""The store in the hands of an ordinary user: nothing needs root, and what only root can do is noted."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.env.images.archives import directory, docker_archive, file, hardlink, symlink, tar, whiteout

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="changes to another user, which only root can")

_USER = 65534
_WORK = """
import json, os, sys
from pathlib import Path
from orchard.env.images import ImageStore
folder = Path(sys.argv[1])
user = int(sys.argv[2])
os.setgroups([]); os.setgid(user); os.setuid(user)
store = ImageStore(folder / "state/images", durable=False, machine=folder / "machine")
record = store.import_archive(folder / "image.tar", "app")
(layer,) = store.resolve("app").layers
modes = {str(path.relative_to(layer)): oct(path.lstat().st_mode & 0o7777) for path in layer.rglob("*")}
store.import_archive(folder / "top.tar", "top", base="app")
top = store.resolve("top").layers[0]
marks = [path.name for path in top.rglob("*") if path.is_char_device()]
host = [mount.target for mount in store.resolve("host").mounts]
store.remove("top")
store.remove("app")
left = [path.name for path in (folder / "state/images/layers").iterdir()]
print(json.dumps({"notes": record.notes, "modes": modes, "marks": marks, "host": host, "left": left}))
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder of that user; pytest's own lie below root's."""
    path = Path(tempfile.mkdtemp())
    try:
        yield path
    finally:
        shutil.rmtree(path)


def test_import_stack_resolve_and_remove_work_without_privilege(folder: Path) -> None:
    items = (
        directory("shut", 0o000),
        file("shut/in", "x"),
        directory("read", 0o555),
        file("read/x"),
        file("gone"),
    )
    more = hardlink("same", "gone"), symlink("link", "shut"), file("s", "x", 0o4755, uid=12)
    (folder / "image.tar").write_bytes(docker_archive(tar(*items, *more)))
    (folder / "top.tar").write_bytes(docker_archive(tar(whiteout("gone"), file("read/y"))))
    (folder / "machine/usr/bin").mkdir(parents=True)
    (folder / "machine/usr/bin/admin-only").touch(0o700)
    (folder / "machine/etc").mkdir()
    os.chown(folder, _USER, _USER)
    result = subprocess.run(
        [sys.executable, "-c", _WORK, str(folder), str(_USER)],
        check=True,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[3],
    )
    seen = json.loads(result.stdout)
    assert any("owners not kept" in note for note in seen["notes"])
    assert (seen["modes"]["shut"], seen["modes"]["read"], seen["modes"]["s"]) == ("0o0", "0o555", "0o4755")
    assert seen["marks"] == ["gone"]
    assert seen["host"] == ["/usr"]
    assert seen["left"] == []
