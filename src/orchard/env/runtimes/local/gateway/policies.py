"""What each sandbox may reach by name, and the address that stands for each name inside it."""

from __future__ import annotations

import ipaddress
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any

from orchard.env.egress import SYNTHETIC, EgressEntry, parse_entries

#: Names below `*.` entries that one sandbox may hold at once; the one unused for longest goes first.
MAX_FOUND_NAMES = 4096
_FIRST = int(SYNTHETIC.network_address)
_SIZE = SYNTHETIC.num_addresses


class Policy:
    """One sandbox. Its addresses follow from the names, so that they are the same after a restart."""

    def __init__(self, entries: Iterable[str]) -> None:
        self._entries: list[EgressEntry] = []
        self._names: dict[str, str] = {}
        self._addresses: dict[str, str] = {}
        self._found: OrderedDict[str, None] = OrderedDict()
        #: Its open connections: task, name, port.
        self.connections: dict[Any, tuple[str, int]] = {}
        self.replace(entries)

    def replace(self, entries: Iterable[str]) -> None:
        """Another list. Names that it does not allow are forgotten."""
        self._entries = [entry for entry in parse_entries(entries) if entry.network is None]
        for name in [name for name in self._addresses if not self.allows(name)]:
            self._forget(name)
        for entry in self._entries:
            if entry.kind == "name":
                self._found.pop(entry.name, None)
                self._take(entry.name)

    def allows(self, name: str, port: int | None = None) -> bool:
        """Whether it may reach the name at all, or at this port."""
        return any(entry.names(name) and (port is None or entry.has_port(port)) for entry in self._entries)

    def not_allowed_any_more(self) -> Iterator[Any]:
        """Tasks of the open connections that the list does not allow."""
        return (task for task, (name, port) in self.connections.items() if not self.allows(name, port))

    def address_of(self, name: str) -> str | None:
        """What stands for the name inside this sandbox; None when it may not reach it."""
        if not self.allows(name):
            return None
        if name in self._addresses and name not in self._found:
            return self._addresses[name]
        self._found[name] = None
        self._found.move_to_end(name)
        if len(self._found) > MAX_FOUND_NAMES:
            self._forget(next(iter(self._found)))
        return self._take(name)

    def name_of(self, address: str) -> str | None:
        """The name that an address stands for."""
        return self._names.get(address)

    def _take(self, name: str) -> str:
        if name in self._addresses:
            return self._addresses[name]
        number = zlib.crc32(name.encode()) % _SIZE
        while True:
            address = str(ipaddress.IPv4Address(_FIRST + number))
            # Some programs will not talk to addresses that end with 0 or 255.
            if address not in self._names and not address.endswith((".0", ".255")):
                break
            number = (number + 1) % _SIZE
        self._names[address] = name
        self._addresses[name] = address
        return address

    def _forget(self, name: str) -> None:
        self._found.pop(name, None)
        del self._names[self._addresses.pop(name)]
