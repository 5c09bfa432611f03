"""`orchard serve`."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Annotated

import typer

from orchard.cli import options

_KNOWN_RUNTIMES = ("local", "docker", "kubernetes")
_AVAILABLE_RUNTIMES = ("local",)
_CLEANUP_TIMEOUT_S = 10.0
_CLEANUP_ROUNDS = 5


def serve(
    runtime: Annotated[
        str | None, typer.Option("--runtime", metavar="NAME", help="local, docker or kubernetes [local].")
    ] = None,
    host: Annotated[str | None, typer.Option("--host", help="Where to listen [127.0.0.1].")] = None,
    port: Annotated[int | None, typer.Option("--port", help="0: a free one [8000].")] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option("--api-key", metavar="KEY", help="A key; may be repeated (or ORCHARD_API_KEYS=A,B)."),
    ] = None,
    keys_file: Annotated[
        Path | None, typer.Option("--keys-file", metavar="FILE", help="Keys with owners, roles and quotas.")
    ] = None,
    audit_log: Annotated[
        Path | None,
        typer.Option("--audit-log", metavar="FILE", help="A line for every change and every refused key."),
    ] = None,
    otel_endpoint: Annotated[
        str | None,
        typer.Option(
            "--otel-endpoint", metavar="URL", help="Where traces go (or OTEL_EXPORTER_OTLP_ENDPOINT)."
        ),
    ] = None,
    state_dir: options.StateDir = None,
    redis_url: Annotated[
        str | None,
        typer.Option("--redis-url", metavar="URL", help="Share --state-dir with other services."),
    ] = None,
    max_starting: Annotated[
        int | None, typer.Option("--max-starting", metavar="N", help="Sandboxes starting at once.")
    ] = None,
    max_sandboxes: Annotated[
        int | None, typer.Option("--max-sandboxes", metavar="N", help="Live sandboxes [no limit].")
    ] = None,
    pull: Annotated[
        str | None,
        typer.Option("--pull", metavar="WHEN", help="missing: pull images that are not here; never [never]."),
    ] = None,
    auth_file: options.AuthFile = None,
    insecure_registry: options.InsecureRegistry = None,
    tunnel_target: Annotated[
        list[str] | None,
        typer.Option(
            "--tunnel-target", metavar="NAME=URL", help="What tunnels may lead to; may be repeated."
        ),
    ] = None,
    egress_resolver: Annotated[
        str | None,
        typer.Option(
            "--egress-resolver",
            metavar="ADDR[:PORT]",
            help="DNS server that resolves the names of allow_egress [as this machine does].",
        ),
    ] = None,
    log_level: Annotated[
        str | None, typer.Option("--log-level", metavar="LEVEL", help="debug, info, warning or error [info].")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="All settings from a YAML or JSON file.")
    ] = None,
    embedded: Annotated[bool, typer.Option("--embedded", hidden=True)] = False,
) -> None:
    """Serve sandboxes of this machine over REST; stops cleanly on SIGTERM and Ctrl-C.

    Prints one line with its URL when it is ready.
    """
    if runtime is not None and runtime not in _AVAILABLE_RUNTIMES:
        known = runtime in _KNOWN_RUNTIMES
        raise typer.BadParameter(
            f"{runtime!r} is {'not in this version' if known else 'unknown'}; use local",
            param_hint="--runtime",
        )
    from orchard.cli.embedded import PREFIX

    try:
        from orchard.env.orchestrator import server
        from orchard.env.orchestrator.settings import ServiceSettings
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("orchard"):
            raise
        typer.echo(f"orchard: the service needs {error.name}: pip install 'orchard-agents[server]'", err=True)
        raise typer.Exit(1) from None
    settings = ServiceSettings.load(
        config,
        environ=os.environ,
        runtime=runtime,
        host=host,
        port=port,
        api_keys=api_key or None,
        keys_file=keys_file,
        audit_log=audit_log,
        otel_endpoint=otel_endpoint,
        state_dir=state_dir,
        redis_url=redis_url,
        max_starting=max_starting,
        max_sandboxes=max_sandboxes,
        pull=pull,
        registry_auth_file=auth_file,
        insecure_registries=insecure_registry or None,
        tunnel_targets=tunnel_target or None,
        egress_resolver=egress_resolver,
        log_level=log_level,
    )
    if not embedded:
        server.run(settings)
        return
    _end_with_stdin(settings.api_keys[0] if settings.api_keys else "")
    try:
        server.run(settings)
    finally:
        if settings.state_dir.parent.name.startswith(PREFIX):
            shutil.rmtree(settings.state_dir.parent, ignore_errors=True)


def _end_with_stdin(api_key: str) -> None:
    """Delete all sandboxes and stop when the input ends: the program that started this one is gone or done.

    What the input says until then is this service's URL.
    """

    def watch() -> None:
        # Not through sys.stdin: a thread blocked in its buffer would break the interpreter's shutdown.
        text = b""
        while chunk := os.read(0, 4096):
            text += chunk
        url = text.decode(errors="replace").strip()
        try:
            if url:
                _delete_everything(url, api_key)
        except (OSError, ValueError) as error:
            typer.echo(f"orchard: sandboxes could not be deleted: {error}", err=True)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="stdin", daemon=True).start()


def _delete_everything(url: str, api_key: str) -> None:
    """Without the SDK: importing it would make every `orchard run` end later."""
    from orchard.env.contract import KEY_HEADER

    def ask(method: str, path: str) -> bytes:
        request = urllib.request.Request(url + path, method=method, headers={KEY_HEADER: api_key})
        with urllib.request.urlopen(request, timeout=_CLEANUP_TIMEOUT_S) as response:
            answer: bytes = response.read()
            return answer

    for _ in range(_CLEANUP_ROUNDS):
        found = json.loads(ask("GET", "/sandboxes"))["sandboxes"]
        if not found:
            return
        for each in found:
            with contextlib.suppress(urllib.error.HTTPError):  # it ended by itself
                ask("DELETE", f"/sandboxes/{each['sandbox_id']}")
