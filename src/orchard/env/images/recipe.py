"""Recipes: what to add to an image to make another, as a small YAML or JSON document.

base: debian:12
apt: [git, python3-pip]
copy: [{from: tools, to: /opt/tools}]
pip: [requests==2.32.3]
run: ["make -C /opt/tools install"]
env: {TOOLS: /opt/tools}
working_dir: /opt/tools
user: nobody
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from orchard.env.errors import FileMissing, InvalidRequest

#: Part of what tells one build from another: a change of what the steps do makes it another.
_VERSION = 1

_Word = Annotated[str, StringConstraints(min_length=1, pattern=r"^[^\x00]*$")]
_Path = Annotated[str, StringConstraints(pattern=r"^/[^\x00]*$", max_length=4096)]


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Copy(_Document):
    """A file or directory beside the recipe, and where it goes in the image, as itself."""

    source: _Word = Field(alias="from")
    target: _Path = Field(alias="to")


class Recipe(_Document):
    """The steps in the order in which they are done, whatever the order in the document: apt, copy, pip, run.

    apt, pip: what `apt-get install` and `pip install` are given. run: lines for the image's `sh`, which stop at the
    first failure. network: whether run lines have the network too; apt and pip always have it. env, working_dir
    (made if need be), user: defaults of the new image; all steps run as root.
    """

    base: _Word
    apt: tuple[_Word, ...] = Field((), strict=False)
    pip: tuple[_Word, ...] = Field((), strict=False)
    run: tuple[_Word, ...] = Field((), strict=False)
    copies: tuple[Copy, ...] = Field((), alias="copy", strict=False)
    env: dict[_Word, str] = {}
    working_dir: _Path | None = None
    user: _Word | None = None
    network: bool = False

    @property
    def needs_network(self) -> bool:
        return self.network or bool(self.apt) or bool(self.pip)

    @classmethod
    def load(cls, path: Path) -> Recipe:
        """Read a recipe. Raises FileMissing, InvalidRequest with what is wrong in it."""
        try:
            text = path.read_text("utf-8")
        except FileNotFoundError:
            raise FileMissing(f"There is no recipe at {str(path)!r}.") from None
        except (OSError, UnicodeError) as error:
            raise InvalidRequest(f"The recipe {str(path)!r} is not readable: {error}.") from None
        try:
            return cls.model_validate(_parsed(text))
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"]) or "the document"
            raise InvalidRequest(f"The recipe {str(path)!r} is wrong at {where}: {first['msg']}.") from None
        except ValueError as error:
            raise InvalidRequest(f"The recipe {str(path)!r} is neither YAML nor JSON: {error}.") from None

    def key(self, base_digest: str, folder: Path) -> str:
        """The digest of everything that decides what comes out: the steps, the base, the content of what is copied.

        folder: where the recipe lies. Raises FileMissing for a source that is not there.
        """
        document = self.model_dump(exclude={"base"})
        document |= {"base": base_digest, "version": _VERSION}
        document["files"] = [_tree_digest(folder / each.source, each.source) for each in self.copies]
        text = json.dumps(document, sort_keys=True, separators=(",", ":"))
        return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"

    def steps(self) -> Iterator[Step]:
        """What to do in a sandbox of the base."""
        if self.working_dir is not None:
            yield Step(f"make {self.working_dir}", ("mkdir", "-p", "--", self.working_dir))
        if self.apt:
            yield Step(f"apt: {' '.join(self.apt)}", ("sh", "-ec", _APT, "sh", *self.apt), _APT_ENV)
        for each in self.copies:
            yield Step(f"copy: {each.source} to {each.target}", copy=each)
        if self.pip:
            yield Step(f"pip: {' '.join(self.pip)}", ("sh", "-ec", _PIP, "sh", *self.pip), _PIP_ENV)
        for line in self.run:
            yield Step(f"run: {line}", ("sh", "-ec", line), tuple(self.env.items()), self.working_dir)


@dataclass(frozen=True, slots=True)
class Step:
    """One thing to do: a command as exact argv, or a copy into the image."""

    title: str
    command: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    cwd: str | None = None
    copy: Copy | None = None


# apt's own change of user is for systems that have more to lose than a sandbox, which may refuse it.
_APT = (
    "apt-get -o APT::Sandbox::User=root update; "
    'apt-get -o APT::Sandbox::User=root install -y --no-install-recommends -- "$@"; '
    "apt-get clean; rm -rf /var/lib/apt/lists/*"
)
_APT_ENV = (("DEBIAN_FRONTEND", "noninteractive"),)
_PIP = 'exec "$(command -v python3 || command -v python || echo python3)" -m pip install --no-cache-dir "$@"'
_PIP_ENV = (("PIP_BREAK_SYSTEM_PACKAGES", "1"), ("PIP_ROOT_USER_ACTION", "ignore"), ("PIP_NO_INPUT", "1"))


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        yaml = importlib.import_module("yaml")
    except ImportError:
        raise InvalidRequest("To read recipes in YAML, `pip install pyyaml`, or write JSON.") from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def _tree_digest(path: Path, name: str) -> str:
    """Of a file, or of a directory with all it holds: names, kinds, permissions, contents."""
    if not path.exists():
        raise FileMissing(f"There is no {name!r} to copy; paths in a recipe start at its own directory.")
    digest = hashlib.sha256()
    found = [path] if not path.is_dir() else sorted([path, *path.rglob("*")])
    for each in found:
        info = each.stat() if each == path else each.lstat()
        head = [os.fsdecode(each.relative_to(path)), stat.S_IFMT(info.st_mode), info.st_mode & 0o777]
        digest.update(json.dumps(head).encode())
        if stat.S_ISREG(info.st_mode):
            with each.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        elif stat.S_ISLNK(info.st_mode):
            digest.update(os.fsencode(each.readlink()))
    return digest.hexdigest()
