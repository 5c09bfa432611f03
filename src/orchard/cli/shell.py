"""`orchard shell`: a terminal in a sandbox, in this terminal."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from orchard.cli import options
from orchard.cli.output import note, write_bytes

if TYPE_CHECKING:
    from orchard.env.client import Terminal

_INPUT_BYTES = 64 << 10
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.2, 30.0


def shell(
    sandbox_id: Annotated[str, typer.Argument(metavar="SANDBOX")],
    command: Annotated[
        list[str] | None, typer.Argument(metavar="[-- CMD…]", help="Instead of a login shell.")
    ] = None,
    env: options.EnvOption = None,
    workdir: options.WorkDir = None,
    attach: Annotated[
        str | None,
        typer.Option(
            "--attach", metavar="ID", help="Go on with a terminal that was left, and show what it showed."
        ),
    ] = None,
    takeover: Annotated[
        bool, typer.Option("--takeover", help="With --attach: also if somebody else is connected.")
    ] = False,
    base_url: options.BaseUrl = None,
    api_key: options.ApiKey = None,
) -> None:
    """Open a terminal in a sandbox; exits with the shell's code. It lives on for 15 minutes if this program is lost."""
    if attach is not None and command:
        raise typer.BadParameter("a terminal that is there already has its command", param_hint="--attach")
    variables = options.pairs(env, "--env")
    if "TERM" in os.environ:
        variables = {"TERM": os.environ["TERM"], **(variables or {})}
    size = _size()
    ended = threading.Event()
    with options.connect(base_url, api_key) as client:
        sandbox = client.get(sandbox_id)
        if attach is not None:
            terminal = sandbox.attach_pty(attach, takeover=takeover)
            terminal.resize(size.lines, size.columns)
        else:
            terminal = sandbox.pty(
                command or None, rows=size.lines, cols=size.columns, env=variables, cwd=workdir
            )
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _end)
        try:
            with _raw_input(), _resizing(terminal):
                threading.Thread(target=_feed, args=(terminal, ended), name="input", daemon=True).start()
                for data in terminal.output():
                    write_bytes(data)
        except (KeyboardInterrupt, SystemExit):
            terminal.detach()
            note(
                f"the terminal goes on; come back with: orchard shell {sandbox_id} --attach {terminal.pty_id}"
            )
            raise
        finally:
            ended.set()
        code = terminal.exit_code
    raise typer.Exit(1 if code is None or code < 0 else code)


def _end(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


def _size() -> os.terminal_size:
    """Of this terminal, asked of itself: COLUMNS and LINES may be of another, or of before."""
    for stream in (sys.stdout, sys.stdin, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            size = os.get_terminal_size(stream.fileno())
            if size.columns and size.lines:  # nobody may have told this terminal its size
                return size
    return os.terminal_size((80, 24))


@contextlib.contextmanager
def _raw_input() -> Iterator[None]:
    """Keys go to the sandbox as they are pressed, Ctrl-C included."""
    if not sys.stdin.isatty():
        yield
        return
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    tty.setraw(sys.stdin, termios.TCSADRAIN)  # what was typed ahead is kept
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


@contextlib.contextmanager
def _resizing(terminal: Terminal) -> Iterator[None]:
    """The sandbox's terminal follows this one's size."""
    from orchard.env.errors import OrchardError

    def follow() -> None:
        size = _size()
        with contextlib.suppress(OrchardError):
            terminal.resize(size.lines, size.columns)

    def changed(_number: int, _frame: object) -> None:
        # Not here: the main thread may be inside the client.
        threading.Thread(target=follow, daemon=True).start()

    before = signal.signal(signal.SIGWINCH, changed)
    try:
        yield
    finally:
        signal.signal(signal.SIGWINCH, before)


def _feed(terminal: Terminal, ended: threading.Event) -> None:
    from orchard.env.errors import OrchardError

    with contextlib.suppress(OrchardError, RuntimeError, OSError):
        while data := os.read(sys.stdin.fileno(), _INPUT_BYTES):
            terminal.send(data)
        # Our input has ended: so does the terminal's, for whatever reads it next. An end that comes while a program
        # sets the terminal up is lost on it, hence again.
        wait_s = _FIRST_WAIT_S
        terminal.send(b"\x04")
        while not ended.wait(wait_s):
            terminal.send(b"\x04")
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
