"""A real ordinary user of this machine, `nobody`, to run programs as.

The interpreter and the checkout may lie in root's home, which nobody else can enter. So the program gets a mount
namespace of its own, in which the way to them is open; the machine sees nothing of it, and it goes with the program.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

UID = 65534
#: Of other users in the sandboxes, where it has any.
FIRST_SUBID, SUBIDS = 1_000_000, 65536
_NEEDED = (Path(sys.base_prefix), Path(sys.prefix), Path(__file__).resolve().parents[2])


@contextmanager
def ordinary_folder() -> Iterator[Path]:
    """A directory of that user; pytest's own lie below root's."""
    path = Path(tempfile.mkdtemp(prefix="orchard-nobody-"))
    os.chown(path, UID, UID)
    try:
        yield path
    finally:
        shutil.rmtree(path)


def prefix(folder: Path, *, subids: bool = False, before: str = "true") -> list[str]:
    """What stands before a command to run it as that user, at home in `folder`. subids: it owns a range of further ids.
    before: what root's shell does there first."""
    script = ["set -e", *_open_the_way(folder / "stage"), *(_give_subids(folder) if subids else ()), before]
    script.append(f"cd {shlex.quote(str(folder))}")
    user = f"setpriv --reuid {UID} --regid {UID} --clear-groups --"
    environment = f"env HOME={shlex.quote(str(folder))} PYTHONDONTWRITEBYTECODE=1"
    script.append(f'exec {user} {environment} "$@"')
    return ["unshare", "--mount", "--propagation", "private", "bash", "-c", "\n".join(script), "as-nobody"]


def _open_the_way(stage: Path) -> list[str]:
    """Commands that put an empty, open directory over the first closed one on the way to each needed tree."""
    closed = {tree: top for tree in _NEEDED if (top := _first_closed(tree)) is not None}
    put_aside, cover, put_back = [], [], []
    for number, tree in enumerate(closed):
        aside = shlex.quote(f"{stage}/{number}")
        put_aside.append(f"mkdir -p {aside}; mount --bind {shlex.quote(str(tree))} {aside}")
        target = shlex.quote(str(tree))
        put_back.append(f"mkdir -p {target}; mount --move {aside} {target}")
    for top in dict.fromkeys(closed.values()):
        cover.append(f"mount -t tmpfs -o mode=0755 none {shlex.quote(str(top))}")
    return [*put_aside, *cover, *put_back]


def _first_closed(path: Path) -> Path | None:
    for folder in (*reversed(path.parents), path):
        if not folder.stat().st_mode & 0o001:
            return folder
    return None


def _give_subids(folder: Path) -> list[str]:
    file = folder / "subids"
    file.write_text(f"nobody:{FIRST_SUBID}:{SUBIDS}\n")
    return [f"mount --bind {shlex.quote(str(file))} /etc/{name}" for name in ("subuid", "subgid")]
