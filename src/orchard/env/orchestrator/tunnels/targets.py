"""Where tunnels may lead: names for users, addresses for the operator alone.

    NAME=http://HOST[:PORT]     NAME=https://HOST[:PORT]     NAME=tcp://HOST:PORT     NAME=unix:///PATH

A target is a stream of bytes and nothing else: http and tcp mean the same but for the URL that users are told. To an
https target the service speaks TLS, and verifies it, so that user code speaks plain HTTP to it.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from orchard.env.errors import SettingsError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}\Z")
_PORTS = {"http": 80, "https": 443, "tcp": None}


@dataclass(frozen=True, slots=True)
class Target:
    """scheme: http, https, tcp or unix. path: of a unix socket, else empty."""

    name: str
    scheme: str
    host: str = ""
    port: int = 0
    path: str = ""

    @property
    def tls(self) -> bool:
        return self.scheme == "https"

    def url_at(self, listen_port: int) -> str:
        """What user code calls it, when the agent listens on this port."""
        scheme = "http" if self.scheme in ("http", "https") else "tcp"
        return f"{scheme}://127.0.0.1:{listen_port}"

    async def connect(
        self, protocol: Callable[[], asyncio.BaseProtocol], context: ssl.SSLContext | None
    ) -> None:
        """Connect, and give the connection to `protocol()`. Raises OSError, which `ssl.SSLError` is too."""
        loop = asyncio.get_running_loop()
        if self.scheme == "unix":
            await loop.create_unix_connection(protocol, self.path)
        elif self.tls:
            await loop.create_connection(protocol, self.host, self.port, ssl=context)
        else:
            await loop.create_connection(protocol, self.host, self.port)


def parse_target(text: str) -> Target:
    """The target of `NAME=URL`. Raises `SettingsError`."""
    name, equals, url = text.partition("=")
    if not equals or not _NAME.match(name):
        raise SettingsError(
            f"tunnel target {text!r:.200}: write NAME=URL, with a NAME of letters, digits, '.', '_' and '-'"
        )
    what = f"tunnel target {name}"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise SettingsError(f"{what}: {url!r:.200} is not a URL ({error})") from None
    if parts.scheme == "unix":
        if parts.netloc or not parts.path.startswith("/") or parts.query or parts.fragment:
            raise SettingsError(f"{what}: write a unix socket as unix:///path/of/the.sock")
        return Target(name, "unix", path=parts.path)
    if parts.scheme not in _PORTS:
        raise SettingsError(f"{what}: {url!r:.200} must begin with http://, https://, tcp:// or unix://")
    if parts.username is not None or parts.query or parts.fragment or parts.path not in ("", "/"):
        raise SettingsError(
            f"{what}: only the host and the port can be given; bytes are passed on as they are, so paths and"
            " credentials are for whoever speaks through the tunnel"
        )
    port = port if port is not None else _PORTS[parts.scheme]
    if not parts.hostname or not port:
        raise SettingsError(
            f"{what}: {url!r:.200} must name a host and a port, as {parts.scheme}://HOST:PORT"
        )
    return Target(name, parts.scheme, parts.hostname, port)


def parse_targets(texts: Sequence[str]) -> dict[str, Target]:
    """By name. Raises `SettingsError`, also for a name that is given twice."""
    targets: dict[str, Target] = {}
    for text in texts:
        target = parse_target(text)
        if target.name in targets:
            raise SettingsError(f"tunnel target {target.name} is given twice; each needs a name of its own")
        targets[target.name] = target
    return targets
