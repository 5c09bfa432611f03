"""`orchard images build`: the steps of a recipe, done in a sandbox whose files then become an image."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchard.cli import options
from orchard.cli.output import note, print_json

if TYPE_CHECKING:
    from orchard.env.client import Sandbox
    from orchard.env.images import ImageRecord, ImageStore
    from orchard.env.images.recipe import Recipe, Step

_OUTPUT_BYTES = 1 << 20
_SHOWN_LINES = 40


def build(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A YAML or JSON file.")],
    tag: Annotated[str, typer.Option("--tag", "-t", metavar="NAME", help="What to call the image.")],
    pull: Annotated[
        str, typer.Option("--pull", metavar="WHEN", help="missing: pull the base if it is not here; never.")
    ] = "never",
    cache: Annotated[
        bool, typer.Option("--cache/--no-cache", help="Take the image of an equal build, if there is one.")
    ] = True,
    step_timeout: Annotated[
        float, typer.Option("--step-timeout", metavar="S", help="Seconds each step may take.")
    ] = 1800.0,
    auth_file: options.AuthFile = None,
    insecure_registry: options.InsecureRegistry = None,
    state_dir: options.StateDir = None,
    json: options.Json = False,
) -> None:
    """Build an image from a recipe: a base, apt and pip packages, copied files, commands. Needs no Docker.

    The steps run in a sandbox of a service started for this command alone.
    """
    from orchard.env.errors import ImageNotFound
    from orchard.env.images import ImageStore
    from orchard.env.images.pull import Puller, PullSettings
    from orchard.env.images.recipe import Recipe
    from orchard.env.paths import default_state_dir

    if pull not in ("never", "missing"):
        raise typer.BadParameter(f"{pull!r} is unknown; use never or missing", param_hint="--pull")
    state = state_dir or default_state_dir()
    store = ImageStore(state / "images")
    wanted = Recipe.load(recipe)
    try:
        store.resolve(wanted.base)
    except ImageNotFound:
        if pull == "never":
            raise
        settings = PullSettings(auth_file=auth_file, insecure_registries=tuple(insecure_registry or ()))
        Puller(store, settings).pull(wanted.base, note)
    record = build_image(store, state, wanted, recipe.absolute().parent, tag, step_timeout, cache=cache)
    if json:
        print_json(record.to_json())
    else:
        typer.echo(record.name)


def build_image(
    store: ImageStore,
    state_dir: Path,
    recipe: Recipe,
    folder: Path,
    tag: str,
    step_timeout_s: float,
    *,
    cache: bool = True,
    progress: Callable[[str], None] = note,
) -> ImageRecord:
    """The image `tag` that `recipe` makes; sources of copies lie in `folder`.

    Raises BuildFailed with the step, its exit code and output; what `ImageStore.import_archive` raises.
    """
    from orchard.cli.embedded import EmbeddedService
    from orchard.env.client import SandboxClient
    from orchard.env.images import capture, reference

    reference.full_name(tag)
    base = store.resolve(recipe.base)
    key = recipe.key(base.digest, folder)
    if cache and (built := store.find_built(key)) is not None:
        progress(f"built before from the same recipe and base: {built.digest[:19]}")
        return store.tag(built.digest, tag)
    # By its digest, lest the name moves to another image meanwhile.
    stored = reference.parse(recipe.base).kind in ("name", "digest")
    base_ref = base.digest if stored else recipe.base
    steps = [*recipe.steps()]
    with (
        EmbeddedService(str(state_dir)) as service,
        SandboxClient(service.base_url, service.api_key, cleanup=True) as client,
        client.create(base_ref, block_network=not recipe.needs_network, ttl_seconds=86_400) as sandbox,
        store.area.scratch() as scratch,
    ):
        for number, step in enumerate(steps, 1):
            progress(f"step {number} of {len(steps)}: {step.title}")
            _do(sandbox, step, f"step {number} of {len(steps)} ({step.title})", folder, step_timeout_s)
        progress("taking the files out")
        home = service.state_dir / "sandboxes" / sandbox.sandbox_id
        uppers = capture.sandbox_uppers(home, [mount.target for mount in base.mounts])
        layout = scratch / "layout"
        capture.write_layout(layout, uppers, env=recipe.env, working_dir=recipe.working_dir, user=recipe.user)
        return store.import_archive(layout, tag, base=base_ref, recipe=key)


def _do(sandbox: Sandbox, step: Step, title: str, folder: Path, timeout_s: float) -> None:
    from orchard.env.errors import BuildFailed, OrchardError

    if step.copy is not None:
        try:
            sandbox.files.upload(folder / step.copy.source, step.copy.target)
        except OrchardError as error:
            raise BuildFailed(f"{title} failed: {error.detail}", step=step.title) from error
        return
    job = sandbox.exec(
        [*step.command],
        cwd=step.cwd or "/",
        env=dict(step.env),
        user="0",
        timeout_s=timeout_s,
        max_output_bytes=_OUTPUT_BYTES,
    )
    if job.ok:
        return
    output = f"{job.stdout}{job.stderr}"
    shown = "\n".join(output.rstrip().splitlines()[-_SHOWN_LINES:])
    how = (
        f"did not end within {timeout_s:g} s (--step-timeout)"
        if job.timed_out
        else f"exited with {job.exit_code}"
        if job.exit_code is not None
        else f"did not run: {job.error}"
    )
    raise BuildFailed(f"{title} {how}\n{shown}", step=step.title, exit_code=job.exit_code, output=shown)
