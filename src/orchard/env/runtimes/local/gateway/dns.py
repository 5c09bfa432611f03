"""The DNS server of sandboxes with a list: it answers for the names on the list, and asks nobody."""

from __future__ import annotations

import asyncio
import socket
import struct
import time

import dns.exception
import dns.flags
import dns.message
import dns.opcode
import dns.rcode
import dns.rdataclass
import dns.rdatatype
import dns.rrset

from orchard.env.egress import canonical_name
from orchard.env.runtimes.local.gateway.denials import Denials, Refusal
from orchard.env.runtimes.local.gateway.listening import BACKLOG
from orchard.env.runtimes.local.gateway.policies import Policy

_TTL_S = 60
_IDLE_S = 30.0
_QUIET_TYPES = (dns.rdatatype.AAAA, dns.rdatatype.HTTPS, dns.rdatatype.SVCB)


def answer(policy: Policy | None, query: bytes) -> tuple[bytes | None, Refusal | None]:
    """The answer to one query, None to what is no query; and what was refused.

    An allowed name has the address that stands for it, and no IPv6; nothing else is answered, and no query goes on to
    another server, so that a name that is not allowed carries nothing out.
    """
    try:
        message = dns.message.from_wire(query, ignore_trailing=True)
    except (dns.exception.DNSException, ValueError):
        return None, None
    if message.flags & dns.flags.QR:
        return None, None
    reply = dns.message.make_response(message, recursion_available=True)
    if message.opcode() != dns.opcode.QUERY or len(message.question) != 1:
        reply.set_rcode(dns.rcode.NOTIMP)
        return reply.to_wire(), None
    question = message.question[0]
    text = question.name.to_text(omit_final_dot=True)
    name = canonical_name(text)
    address = policy.address_of(name) if policy is not None and name is not None else None
    kind = dns.rdatatype.to_text(question.rdtype)
    if address is None or question.rdclass != dns.rdataclass.IN:
        reply.set_rcode(dns.rcode.REFUSED)
        return reply.to_wire(), Refusal("dns", "the name is not on the list", name=text[:253])
    if question.rdtype == dns.rdatatype.A:
        reply.answer.append(dns.rrset.from_text(question.name, _TTL_S, "IN", "A", address))
    elif question.rdtype not in _QUIET_TYPES:
        reply.set_rcode(dns.rcode.REFUSED)
        return reply.to_wire(), Refusal(
            "dns", f"only addresses are answered, not {kind[:16]}", name=text[:253]
        )
    return reply.to_wire(), None


class DnsServer:
    """Over UDP and TCP, for the sandboxes in `policies` (by address)."""

    def __init__(self, policies: dict[str, Policy], denials: Denials) -> None:
        self._policies = policies
        self._denials = denials
        self._udp: socket.socket | None = None

    async def start(self, udp: socket.socket, tcp: socket.socket) -> None:
        self._udp = udp
        asyncio.get_running_loop().add_reader(udp.fileno(), self._readable)
        await asyncio.start_server(self._serve, sock=tcp, backlog=BACKLOG)

    def _readable(self) -> None:
        assert self._udp is not None
        for _ in range(64):
            try:
                query, peer = self._udp.recvfrom(4096)
                reply = self._answer(peer[0], query)
                if reply is not None:
                    self._udp.sendto(reply, peer)
            except OSError:
                return

    def _answer(self, source: str, query: bytes) -> bytes | None:
        reply, refusal = answer(self._policies.get(source), query)
        if refusal is not None:
            self._denials.refused(source, refusal, time.monotonic())
        return reply

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            source = writer.get_extra_info("peername")[0]
            while True:
                async with asyncio.timeout(_IDLE_S):
                    (length,) = struct.unpack(">H", await reader.readexactly(2))
                    reply = self._answer(source, await reader.readexactly(length))
                    if reply is None:
                        return
                    writer.write(struct.pack(">H", len(reply)) + reply)
                    await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()
