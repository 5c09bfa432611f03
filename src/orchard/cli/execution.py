"""`orchard run` and `orchard exec`."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from orchard.cli import options
from orchard.cli.output import note, print_json, write_bytes

if TYPE_CHECKING:
    from orchard.env.client import CommandHandle, JobResult, Sandbox

_MAX_OUTPUT_BYTES = 64 << 20
#: What a terminal may lag behind the command.
_SPOOL_BYTES = 512 << 20
_CHUNK_BYTES = 256 << 10
_LEASE_S = 120.0


def run(
    image: Annotated[
        str, typer.Argument(metavar="IMAGE", help='"host", "dir:PATH" or the name of an image.')
    ],
    command: options.CommandWords,
    timeout: options.Timeout = None,
    stdin: options.Stdin = False,
    shell: options.Shell = False,
    login: options.LoginShell = False,
    env: options.EnvOption = None,
    workdir: options.WorkDir = None,
    user: options.User = None,
    cpu: options.Cpu = None,
    memory: options.Memory = None,
    disk: options.Disk = None,
    pids: options.Pids = None,
    network: options.Network = False,
    tunnel: options.Tunnel = None,
    allow_egress: options.AllowEgress = None,
    label: options.LabelOption = None,
    ready_timeout: options.ReadyTimeout = None,
    keep: Annotated[bool, typer.Option("--keep", help="Do not delete the sandbox; print its id.")] = False,
    json: options.Json = False,
    state_dir: Annotated[
        str | None,
        typer.Option("--state-dir", metavar="DIR", help="Whose images the embedded service uses."),
    ] = None,
    base_url: options.BaseUrl = None,
    api_key: options.ApiKey = None,
) -> None:
    """Create a sandbox, run CMD in it, delete it; exits with the command's code (124: it timed out).

    Without a service to talk to, one is started for this command alone.
    """
    from orchard.cli.embedded import reach

    words = options.command_of(command, shell=shell or login)
    variables = options.pairs(env, "--env")
    labels = options.pairs(label, "--label")
    with reach(base_url, api_key, state_dir, embed=not keep) as client:
        sandbox = client.create(
            image,
            block_network=not network,
            tunnels=options.tunnels(tunnel),
            allow_egress=allow_egress or None,
            cpu=cpu,
            memory=memory,
            disk=disk,
            pids=pids,
            user=user,
            labels=labels,
            timeout=ready_timeout,
            # If this program is killed, the sandbox goes a while after it.
            heartbeat_timeout=None if keep else _LEASE_S,
        )
        with contextlib.ExitStack() as stack:
            if keep:
                note(f"sandbox {sandbox.sandbox_id} is kept; delete it with: orchard rm {sandbox.sandbox_id}")
            else:
                stack.enter_context(sandbox)
                sandbox.start_heartbeat(_LEASE_S / 4)
            handle = sandbox.commands.start(
                words,
                timeout_s=timeout,
                cwd=workdir,
                env=variables,
                login_shell=login or None,
                stdin_open=stdin or None,
                max_output_bytes=_MAX_OUTPUT_BYTES if json else None,
                max_spool_bytes=_SPOOL_BYTES,
                background=False,
            )
            job = _finish(handle, stdin=stdin, show=not json)
    _report(job, as_json=json)


def execute(
    sandbox_id: Annotated[str, typer.Argument(metavar="SANDBOX")],
    command: options.CommandWords,
    timeout: options.Timeout = None,
    stdin: options.Stdin = False,
    shell: options.Shell = False,
    login: options.LoginShell = False,
    env: options.EnvOption = None,
    workdir: options.WorkDir = None,
    user: options.User = None,
    concurrent: Annotated[
        bool, typer.Option("--concurrent", "-c", help="Do not wait for earlier commands of this sandbox.")
    ] = False,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Start it in the background and print its job id.")
    ] = False,
    json: options.Json = False,
    base_url: options.BaseUrl = None,
    api_key: options.ApiKey = None,
) -> None:
    """Run CMD in a sandbox; exits with the command's code (124: it timed out)."""
    words = options.command_of(command, shell=shell or login)
    variables = options.pairs(env, "--env")
    if detach and stdin:
        raise typer.BadParameter("a detached command has no input", param_hint="--stdin")
    with options.connect(base_url, api_key) as client:
        sandbox: Sandbox = client.get(sandbox_id)
        handle = sandbox.commands.start(
            words,
            timeout_s=timeout,
            cwd=workdir,
            env=variables,
            user=user,
            login_shell=login or None,
            stdin_open=stdin or None,
            max_output_bytes=_MAX_OUTPUT_BYTES if json or detach else None,
            max_spool_bytes=None if detach else _SPOOL_BYTES,
            concurrent=concurrent or None,
            background=detach,
        )
        if detach:
            if json:
                print_json({"job_id": handle.job_id, "sandbox_id": sandbox_id})
            else:
                typer.echo(handle.job_id)
            return
        job = _finish(handle, stdin=stdin, show=not json)
    _report(job, as_json=json)


def _finish(handle: CommandHandle, *, stdin: bool, show: bool) -> JobResult:
    """The command's result, its output shown as it comes; an interrupt (Ctrl-C) stops the command too."""
    if stdin:
        # A daemon: a read from a terminal that never ends must not keep this program alive.
        threading.Thread(target=_feed, args=(handle,), name="stdin", daemon=True).start()
    try:
        if show:
            _show(handle)
        return handle.wait()
    except (KeyboardInterrupt, SystemExit, BrokenPipeError):
        with contextlib.suppress(Exception):
            handle.cancel()
        raise


def _show(handle: CommandHandle) -> None:
    from orchard.env.client import OutputGap

    for happening in handle.stream():
        if isinstance(happening, OutputGap):
            size_bytes = happening.end - happening.start
            note(
                f"{size_bytes} bytes of {happening.stream} are left out: they came faster than they were read"
            )
        else:
            write_bytes(happening.data, error=happening.stream == "stderr")


def _feed(handle: CommandHandle) -> None:
    """Pass our input on until it ends, or the command does."""
    from orchard.env.errors import JobNotRunning, NotFound, OrchardError

    try:
        while chunk := os.read(sys.stdin.fileno(), _CHUNK_BYTES):
            handle.send_stdin(chunk)
        handle.close_stdin()
    except (JobNotRunning, NotFound):
        pass  # it has seen enough
    except OrchardError as error:
        note(f"the command's input was cut off: {error.detail}")
    except RuntimeError:
        pass  # the client was closed: the command has ended


def _report(job: JobResult, *, as_json: bool) -> NoReturn:
    if as_json:
        print_json(job.model_dump(mode="json"))
    else:
        if job.timed_out:
            note(f"the command timed out after {job.duration_seconds or 0:.0f} s; allow more with --timeout")
        elif job.oom_killed:
            note("the command ran out of memory; allow more with --memory")
        elif job.exit_code is None or (job.error and job.signal is None):
            note(job.error or "the command did not run to its end")
    if job.timed_out:
        raise typer.Exit(124)
    raise typer.Exit(1 if job.exit_code is None else job.exit_code)
