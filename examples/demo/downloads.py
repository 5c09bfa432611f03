"""Fetches sdists and wheels with pip on the machine: the sandboxes have no network."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from examples.demo.projects import PIP, Project


class DownloadError(RuntimeError):
    """pip could not fetch something; the text is pip's own."""


@dataclass(frozen=True, slots=True)
class Downloads:
    """What one project needs: its sdist, the wheels of its tests and build back end, and pip's own wheel."""

    sdist: Path
    wheels: tuple[Path, ...]
    pip: Path


def download(project: Project, folder: Path, python_version: str) -> Downloads:
    """Fetches into `folder` (again only what is not there), wheels for `python_version` ("3.11").

    Raises DownloadError.
    """
    sdists, wheels, tools = (folder / project.name / kind for kind in ("sdist", "wheels", "pip"))
    _fetch_sdist(project, sdists)
    _fetch_wheels(wheels, python_version, project.build + project.tests)
    _fetch_wheels(tools, python_version, (PIP,))
    return Downloads(
        next(sdists.glob("*.tar.gz")), tuple(sorted(wheels.glob("*.whl"))), next(tools.glob("*.whl"))
    )


def _fetch_sdist(project: Project, folder: Path) -> None:
    # The hash is checked before pip runs the sdist's build back end on this machine for its metadata.
    pin = folder.with_suffix(".txt")
    folder.parent.mkdir(parents=True, exist_ok=True)
    pin.write_text(f"{project.requirement} --hash=sha256:{project.sha256}\n")
    _pip(folder, "--no-deps", "--no-binary", ":all:", "--require-hashes", "-r", str(pin))


def _fetch_wheels(folder: Path, python_version: str, requirements: tuple[str, ...]) -> None:
    _pip(folder, *requirements, "--only-binary", ":all:", "--python-version", python_version)


def _pip(folder: Path, *arguments: str) -> None:
    done = folder / "complete"
    wanted = "\n".join(arguments)
    if done.exists() and done.read_text() == wanted:
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(folder), *arguments]
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if result.returncode:
        raise DownloadError(f"pip download {' '.join(arguments)} failed:\n{result.stderr.strip()}")
    done.write_text(wanted)
