"""A real `redis-server` of one's own, on a socket in a directory of its own."""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

import redis

from tests.support.waiting import eventually


class RedisServer:
    """May be stopped, killed, frozen, emptied and started again. persistent: what was written survives that."""

    def __init__(self, *, persistent: bool = False) -> None:
        # Not below pytest's directory: the address of a socket has to be short.
        self._folder = Path(tempfile.mkdtemp(prefix="redis-"))
        self._persistent = persistent
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"unix://{self._folder}/redis.sock"

    @property
    def client(self) -> redis.Redis:
        """A connection of the test's own."""
        return redis.Redis.from_url(self.url, socket_timeout=10)

    def start(self) -> RedisServer:
        """Returns when it answers."""
        keep = ["--appendonly", "yes", "--appendfsync", "always"] if self._persistent else ["--save", ""]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                ["redis-server", "--port", "0", "--unixsocket", f"{self._folder}/redis.sock", *keep,
                 "--dir", str(self._folder)], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        eventually(self._answers, f"redis-server answers\n{(self._folder / 'log').read_text()}")
        return self

    def _answers(self) -> bool:
        try:
            return bool(self.client.ping())
        except redis.RedisError:
            return False

    def kill(self) -> None:
        """It is gone, without a word."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def freeze(self) -> None:
        """It takes connections and does not answer."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def wipe(self) -> None:
        """Everything in it is gone."""
        self.client.flushall()

    def end(self) -> None:
        if self.running:
            self.thaw()
            self.kill()
        shutil.rmtree(self._folder)
