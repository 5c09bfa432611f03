"""The runtimes that the suite runs against, and what each calls the images. A new runtime is a row here."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support import ordinary
from tests.support.images import busybox_tree, docker_archive, shell_less_tree


@dataclass(frozen=True)
class Images:
    """What a runtime calls the images that the tests need."""

    #: bash, python3, git, patch, setsid, procps of a Debian system
    full: str
    #: busybox alone: sh but no bash; users root and worker (uid 1000)
    busybox: str
    #: static programs (tests.support.images.SHELL_LESS_TOOLS), no shell at all
    shell_less: str


@dataclass(frozen=True)
class RuntimeCase:
    """One runtime: how `orchard serve` is told to use it, and how its images come to be.

    on_this_machine: sandboxes are processes of this machine, so tests may look at them from outside.
    tags: what the runtime of a state directory puts into the names of what it makes on this machine.
    ordinary: the service runs as an ordinary user, with a range of ids. Only tests marked `unprivileged` are for it.
    """

    name: str
    serve_arguments: tuple[str, ...]
    images: Callable[[Path, Path], Images]
    on_this_machine: bool
    tags: Callable[[Path], tuple[str, ...]] = lambda _state_dir: ()
    ordinary: bool = False

    def prefix(self, folder: Path) -> list[str]:
        """What stands before its commands; `folder` is what the service may write to."""
        return ordinary.prefix(folder, subids=True) if self.ordinary else []

    @contextmanager
    def folder(self, factory: pytest.TempPathFactory) -> Iterator[Path]:
        """A place for a service's state."""
        if self.ordinary:
            with ordinary.ordinary_folder() as folder:
                yield folder
        else:
            yield factory.mktemp(f"orchard-{self.name}")


def import_image(state_dir: Path, archive: Path, name: str, prefix: Sequence[str] = ()) -> str:
    """`orchard images import` into the state directory of a service; the name to create sandboxes by."""
    command = [
        *prefix,
        sys.executable,
        "-m",
        "orchard.cli.main",
        "images",
        "import",
        str(archive),
        "--name",
        name,
    ]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("ORCHARD_", "SANDBOX_"))}
    done = subprocess.run(
        [*command, "--state-dir", str(state_dir)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )
    assert done.returncode == 0, f"orchard images import failed:\n{done.stdout}\n{done.stderr}"
    return name


def _local_images(folder: Path, state_dir: Path) -> Images:
    tree = busybox_tree(folder / "busybox")
    archive = docker_archive(tree, folder / "busybox.tar", "orchard-test/busybox:1")
    return Images(
        full="host",
        busybox=import_image(state_dir, archive, "orchard-test/busybox:1"),
        shell_less=f"dir:{shell_less_tree(folder / 'shell-less')}",
    )


def ordinary_images(folder: Path, state_dir: Path) -> Images:
    """The same for a service of an ordinary user, whose images they are."""
    place = state_dir.parent
    tree = busybox_tree(folder / "busybox")
    archive = docker_archive(tree, place / "busybox.tar", "orchard-test/busybox:1")
    shell_less = shell_less_tree(place / "shell-less")
    for path in (shell_less, *shell_less.rglob("*")):
        os.chown(path, ordinary.UID, ordinary.UID, follow_symlinks=False)
    return Images(
        full="host",
        busybox=import_image(
            state_dir, archive, "orchard-test/busybox:1", ordinary.prefix(place, subids=True)
        ),
        shell_less=f"dir:{shell_less}",
    )


def _tags(state_dir: Path) -> tuple[str, ...]:
    return (hashlib.sha256(str(state_dir).encode()).hexdigest()[:8],)


RUNTIMES: dict[str, RuntimeCase] = {
    "local": RuntimeCase(
        name="local",
        serve_arguments=("--runtime", "local"),
        images=_local_images,
        on_this_machine=True,
        tags=_tags,
    ),
    "ordinary": RuntimeCase(
        name="ordinary",
        serve_arguments=("--runtime", "local"),
        images=ordinary_images,
        on_this_machine=True,
        tags=_tags,
        ordinary=True,
    ),
}
