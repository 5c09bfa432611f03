"""Images that the suite builds itself, from Debian's busybox-static and nothing else."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

BUSYBOX = Path("/bin/busybox")

_PASSWD = "root:x:0:0:root:/root:/bin/sh\nworker:x:1000:1000:worker:/home/worker:/bin/sh\n"
_GROUP = "root:x:0:\nworker:x:1000:\nextra:x:1001:worker\n"


def _busybox() -> Path:
    if not BUSYBOX.exists():
        raise AssertionError(f"{BUSYBOX} is missing: apt-get install busybox-static")
    return BUSYBOX


def applets() -> list[str]:
    return subprocess.run([_busybox(), "--list"], capture_output=True, text=True, check=True).stdout.split()


def _skeleton(root: Path) -> None:
    for folder in ("bin", "etc", "home/worker", "proc", "root", "tmp", "usr/bin", "var"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    (root / "tmp").chmod(0o1777)
    os.chown(root / "home/worker", 1000, 1000)
    (root / "etc/passwd").write_text(_PASSWD)
    (root / "etc/group").write_text(_GROUP)


def busybox_tree(root: Path) -> Path:
    """A root file system with busybox: sh, no bash, no Python, no git, no C library."""
    _skeleton(root)
    shutil.copy2(_busybox(), root / "bin/busybox")
    for name in applets():
        if name != "busybox":
            (root / "bin" / name).symlink_to("busybox")
    return root


#: What the image without a shell holds; each is a static program.
SHELL_LESS_TOOLS = ("cat", "echo", "env", "ls", "printf", "pwd", "sleep", "true", "wc")


def shell_less_tree(root: Path) -> Path:
    """A root file system with a few static programs and no shell under any name."""
    _skeleton(root)
    tools = [root / "bin" / name for name in SHELL_LESS_TOOLS]
    shutil.copy2(_busybox(), tools[0])
    for tool in tools[1:]:
        os.link(tools[0], tool)
    return root


def _tar_of(tree: Path) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path in sorted(tree.rglob("*")):
            tar.add(path, str(path.relative_to(tree)), recursive=False)
    return buffer.getvalue()


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def docker_archive(tree: Path, archive: Path, tag: str, config: dict[str, object] | None = None) -> Path:
    """`tree` as one layer of a `docker save` archive named `tag`; `config` is the image's own (Env, WorkingDir)."""
    layer = _tar_of(tree)
    settings = {
        "architecture": "amd64",
        "os": "linux",
        "config": config or {},
        "rootfs": {"type": "layers", "diff_ids": ["sha256:" + hashlib.sha256(layer).hexdigest()]},
    }
    config_json = json.dumps(settings).encode()
    config_name = hashlib.sha256(config_json).hexdigest() + ".json"
    manifest = [{"Config": config_name, "RepoTags": [tag], "Layers": ["layer/layer.tar"]}]
    with tarfile.open(archive, "w") as tar:
        _add(tar, config_name, config_json)
        _add(tar, "layer/layer.tar", layer)
        _add(tar, "manifest.json", json.dumps(manifest).encode())
    return archive
