"""The `orchard` command.

Exit codes: the command's own for `run` and `exec` (124 after a timeout), 2 for wrong usage, 1 for any other
error with a message on stderr, 130 after Ctrl-C.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from orchard import __version__
from orchard.cli import copying, doctor, execution, images, keys, listing, sandboxes, serving, shell

app = typer.Typer(
    name="orchard",
    help="Sandboxes for agents: serve them, run commands in them, look after them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"orchard {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


app.command("serve")(serving.serve)
app.command("run")(execution.run)
app.command("create")(sandboxes.create)
app.command("exec")(execution.execute)
app.command("shell")(shell.shell)
app.command("cp")(copying.copy)
app.command("ps")(listing.ps)
app.command("logs")(listing.logs)
app.command("rm")(sandboxes.remove)
app.add_typer(images.app, name="images")
app.add_typer(keys.app, name="keys")
app.command("doctor")(doctor.doctor)


def main() -> None:
    """The entry point: runs the command and exits with its code."""
    from orchard.env.errors import OrchardError

    try:
        app(prog_name="orchard")
    except OrchardError as error:
        from orchard.cli.output import print_error

        words = sys.argv[1:]
        own = words[: words.index("--")] if "--" in words else words
        print_error(error, as_json="--json" in own)
        sys.exit(1)


if __name__ == "__main__":
    main()
