"""The way from a name to a connection: resolved here and now, and never to what no sandbox may reach."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import dns.asyncresolver
import dns.exception
import dns.resolver

from orchard.env.egress import SYNTHETIC

_RESOLVE_S = 10.0
_CONNECT_S = 15.0
_MAX_ADDRESSES = 4
_LOOKUPS = 32
_CACHED_NAMES = 1000
#: How the bridges of all services of this machine begin.
_BRIDGES = "orc"
_NEVER = [
    SYNTHETIC,
    *map(
        ipaddress.IPv4Network,
        ("0.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "224.0.0.0/4", "240.0.0.0/4", "100.100.100.200/32"),
    ),
]


class Unreachable(Exception):
    """The name cannot be reached; the text says why."""


class Forbidden(Exception):
    """The name leads to an address that no sandbox may reach."""

    def __init__(self, address: str) -> None:
        super().__init__(f"the name leads to {address}, which no sandbox may reach")
        self.address = address


class Upstream:
    """resolver: address and port of the DNS server to ask; None asks as the machine does."""

    def __init__(self, resolver: tuple[str, int] | None) -> None:
        self._resolver: dns.asyncresolver.Resolver | None = None
        self._threads = ThreadPoolExecutor(_LOOKUPS, "lookup")
        if resolver is not None:
            self._resolver = dns.asyncresolver.Resolver(configure=False)
            self._resolver.nameservers = [resolver[0]]
            self._resolver.port = resolver[1]
            self._resolver.lifetime = _RESOLVE_S
            self._resolver.cache = dns.resolver.LRUCache(_CACHED_NAMES)
        #: Lookups under way: many connections to one name at once ask once.
        self._asking: dict[str, asyncio.Task[list[str]]] = {}

    async def connect(self, name: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to the name. Raises `Unreachable` or `Forbidden`."""
        addresses = await self._resolve(name)
        allowed = [address for address in addresses if not forbidden(address)]
        if not allowed:
            raise Forbidden(addresses[0]) if addresses else Unreachable("the name has no IPv4 address")
        problem: Exception | None = None
        for address in allowed[:_MAX_ADDRESSES]:
            try:
                async with asyncio.timeout(_CONNECT_S):
                    return await asyncio.open_connection(address, port)
            except (OSError, TimeoutError) as error:
                problem = error
        raise Unreachable(f"no connection: {problem or 'timed out'}")

    async def _resolve(self, name: str) -> list[str]:
        asking = self._asking.get(name)
        if asking is None:
            asking = self._asking[name] = asyncio.create_task(self._ask(name))
            asking.add_done_callback(lambda _: self._asking.pop(name, None))
        return await asyncio.shield(asking)

    async def _ask(self, name: str) -> list[str]:
        try:
            if self._resolver is not None:
                answer = await self._resolver.resolve(name, "A", search=False)
                return [record.address for record in answer]
            loop = asyncio.get_running_loop()
            async with asyncio.timeout(_RESOLVE_S):
                found = await loop.run_in_executor(self._threads, _look_up, name)
            return list(dict.fromkeys(found))
        except (dns.exception.DNSException, OSError, TimeoutError) as error:
            raise Unreachable(f"the name cannot be resolved: {error or type(error).__name__}") from None


def _look_up(name: str) -> Iterable[str]:
    # As bytes: text would be encoded once more. The last dot keeps the machine's search list out.
    full = f"{name}." if "." in name else name
    found = socket.getaddrinfo(full.encode(), None, socket.AF_INET, socket.SOCK_STREAM)
    return [str(each[4][0]) for each in found]


def forbidden(text: str) -> bool:
    """Whether no sandbox may ever reach this address: this machine's own, sandboxes', metadata, and the like."""
    address = ipaddress.IPv4Address(text)
    return any(address in network for network in (*_NEVER, *_bridged())) or _is_own(text)


def _is_own(address: str) -> bool:
    """One that packets would leave from as well as go to is this machine's. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((address, 9))
        except OSError:
            return False
        return bool(sock.getsockname()[0] == address)


def _bridged() -> list[ipaddress.IPv4Network]:
    """The networks of sandboxes, of whatever service."""
    found = []
    for line in Path("/proc/net/route").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[0].startswith(_BRIDGES):
            # Both in the byte order of the machine, which for all that Orchard runs on is the reverse.
            network, netmask = (socket.inet_ntoa(bytes.fromhex(fields[i])[::-1]) for i in (1, 7))
            found.append(ipaddress.IPv4Network(f"{network}/{netmask}", strict=False))
    return found
