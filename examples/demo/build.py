"""Makes an image of one project: its sdist and what its tests need, installed inside a sandbox."""

from __future__ import annotations

import asyncio
import sys
import sysconfig
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from examples.demo.downloads import Downloads
from examples.demo.projects import Project
from examples.demo.suites import SUITE
from orchard import AsyncSandboxClient
from orchard.env.client import AsyncSandbox

#: pip chooses dependencies by the Python that it runs on; since 3.11 those of the demo are the same on all.
OLDEST_PYTHON = (3, 11)
STEP_TIMEOUT_S = 600


@dataclass(frozen=True, slots=True)
class Base:
    """An image to build on, with a Python: the path of its interpreter inside, and its version ("3.11")."""

    image: str
    python: str
    version: str


async def find_base(client: AsyncSandboxClient, store: ImageStore, folder: Path, carry: bool = False) -> Base:
    """`host` if the machine's own Python will do, else (or if `carry`) that and a copy of the running one."""
    if not carry:
        probe = "import sys, venv, zlib; print(*sys.version_info[:2], sep='.')"
        async with await client.create("host") as sandbox:
            job = await sandbox.exec(["/usr/bin/python3", "-c", probe])
        version = job.stdout.strip()
        if job.ok and tuple(map(int, version.split("."))) >= OLDEST_PYTHON:
            return Base("host", "/usr/bin/python3", version)
    name = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    tar = folder / f"{name}.tar"
    await asyncio.to_thread(_pack_running_python, tar, name)
    await store.add(tar, "demo-python", "host")
    return Base("demo-python", f"/python/bin/{name}", name.removeprefix("python"))


def _pack_running_python(tar: Path, name: str) -> None:
    """The interpreter and standard library that run this program, at /python, without installed packages."""
    prefix = Path(sys.base_prefix)
    library = sysconfig.get_config_var("INSTSONAME")
    kept = [
        prefix / "bin" / name,
        prefix / "lib" / name,
        *((prefix / "lib").glob(f"{library}*") if library else []),
    ]

    def keep(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        parts = Path(member.name).parts
        member.uid = member.gid = 0
        return None if {"site-packages", "test", "__pycache__"} & set(parts) else member

    with tarfile.open(tar, "w") as archive:
        for path in kept:
            archive.add(path, Path("python") / path.relative_to(prefix), filter=keep)


class ImageStore:
    """The service's images, through `orchard images import`."""

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir

    async def add(self, tar: Path, name: str, base: str) -> None:
        """An image `name`: what image `base` has, and the files of `tar` on top."""
        command = [sys.executable, "-m", "orchard.cli.main", "images", "import", str(tar)]
        process = await asyncio.create_subprocess_exec(
            *command, "--name", name, "--base", base, "--state-dir", str(self._state_dir),
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        output, _ = await process.communicate()
        if process.returncode:
            raise RuntimeError(
                f"orchard images import {tar.name} failed:\n{output.decode(errors='replace').strip()}"
            )


async def build_image(
    client: AsyncSandboxClient,
    store: ImageStore,
    base: Base,
    project: Project,
    downloads: Downloads,
    folder: Path,
    step: Callable[[str], None],
) -> str:
    """Installs inside a sandbox without network, takes the result out, imports it; the image's name."""
    async with await client.create(base.image, memory="2Gi", block_network=True) as sandbox:
        step("uploading")
        for path in (downloads.sdist, downloads.pip, *downloads.wheels):
            await sandbox.files.write(f"/tmp/packages/{path.name}", path.read_bytes())
        step("installing")
        await _install(sandbox, base, project, downloads)
        step("taking out")
        await _run(sandbox, base.python, "-m", "tarfile", "-c", "/tmp/image.tar", SUITE.lstrip("/"), cwd="/")
        content = await sandbox.files.read("/tmp/image.tar")
    tar = folder / f"{project.name}.tar"
    tar.write_bytes(content)
    name = f"demo-{project.name}"
    step("importing")
    await store.add(tar, name, base.image)
    return name


async def _install(sandbox: AsyncSandbox, base: Base, project: Project, downloads: Downloads) -> None:
    root = f"{SUITE}/{project.name}"
    packages = "/tmp/packages"
    await _run(sandbox, base.python, "-m", "venv", "--without-pip", f"{SUITE}/venv")
    await _run(sandbox, base.python, "-m", "tarfile", "-e", f"{packages}/{downloads.sdist.name}", SUITE)
    unpacked = f"{SUITE}/{downloads.sdist.name.removesuffix('.tar.gz')}"
    await _run(sandbox, base.python, "-c", "import os, sys; os.rename(*sys.argv[1:])", unpacked, root)
    # pip runs from its wheel; the project is installed in place, so that an edit of its source counts.
    pip = [f"{SUITE}/venv/bin/python", f"{packages}/{downloads.pip.name}/pip", "install", "--quiet"]
    offline = ["--no-index", "--find-links", packages, "--no-cache-dir"]
    await _run(sandbox, *pip, *offline, *project.build)
    await _run(sandbox, *pip, *offline, "--no-build-isolation", "--editable", root)
    await _run(sandbox, *pip, *offline, *project.tests)


async def _run(sandbox: AsyncSandbox, *command: str, cwd: str | None = None) -> None:
    job = await sandbox.exec([*command], cwd=cwd, timeout_s=STEP_TIMEOUT_S)
    job.check()
