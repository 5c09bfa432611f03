"""The gateway's process: `main.py OPTIONS`, started by the service with its sockets, powerless from then on.

It does what its control socket says, one JSON object a line, and ends when that ends.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import resource
import socket
import sys
import time
from typing import Any

_NOBODY = 65534
_PR_SET_NO_NEW_PRIVS = 38
_FILES = 65_536
_TICK_S = 0.25
_MAX_LINE = 1 << 20


def main() -> None:
    options = json.loads(sys.argv[1])
    sys.path[:] = options["path"]
    # Everything it will ever import: once it is nobody it may not read the files.
    import stringprep  # noqa: F401

    import dns.asyncbackend
    import dns.asyncquery
    import dns.rdtypes.ANY.CNAME
    import dns.rdtypes.ANY.OPT
    import dns.rdtypes.IN.A
    import idna.uts46data  # noqa: F401
    import uvloop

    from orchard.env.runtimes.local.gateway import denials, proxy, upstream  # noqa: F401

    dns.asyncbackend.set_default_backend("asyncio")
    sockets = [socket.socket(fileno=fd) for fd in options["sockets"]]
    _become_nobody()
    uvloop.run(_serve(sockets, options["resolver"]))


def _become_nobody() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    os.setgroups([])
    os.setresgid(_NOBODY, _NOBODY, _NOBODY)
    os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    ctypes.CDLL(None).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


async def _serve(sockets: list[socket.socket], resolver: list[Any] | None) -> None:
    from orchard.env.runtimes.local.gateway.denials import Denials
    from orchard.env.runtimes.local.gateway.dns import DnsServer
    from orchard.env.runtimes.local.gateway.proxy import Proxy
    from orchard.env.runtimes.local.gateway.upstream import Upstream

    control, tcp, dns_tcp, dns_udp, log = sockets
    reader, writer = await asyncio.open_connection(sock=control, limit=_MAX_LINE)
    duties = Duties(writer)
    denials = Denials(duties.tell)
    duties.denials = denials
    # The first line says what all the lists are. Before it nothing is served.
    await duties.obey(await reader.readline())
    log.setblocking(False)
    asyncio.get_running_loop().add_reader(log.fileno(), duties.read_log, log)
    await Proxy(duties.policies, denials, Upstream((resolver[0], resolver[1]) if resolver else None)).start(
        tcp
    )
    await DnsServer(duties.policies, denials).start(dns_udp, dns_tcp)
    ticking = asyncio.create_task(duties.tick())
    while line := await reader.readline():
        await duties.obey(line)
    ticking.cancel()
    os._exit(0)  # the service is gone: whatever is under way ends with it


class Duties:
    """What the service asks for, and what it is told."""

    def __init__(self, service: asyncio.StreamWriter) -> None:
        from orchard.env.runtimes.local.gateway.policies import Policy

        self._service = service
        self._make = Policy
        self.policies: dict[str, Policy] = {}
        self.denials: Any = None

    async def obey(self, line: bytes) -> None:
        """`{n, lists: {address: entries, or null when it is gone}}`, answered by `{done: n}` once it holds."""
        order = json.loads(line)
        cut = []
        for source, entries in order["lists"].items():
            policy = self.policies.get(source)
            if entries is None:
                self.policies.pop(source, None)
                self.denials.forget(source)
                cut += list(policy.connections) if policy is not None else []
            elif policy is None:
                self.policies[source] = self._make(entries)
            else:
                policy.replace(entries)
                cut += list(policy.not_allowed_any_more())
        for task in cut:
            task.cancel()
        if cut:
            await asyncio.wait(cut)
        self._say({"done": order["n"]})

    def tell(self, source: str, refusal: Any, count: int) -> None:
        told = {
            name: getattr(refusal, name) for name in ("protocol", "reason", "destination", "name", "port")
        }
        self._say({"source": source, "denial": {**told, "count": count}})

    def _say(self, message: dict[str, Any]) -> None:
        self._service.write(json.dumps(message).encode() + b"\n")

    def read_log(self, log: socket.socket) -> None:
        from orchard.env.runtimes.local.gateway.denials import Refusal
        from orchard.env.runtimes.local.gateway.nflog import packets

        for _ in range(64):
            try:
                data = log.recv(1 << 16)
            except OSError:
                return
            for packet in packets(data):
                policy = self.policies.get(packet.source)
                name = policy.name_of(packet.destination) if policy is not None else None
                reason = _why(packet.destination, packet.protocol, packet.port, name)
                refusal = Refusal(packet.protocol, reason, packet.destination, name, packet.port)
                self.denials.refused(packet.source, refusal, time.monotonic())

    async def tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self.denials.tick(time.monotonic())


def _why(destination: str, protocol: str, port: int | None, name: str | None) -> str:
    from orchard.env.runtimes.local.gateway.upstream import forbidden

    if name is not None:
        return "names are reached over TCP only"
    if port == 53 and not forbidden(destination):
        return "names are looked up at the name server of /etc/resolv.conf only"
    if protocol not in ("tcp", "udp"):
        return "lists are about TCP and UDP only"
    if forbidden(destination):
        return "no sandbox may reach this address"
    return "the list does not have it"


if __name__ == "__main__":
    main()
