"""What the kernel shows for a stack of layers: mounts an overlay in a mount namespace of its own and dumps it."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from orchard.env.images import ResolvedImage

_DUMP = """
import pickle, subprocess, sys
from pathlib import Path
from tests.env.images.archives import tree
folder, stacks = Path(sys.argv[1]), pickle.loads(bytes.fromhex(sys.argv[2]))
for target, layers in stacks:
    options = "ro,lowerdir=" + ":".join(layer.replace(":", "\\\\:") for layer in layers)
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, str(folder) + target], check=True)
sys.stdout.buffer.write(pickle.dumps(tree(folder / "root")))
"""


@cache
def works() -> bool:
    """Whether this user may mount an overlay here."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return False
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in ("a", "b", "m")]
        for path in paths:
            path.mkdir()
        options = f"ro,lowerdir={paths[0]}:{paths[1]}"
        command = ["unshare", "-m", "mount", "-t", "overlay", "overlay", "-o", options, str(paths[2])]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0


def shown(image: ResolvedImage) -> dict[str, tuple[Any, ...]]:
    """The tree of an image as a sandbox would see it, its mounts included."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "root").mkdir()
        (folder / "empty").mkdir()
        empty = str(folder / "empty")  # an overlay without an upper layer needs two lower ones
        stacks = [("/root", [*map(str, image.layers), empty])]
        stacks += [(f"/root{mount.target}", [*map(str, mount.layers), empty]) for mount in image.mounts]
        return dump(folder, stacks)


def dump(folder: Path, stacks: Sequence[tuple[str, list[str]]]) -> dict[str, tuple[Any, ...]]:
    """Mount `stacks` (place below `folder`, layers) in order and read everything below `folder/root`."""
    argument = pickle.dumps(list(stacks)).hex()
    command = ["unshare", "-m", sys.executable, "-c", _DUMP, str(folder), argument]
    repository = Path(__file__).parents[3]
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=repository)
    found: dict[str, tuple[Any, ...]] = pickle.loads(result.stdout)
    return found
