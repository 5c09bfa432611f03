"""What a sandbox may reach: the entries of `allow_egress`, checked and understood in one place.

    example.org        that name          *.example.org    every name below it, not itself
    93.184.216.34      one address        10.1.2.0/24      a network

Each may end with `:PORT` or `:FIRST-LAST`; without one it means every port. Addresses are IPv4: there is no IPv6 in a
sandbox.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict

MAX_ENTRIES = 256
#: Stands for names inside the sandboxes: an address of it means something else in each of them.
SYNTHETIC = ipaddress.IPv4Network("198.18.0.0/15")
DNS_PORT = 53

_HINT = "write a host name (example.org, *.example.org) or an IPv4 address or network (10.1.2.0/24), with :PORT if need be"
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?\Z")
_PORTS = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?\Z")
_MAX_NAME = 253


class EgressDenial(BaseModel):
    """An attempt that was refused. destination: the address that was tried, None where only a name was looked up.
    protocol: tcp, udp, dns, icmp, or `several`. reason: why, in words. count: how often since the last report of the
    same."""

    model_config = ConfigDict(extra="ignore")

    destination: str | None = None
    name: str | None = None
    port: int | None = None
    protocol: str
    reason: str
    count: int = 1

    def __str__(self) -> str:
        where = " ".join(text for text in (self.name, self.destination and f"[{self.destination}]") if text)
        port = f":{self.port}" if self.port is not None else ""
        times = f" ({self.count} times)" if self.count > 1 else ""
        return f"refused {self.protocol} to {where or 'several destinations'}{port}: {self.reason}{times}"


@dataclass(frozen=True, slots=True)
class EgressEntry:
    """One entry. Either `network` or `name` is set; `below` means the names below it. ports: first and last."""

    kind: Literal["name", "below", "network"]
    name: str = ""
    network: ipaddress.IPv4Network | None = None
    ports: tuple[int, int] | None = None

    def __str__(self) -> str:
        if self.network is not None:
            single = self.network.prefixlen == 32
            host = str(self.network.network_address) if single else str(self.network)
        else:
            host = f"*.{self.name}" if self.kind == "below" else self.name
        if self.ports is None:
            return host
        first, last = self.ports
        return f"{host}:{first}" if first == last else f"{host}:{first}-{last}"

    def names(self, name: str) -> bool:
        """Whether it is about this (lower-case) name."""
        if self.kind == "below":
            return name.endswith("." + self.name)
        return self.kind == "name" and name == self.name

    def has_port(self, port: int) -> bool:
        return self.ports is None or self.ports[0] <= port <= self.ports[1]


def parse_entry(text: str) -> EgressEntry:
    """The entry that `text` means. ValueError says what is wrong with it and what would be right."""
    if "://" in text:
        raise ValueError(
            f"{text!r:.120} is a URL: leave out what is before the host name, and its path: {_HINT}"
        )
    if "[" in text or text.count(":") > 1:
        raise ValueError(f"{text!r:.120} is IPv6, which sandboxes do not have: {_HINT}")
    host, colon, ports_text = text.partition(":")
    ports = _ports(text, ports_text) if colon else None
    if "/" in host or re.fullmatch(r"[0-9.]+", host):
        return EgressEntry("network", network=_network(text, host), ports=ports)
    below = host.startswith("*.")
    name = canonical_name(host[2:] if below else host)
    if name is None:
        more = "; to allow everything, create it with block_network=false" if host == "*" else ""
        raise ValueError(f"{text!r:.120} is not a host name: {_HINT}{more}")
    return EgressEntry("below" if below else "name", name=name, ports=ports)


def normalised(entries: list[str]) -> list[str]:
    """The entries as they are kept: lower case, names as they stand in DNS, no duplicates. ValueError as above."""
    if len(entries) > MAX_ENTRIES:
        raise ValueError(f"{len(entries)} entries are too many: at most {MAX_ENTRIES}")
    return list(dict.fromkeys(str(parse_entry(entry)) for entry in entries))


def parse_entries(entries: Iterable[str]) -> list[EgressEntry]:
    return [parse_entry(entry) for entry in entries]


def canonical_name(text: str) -> str | None:
    """A host name as it stands in DNS: lower case, without the last dot, punycode. None when it is none."""
    name = text.removesuffix(".")
    if not name.isascii():
        import idna  # only for names that need it

        try:
            name = idna.encode(name, uts46=True).decode("ascii")
        except (idna.IDNAError, UnicodeError):
            return None
    name = name.lower()
    labels = name.split(".")
    if not name or len(name) > _MAX_NAME or not all(_LABEL.match(label) for label in labels):
        return None
    # A last label of digits would be read as an address by some programs and as a name by others.
    return None if labels[-1].isdigit() else name


def parse_resolver(text: str) -> tuple[str, int]:
    """Address and port of a DNS server, from `ADDR` or `ADDR:PORT` with an IPv4 address. ValueError if it is neither."""
    address, colon, port = text.partition(":")
    try:
        ipaddress.IPv4Address(address)
        number = int(port) if colon else DNS_PORT
    except ValueError:
        number = 0
    if not 1 <= number <= 65535:
        raise ValueError(f"{text!r:.80} is not ADDR or ADDR:PORT with an IPv4 address")
    return address, number


def _ports(text: str, ports: str) -> tuple[int, int]:
    match = _PORTS.match(ports)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= first <= last <= 65535:
        raise ValueError(f"{text!r:.120}: {ports!r:.40} is no port: write :443 or :8000-8999, 1 to 65535")
    return first, last


def _network(text: str, host: str) -> ipaddress.IPv4Network:
    try:
        network = ipaddress.IPv4Network(host)
    except ValueError as error:
        raise ValueError(f"{text!r:.120} is not an IPv4 address or network ({error}): {_HINT}") from None
    if network.subnet_of(SYNTHETIC):
        raise ValueError(
            f"{text!r:.120} lies in {SYNTHETIC}, which stands for names inside sandboxes: name the host"
        )
    return network
