"""The service that `orchard run` talks to: one that is there, or one of its own for as long as it lives."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import select
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Self

from orchard.cli.output import note

if TYPE_CHECKING:
    from orchard.env.client import SandboxClient

_PROBE_TIMEOUT_S = 2.0
_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 15.0
_URL = re.compile(r"https?://[^\s/]+:\d+")
#: Of the directories that embedded services may remove when they end.
PREFIX = "orchard-run-"


@contextlib.contextmanager
def reach(
    base_url: str | None, api_key: str | None, state_dir: str | None, *, embed: bool
) -> Iterator[SandboxClient]:
    """A client of the service that was named, else of one at the default address, else of an embedded one.

    embed=False: the sandbox is to outlive this program, so an embedded service would not do; otherwise what is
    created goes when this program ends.
    """
    from orchard.env.client import SandboxClient
    from orchard.env.client.settings import BASE_URL_VARIABLES, DEFAULT_BASE_URL, environment_value

    named = base_url or environment_value(BASE_URL_VARIABLES)
    if named or not embed or (state_dir is None and answers(DEFAULT_BASE_URL)):
        with SandboxClient(named, api_key, cleanup=embed) as client:
            yield client
        return
    with (
        EmbeddedService(state_dir) as service,
        SandboxClient(service.base_url, service.api_key, cleanup=True) as client,
    ):
        yield client


def answers(base_url: str) -> bool:
    """Whether an Orchard service answers there."""
    from orchard.env.contract import VERSION_HEADER

    try:
        with urllib.request.urlopen(f"{base_url}/health", timeout=_PROBE_TIMEOUT_S) as response:
            return VERSION_HEADER in response.headers
    except (OSError, ValueError, urllib.error.URLError):
        return False


class EmbeddedService:
    """`orchard serve` as a child, with a state directory of its own and the images of `state_dir`.

    The child ends when this program does, however it ends: it watches a pipe that only this program holds
    open. Its sandboxes end with it.
    """

    def __init__(self, state_dir: str | None = None) -> None:
        from orchard.env.paths import default_state_dir

        self.api_key = secrets.token_urlsafe(24)
        self.base_url = ""
        self._images_of = Path(state_dir) if state_dir else default_state_dir()
        self._folder = tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True)
        # Without a name: the child removes its folder when it ends.
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with this
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def state_dir(self) -> Path:
        """The child's own."""
        return Path(self._folder.name) / "state"

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the service and remove its state."""
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None and process.stdout is not None
            with contextlib.suppress(OSError):
                process.stdin.close()  # what the child waits for
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                note("the embedded service does not stop; killing it")
                process.kill()
                process.wait()
            process.stdout.close()
        self._log.close()
        self._folder.cleanup()

    def _start(self) -> None:
        state = self.state_dir
        state.mkdir(mode=0o700)
        images = self._images_of / "images"
        with contextlib.suppress(OSError):
            # Without the right to make it there are no images there either.
            images.mkdir(parents=True, exist_ok=True)
        if images.is_dir():
            (state / "images").symlink_to(images.resolve())
        command = [sys.executable, "-m", "orchard.cli.main", "serve", "--embedded", "--port", "0"]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("ORCHARD_")}
        environment["ORCHARD_API_KEYS"] = self.api_key
        self._process = subprocess.Popen(
            [*command, "--state-dir", str(state), "--log-level", "warning"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
            start_new_session=True,  # Ctrl-C is ours to handle, in order
        )
        self.base_url = self._read_url(self._process)
        assert self._process.stdin is not None
        # Where the child finds itself, to delete what is left when this pipe ends.
        self._process.stdin.write(f"{self.base_url}\n".encode())
        self._process.stdin.flush()

    def _read_url(self, process: subprocess.Popen[bytes]) -> str:
        from orchard.env.errors import InfrastructureError

        assert process.stdout is not None
        text = b""
        deadline = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline:
            readable, _, _ = select.select([process.stdout], [], [], deadline - time.monotonic())
            chunk = os.read(process.stdout.fileno(), 4096) if readable else b""
            if readable and not chunk:
                break
            text += chunk
            for line in text.decode(errors="replace").splitlines(keepends=True):
                if line.endswith("\n") and (found := _URL.search(line)):
                    return found[0]
        self._log.seek(0)
        said = self._log.read().decode(errors="replace").strip()[-2000:]
        raise InfrastructureError(
            f"the embedded service did not start; `orchard doctor` tells what this machine lacks. It said:\n{said}"
        )
