"""skopeo, the program that speaks to registries: run so that it cannot hang or outlive us, its words made errors."""

from __future__ import annotations

import os
import re
import selectors
import shutil
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchard.env.errors import (
    DiskFull,
    ImageInvalid,
    ImageNotFound,
    InfrastructureError,
    InvalidRequest,
    OrchardError,
    PullDenied,
    RegistryRateLimited,
    RegistryUnreachable,
    RuntimeRefused,
)

HOW_TO_INSTALL = "apt install skopeo"
_POLICIES = (Path("/etc/containers/policy.json"), Path("~/.config/containers/policy.json"))
_POLL_S = 0.2
_STOP_WITHIN_S = 5.0
_KEPT_LINES = 200
_CHUNK = 1 << 16
_DEFAULT_RETRY_AFTER_S = 60.0

# Becomes skopeo, which the kernel then ends with the thread that started it, however that one ends.
_TETHERED = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() != int(sys.argv[1]): sys.exit("the pull was abandoned")
os.execv(sys.argv[2], sys.argv[2:])
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended. failure: skopeo's last words, empty after success. retry_after_s: what a registry asked for."""

    output: str
    failure: str
    retry_after_s: float | None = None


def find() -> str:
    """The program. Raises RuntimeRefused where it is not installed."""
    path = shutil.which("skopeo")
    if path is None:
        raise RuntimeRefused(
            f"Pulling from registries needs skopeo, which is not installed: {HOW_TO_INSTALL}. Without it, import an "
            f"archive with `orchard images import`."
        )
    return path


def run(
    arguments: Sequence[str],
    *,
    stop: threading.Event,
    progress: Callable[[str], None] = lambda line: None,
    activity: Callable[[], object] = lambda: None,
    stall_timeout_s: float,
) -> Outcome:
    """Run skopeo to its end. progress receives a line per layer and per wait. activity: anything that changes while
    bytes arrive; when neither it nor the output changes for `stall_timeout_s`, the run is given up.

    Raises RuntimeRefused where skopeo is missing, RegistryUnreachable after a stall, InfrastructureError when stopped.
    """
    policy = [] if any(path.expanduser().exists() for path in _POLICIES) else ["--insecure-policy"]
    command = [find(), "--debug", *policy, *arguments]
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _TETHERED, str(os.getpid()), *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        return _Run(process, progress, activity, stall_timeout_s).follow(stop)
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()  # skopeo removes what it has begun
        try:
            process.wait(_STOP_WITHIN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()


class _Run:
    """One running skopeo: its two streams read as they come."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        progress: Callable[[str], None],
        activity: Callable[[], object],
        stall_timeout_s: float,
    ) -> None:
        self._process = process
        self._progress = progress
        self._activity = activity
        self._stall_timeout_s = stall_timeout_s
        self._output: list[str] = []
        self._words: deque[str] = deque(maxlen=_KEPT_LINES)
        self._retry_after_s: float | None = None

    def follow(self, stop: threading.Event) -> Outcome:
        assert self._process.stdout is not None and self._process.stderr is not None
        last, since = self._activity(), time.monotonic()
        with selectors.DefaultSelector() as selector:
            for stream, take in (
                (self._process.stdout, self._take_output),
                (self._process.stderr, self._take_word),
            ):
                selector.register(stream, selectors.EVENT_READ, _Lines(take))
            while selector.get_map():
                for key, _ in selector.select(_POLL_S):
                    since = time.monotonic()
                    chunk = os.read(key.fd, _CHUNK)
                    key.data.feed(chunk)
                    if not chunk:
                        selector.unregister(key.fileobj)
                if stop.is_set():
                    raise InfrastructureError("The pull was stopped; pull again.")
                if (now := self._activity()) != last:
                    last, since = now, time.monotonic()
                elif time.monotonic() - since > self._stall_timeout_s:
                    raise RegistryUnreachable(
                        f"The registry sent nothing for {self._stall_timeout_s:g} s; the pull was given up. Layers that "
                        f"had arrived are kept: try again."
                    )
        failed = self._process.wait() != 0
        return Outcome("\n".join(self._output), self._last_words() if failed else "", self._retry_after_s)

    def _take_output(self, line: str) -> None:
        self._output.append(line)
        if found := re.match(r"Copying blob sha256:([0-9a-f]{12})", line):
            self._progress(f"fetching layer {found[1]}")

    def _take_word(self, line: str) -> None:
        if found := re.search(r"Too many requests to .*sleeping for (\d+(?:\.\d+)?)", line):
            self._retry_after_s = float(found[1])
            self._progress(f"the registry asks to wait {self._retry_after_s:g} s")
        if "level=debug" not in line:
            self._words.append(line)

    def _last_words(self) -> str:
        told = [_message(line) for line in self._words if line.strip()]
        return told[-1] if told else f"skopeo ended with {self._process.returncode} and said nothing"


class _Lines:
    """Cuts a stream into lines."""

    def __init__(self, take: Callable[[str], None]) -> None:
        self._take = take
        self._rest = b""

    def feed(self, chunk: bytes) -> None:
        """An empty chunk is the end."""
        *whole, self._rest = (self._rest + chunk).split(b"\n")
        if not chunk and self._rest:
            whole, self._rest = [self._rest], b""
        for line in whole:
            self._take(line.decode(errors="replace"))


def _message(line: str) -> str:
    found = re.search(r'level=fatal msg="(.*)"\s*$', line)
    return found[1].replace('\\"', '"') if found else line


def is_transient(failure: str) -> bool:
    """Whether the same transfer may succeed at once: it broke off, arrived damaged, or the registry faltered."""
    return bool(
        re.search(
            r"unexpected EOF|: EOF|connection reset|broken pipe|did not match|does not match|"
            r"stream error|TLS handshake timeout|(status|code|registry)\D{0,10}50[0234]\b",
            failure,
        )
    )


def explain(outcome: Outcome, ref: str, registry: str, architecture: str) -> OrchardError:
    """The typed error for a failed `skopeo copy` of `ref`."""
    text = outcome.failure

    def says(*patterns: str) -> bool:
        return any(re.search(pattern, text, re.IGNORECASE) for pattern in patterns)

    if says("no space left on device", "disk quota exceeded"):
        return DiskFull(
            f"The disk is full while pulling {ref!r}: free space, `orchard images prune` may help, and pull again; "
            f"layers that had arrived are kept."
        )
    if says("toomanyrequests", "too many requests", r"(?<![:.\d])429\b"):
        wait_s = outcome.retry_after_s or _DEFAULT_RETRY_AFTER_S
        return RegistryRateLimited(
            f"{registry} allows no more pulls for now (429); pull {ref!r} again after {wait_s:g} s, or log in for a "
            f"higher limit (`skopeo login {registry}`).",
            retry_after_s=wait_s,
        )
    if says(
        "unauthorized",
        "authentication required",
        r"\bdenied\b",
        "invalid username/password",
        r"(?<![:.\d])403\b",
    ):
        return PullDenied(
            f"{registry} does not give {ref!r} to these credentials, or it does not exist there. Log in with `skopeo "
            f"login {registry}`, or give a file with credentials: --auth-file. It said: {text}"
        )
    if says("manifest unknown", "name unknown", r"(?<![:.\d])404\b", "not found"):
        return ImageNotFound(f"{registry} has no image {ref!r}; check its name and tag. It said: {text}")
    if says("no image found in (manifest list|image index) for architecture"):
        return ImageInvalid(
            f"{ref!r} has no image for linux/{architecture}, this machine. {registry} said: {text}"
        )
    if says("did not match", "does not match"):
        return ImageInvalid(
            f"What {registry} sent for {ref!r} does not have its digest, at every attempt; its copy is damaged or a "
            f"proxy changes it. {text}"
        )
    if says("invalid reference format", "must be lowercase"):
        return InvalidRequest(f"{ref!r} is no image that a registry can have: {text}")
    if says("server gave HTTP response to HTTPS client", "x509:", "certificate"):
        error = RegistryUnreachable(
            f"{registry} does not offer HTTPS that can be trusted. If it is yours and the network is safe, allow it "
            f"with --insecure-registry {registry}. {text}"
        )
        error.retryable = False
        return error
    if is_transient(text) or says(
        "no such host", "connection refused", "timeout", "unreachable", "pinging container"
    ):
        return RegistryUnreachable(f"{registry} cannot be reached, or broke off, for {ref!r}: {text}")
    return InfrastructureError(f"Pulling {ref!r} failed: {text}")
