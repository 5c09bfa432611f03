"""The sockets of the gateway, opened by the service: they outlive a gateway that dies, and it needs no rights."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass

from orchard.env.errors import RuntimeRefused
from orchard.env.runtimes.local.firewall import SOCKET_MARK, Gate
from orchard.env.runtimes.local.gateway import nflog

#: Connections that wait to be accepted. asyncio sets it anew, and would take 100.
BACKLOG = 1024
_SO_MARK, _SO_RCVBUFFORCE = 36, 33
#: Queries that wait. One that is lost is asked again after five seconds.
_WAITING_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Listening:
    """Connections to names, DNS over TCP and UDP, and the log of refused packets."""

    tcp: socket.socket
    dns_tcp: socket.socket
    dns_udp: socket.socket
    log: socket.socket
    listed: Gate

    @classmethod
    def open(cls, address: str, seed: int) -> Listening:
        """On free ports of `address`. seed: where to begin to look for a free log group. Raises `RuntimeRefused`."""
        with contextlib.ExitStack() as stack:
            try:
                tcp, dns_tcp, dns_udp = (
                    stack.enter_context(_bound(address, kind))
                    for kind in (socket.SOCK_STREAM, socket.SOCK_STREAM, socket.SOCK_DGRAM)
                )
                log, group = nflog.open_log(seed)
            except OSError as error:
                raise RuntimeRefused(f"the sandboxes' gateway cannot listen on {address}: {error}") from error
            stack.pop_all()
        ports = [each.getsockname()[1] for each in (tcp, dns_tcp, dns_udp)]
        return cls(tcp, dns_tcp, dns_udp, log, Gate(ports[0], ports[1], ports[2], group))

    @property
    def sockets(self) -> tuple[socket.socket, ...]:
        return self.tcp, self.dns_tcp, self.dns_udp, self.log

    def close(self) -> None:
        for each in self.sockets:
            each.close()


def _bound(address: str, kind: int) -> socket.socket:
    sock = socket.socket(socket.AF_INET, kind | socket.SOCK_NONBLOCK)
    try:
        sock.setsockopt(socket.SOL_SOCKET, _SO_MARK, SOCKET_MARK)
        sock.bind((address, 0))
        if kind == socket.SOCK_STREAM:
            sock.listen(BACKLOG)
        else:
            sock.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _WAITING_BYTES)
    except BaseException:
        sock.close()
        raise
    return sock
