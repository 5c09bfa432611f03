"""A real `orchard serve` in a process of its own."""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.rest import Rest
from tests.support.waiting import eventually

START_WITHIN_S = 60.0
STOP_WITHIN_S = 60.0


class Service:
    """`orchard serve` with its own state directory and key; may be stopped, killed and started again.

    prefix: what runs it, such as another user's (`tests.support.ordinary`); it has to become the service by exec.
    `mark` stands in its environment, so that processes descended from it can be told from others.
    """

    def __init__(
        self,
        state_dir: Path,
        *,
        arguments: Sequence[str] = (),
        api_key: str | None = "",
        host: str = "127.0.0.1",
        environment: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
        name: str = "",
        logs: Path | None = None,
    ) -> None:
        """name: tells its logs from those of other services on the same state directory. logs: where they are, if not
        beside that."""
        self.state_dir = state_dir
        self.api_key = secrets.token_hex(16) if api_key == "" else api_key
        self.mark = secrets.token_hex(16)
        self.arguments = [*arguments]
        self._environment = dict(environment or {})
        self._prefix = [*prefix]
        self.base_url = ""
        self._host = host
        self._logs = logs or state_dir.parent
        self._name = name
        self._port = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._starts = 0
        state_dir.parent.mkdir(parents=True, exist_ok=True)

    @property
    def log_path(self) -> Path:
        """stderr of the latest start."""
        return self._logs / f"{self.state_dir.name}{self._name}.{self._starts}.stderr"

    @property
    def out_path(self) -> Path:
        """stdout of the latest start."""
        return self._logs / f"{self.state_dir.name}{self._name}.{self._starts}.stdout"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    @property
    def rest(self) -> Rest:
        return Rest(self.base_url, self.api_key)

    def command(self) -> list[str]:
        key = ["--api-key", self.api_key] if self.api_key is not None else []
        serve = [*self._prefix, sys.executable, "-m", "orchard.cli.main", "serve", "--host", self._host]
        return [*serve, "--port", str(self._port), *key, "--state-dir", str(self.state_dir), *self.arguments]

    def start(self) -> Service:
        """Returns when it has printed its URL. Another start listens on the same port."""
        self._starts += 1
        env = {k: v for k, v in os.environ.items() if not k.startswith(("ORCHARD_", "SANDBOX_"))}
        env.update(self._environment, ORCHARD_TEST_MARK=self.mark)
        with self.out_path.open("wb") as out, self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                self.command(), stdin=subprocess.DEVNULL, stdout=out, stderr=log, env=env
            )
        self.base_url = eventually(
            self._url, f"orchard serve prints its URL\n{self.log_path}", START_WITHIN_S
        )
        self._port = int(self.base_url.rpartition(":")[2])
        return self

    def _url(self) -> str | None:
        assert self._process is not None
        if self._process.poll() is not None:
            raise AssertionError(
                f"orchard serve ended with {self._process.returncode}:\n{self.out_path.read_text()}\n{self.log()}"
            )
        found = re.search(r"https?://[^\s/]+:\d+(?=[^\n]*\n)", self.out_path.read_text())
        return found[0] if found else None

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")[-20_000:]

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        assert self._process is not None
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(STOP_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise AssertionError(
                f"orchard serve did not stop within {STOP_WITHIN_S:g} s\n{self.log()}"
            ) from None

    def kill(self) -> None:
        """SIGKILL to the service alone, not to its helpers."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def delete_all(self) -> None:
        """Deletes every sandbox."""
        while ids := [s["sandbox_id"] for s in live_sandboxes(self.rest)]:
            for sandbox_id in ids:
                self.rest.delete(f"/sandboxes/{sandbox_id}").expect(200, 404)


def live_sandboxes(rest: Rest) -> list[dict]:  # type: ignore[type-arg]
    """Every sandbox that has not ended, over all pages."""
    found, cursor = [], None
    while True:
        query = {"cursor": cursor} if cursor else {}
        page = rest.get("/sandboxes", limit=500, **query).expect(200)
        found += [s for s in page["sandboxes"] if s["status"] in ("pending", "ready", "paused")]
        cursor = page["next_cursor"]
        if not cursor:
            return found
