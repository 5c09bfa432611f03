"""`orchard images`: the image store of a state directory, with or without a service that uses it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchard.cli import building, options
from orchard.cli.output import age, note, print_json, print_table, size

if TYPE_CHECKING:
    from orchard.env.images import ImageStore

app = typer.Typer(no_args_is_help=True, help="The images of this machine.")


def _store(state_dir: Path | None) -> ImageStore:
    from orchard.env.images import ImageStore
    from orchard.env.paths import default_state_dir

    return ImageStore((state_dir or default_state_dir()) / "images")


@app.command("import")
def import_image(
    archive: Annotated[
        Path, typer.Argument(help="An OCI layout, a `docker save` archive or a tar of a root file system.")
    ],
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="What to call it [what the archive says].")
    ] = None,
    base: Annotated[
        str | None, typer.Option("--base", metavar="IMAGE", help="An image to put its layers on.")
    ] = None,
    state_dir: options.StateDir = None,
    json: options.Json = False,
) -> None:
    """Add an image from an archive; its name can then be used to create sandboxes."""
    record = _store(state_dir).import_archive(archive, name, base=base, progress=_progress)
    if json:
        print_json(record.to_json())
    else:
        typer.echo(record.name)


@app.command()
def pull(
    ref: Annotated[
        str, typer.Argument(metavar="IMAGE", help="As registry.example/project/tool:1.2 or …@sha256:….")
    ],
    auth_file: options.AuthFile = None,
    insecure_registry: options.InsecureRegistry = None,
    state_dir: options.StateDir = None,
    json: options.Json = False,
) -> None:
    """Fetch an image from a registry, for this machine's architecture; needs skopeo.

    Layers that are here already are not fetched again, also after a pull that was interrupted.
    """
    from orchard.env.images.pull import Puller, PullSettings

    settings = PullSettings(auth_file=auth_file, insecure_registries=tuple(insecure_registry or ()))
    record = Puller(_store(state_dir), settings).pull(ref, _progress)
    if json:
        print_json(record.to_json())
    else:
        typer.echo(record.name)


app.command("build")(building.build)


def _progress(line: str) -> None:
    if sys.stderr.isatty():
        note(line)


@app.command("list")
def list_images(state_dir: options.StateDir = None, json: options.Json = False) -> None:
    """List the images."""
    records = _store(state_dir).list()
    if json:
        print_json([record.to_json() for record in records])
        return
    rows = [(each.name, each.digest[:19], size(each.size_bytes), age(each.created_at)) for each in records]
    print_table(("IMAGE", "DIGEST", "SIZE", "AGE"), rows)


@app.command("rm")
def remove(
    names: Annotated[list[str], typer.Argument(metavar="IMAGE...")],
    state_dir: options.StateDir = None,
    json: options.Json = False,
) -> None:
    """Remove images by name or digest, and the files that no other image needs."""
    store = _store(state_dir)
    for name in names:
        store.remove(name)
        if not json:
            typer.echo(name)
    if json:
        print_json({"removed": names})


@app.command()
def prune(state_dir: options.StateDir = None, json: options.Json = False) -> None:
    """Remove images without a name and whatever no image needs; never what a sandbox uses."""
    freed = _store(state_dir).prune()
    if json:
        print_json({"freed_bytes": freed})
    else:
        typer.echo(f"{size(freed)} freed")
