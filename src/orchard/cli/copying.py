"""`orchard cp`."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchard.cli import options
from orchard.cli.output import print_json

if TYPE_CHECKING:
    from orchard.env.client import Sandbox

_REMOTE = re.compile(r"([a-z0-9][a-z0-9-]{0,62}):(.+)", re.DOTALL)


def copy(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A path here, or SANDBOX:PATH.")],
    target: Annotated[str, typer.Argument(metavar="DST", help="A path here, or SANDBOX:PATH.")],
    json: options.Json = False,
    base_url: options.BaseUrl = None,
    api_key: options.ApiKey = None,
) -> None:
    """Copy a file or directory into or out of a sandbox; into a directory that exists, under its own name."""
    remote_source, remote_target = _REMOTE.fullmatch(source), _REMOTE.fullmatch(target)
    if (remote_source is None) == (remote_target is None):
        raise typer.BadParameter("exactly one of SRC and DST is SANDBOX:PATH", param_hint="SRC DST")
    with options.connect(base_url, api_key) as client:
        if remote_target is not None:
            if not Path(source).exists():
                raise typer.BadParameter(f"{source} does not exist", param_hint="SRC")
            sandbox = client.get(remote_target[1])
            place = _into(sandbox, remote_target[2], Path(source).resolve().name)
            sandbox.files.upload(source, place)
            place = f"{sandbox.sandbox_id}:{place}"
        else:
            assert remote_source is not None
            name = posixpath.basename(remote_source[2].rstrip("/")) or remote_source[1]
            goal = Path(target) / name if Path(target).is_dir() else Path(target)
            client.get(remote_source[1]).files.download(remote_source[2], goal)
            place = str(goal)
    if json:
        print_json({"source": source, "target": place})


def _into(sandbox: Sandbox, path: str, name: str) -> str:
    """`path` itself, or `path/name` if it is a directory in the sandbox."""
    from orchard.env.errors import FileMissing, PathInvalid

    if not path.endswith("/"):
        try:
            if sandbox.files.stat(path, follow=True).type != "directory":
                return path
        except (FileMissing, PathInvalid):
            return path
    return posixpath.join(path, name)
