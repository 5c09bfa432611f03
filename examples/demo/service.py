"""A service of the demo's own: `orchard serve` on a free port, with its state in one folder."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from orchard import OrchardError, SandboxClient

STOP_WITHIN_S = 60


@contextmanager
def running_service(state_dir: Path, arguments: Sequence[str] = ()) -> Iterator[tuple[str, str]]:
    """Starts it, yields its URL and key, stops it at the end. RuntimeError (with its log) if it fails.

    A service leaves its sandboxes alive for the next one; this one has none before or after.
    """
    key = secrets.token_urlsafe(24)
    command = [
        sys.executable,
        "-m",
        "orchard.cli.main",
        "serve",
        "--port",
        "0",
        "--state-dir",
        str(state_dir),
        *arguments,
    ]
    state_dir.mkdir(parents=True, exist_ok=True)
    # In the environment, not the command line, which every user of the machine may read.
    environment = {**os.environ, "ORCHARD_API_KEYS": key}
    with tempfile.TemporaryFile("w+") as log:
        service = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment,
            start_new_session=True,  # Ctrl-C is ours to handle, in order
        )
        assert service.stdout is not None
        try:
            # It prints one line with its URL when it is ready, or ends.
            found = re.search(r"https?://\S+", service.stdout.readline())
            if not found:
                service.wait(STOP_WITHIN_S)
                log.seek(0)
                raise RuntimeError(f"the service did not start:\n{log.read().strip()[-4000:]}")
            delete_all(found[0], key)
            try:
                yield found[0], key
            finally:
                delete_all(found[0], key)
        finally:
            service.terminate()
            try:
                service.wait(STOP_WITHIN_S)
            except subprocess.TimeoutExpired:
                service.kill()
                service.wait()


def delete_all(base_url: str, key: str) -> None:
    """Deletes every sandbox of the service; one that is not ready yet is cancelled."""
    try:
        with SandboxClient(base_url, key) as client:
            for sandbox in list(client.list()):
                sandbox.delete()
    except OrchardError as error:
        print(f"warning: sandboxes may be left: {error}", file=sys.stderr)
