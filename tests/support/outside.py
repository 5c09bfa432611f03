"""A piece of Internet on this machine: a network namespace with real DNS, HTTP, TLS and other servers.

Run as a program it is the servers; `Outside` makes the namespace around it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import ssl
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset

from tests.support.waiting import eventually

HTTP, TLS, SPEAKS_FIRST, ECHO, BULK, DATAGRAMS = 80, 443, 2222, 7007, 9100, 9200
BULK_BYTES = 100 << 20
NAMES = ("allowed.example", "other.example", "sub.allowed.example")


@dataclass(frozen=True)
class Outside:
    """address: of all servers. our_address: this machine's on the wire to it. Names `ip-A-B-C-D.example` are at that
    address; those of `NAMES` at the servers'."""

    address: str
    our_address: str
    namespace: str
    device: str
    folder: Path

    @property
    def certificate(self) -> str:
        return (self.folder / "cert.pem").read_text()

    def heard(self) -> list[dict[str, Any]]:
        """What arrived at the servers, in order."""
        return [json.loads(line) for line in (self.folder / "heard").read_text().splitlines()]

    def looked_up(self) -> set[str]:
        return {each["name"] for each in self.heard() if each["what"] == "dns"}

    def hosts(self) -> set[str]:
        """Names in requests and handshakes."""
        return {each["host"] for each in self.heard() if "host" in each}


@contextlib.contextmanager
def outside(folder: Path) -> Iterator[Outside]:
    taken = subprocess.run(["ip", "-4", "addr"], capture_output=True, text=True, check=True).stdout
    number = next(n for n in range(60) if f"203.0.113.{4 * n + 1}/" not in taken)
    name = f"oe{os.getpid()}"
    made = Outside(f"203.0.113.{4 * number + 2}", f"203.0.113.{4 * number + 1}", name, f"{name}a", folder)

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    with contextlib.ExitStack() as stack:
        ip("netns", "add", name)
        stack.callback(subprocess.run, ["ip", "netns", "del", name], check=True)
        ip("link", "add", made.device, "type", "veth", "peer", "name", f"{name}b", "netns", name)
        ip("addr", "add", f"{made.our_address}/30", "dev", made.device)
        ip("link", "set", made.device, "up")
        ip("-n", name, "addr", "add", f"{made.address}/30", "dev", f"{name}b")
        ip("-n", name, "link", "set", f"{name}b", "up")
        ip("-n", name, "link", "set", "lo", "up")
        _certificate(folder)
        program = ["ip", "netns", "exec", name, sys.executable, "-m", "tests.support.outside"]
        server = subprocess.Popen([*program, made.address, str(folder)])
        stack.callback(lambda: (server.kill(), server.wait()))
        eventually((folder / "ready").exists, "the servers outside listen")
        yield made


def _certificate(folder: Path) -> None:
    alternatives = ",".join(f"DNS:{name}" for name in NAMES)
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
         "-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem"), "-subj", "/CN=outside",
         "-addext", f"subjectAltName={alternatives}"],
        check=True, capture_output=True,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------- the servers


class _Servers:
    def __init__(self, address: str, folder: Path) -> None:
        self._address = address
        self._heard = (folder / "heard").open("a")
        self._folder = folder
        self._bulk = bytes(range(256)) * 4096

    def hear(self, what: str, **fields: Any) -> None:
        self._heard.write(json.dumps({"what": what, **fields}) + "\n")
        self._heard.flush()

    async def start(self) -> None:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(self._folder / "cert.pem", self._folder / "key.pem")
        tls.sni_callback = lambda _socket, name, _context: self.hear("tls", host=name)
        for port, serve, context in (
            (HTTP, self.http, None), (TLS, self.http, tls), (SPEAKS_FIRST, self.speaks_first, None),
            (ECHO, self.echo, None), (BULK, self.bulk, None),
        ):  # fmt: skip
            await asyncio.start_server(serve, self._address, port, ssl=context, backlog=512)
        loop = asyncio.get_running_loop()
        for port in (53, DATAGRAMS):
            await loop.create_datagram_endpoint(
                lambda port=port: _Datagrams(self, port), (self._address, port)
            )
        (self._folder / "ready").touch()
        await asyncio.Event().wait()

    async def http(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers every request with the host it named; upgrades to an echo when asked for `Upgrade: websocket`."""
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                host = re.search(rb"(?i)\nhost: *([^\r\n]*)", head)
                named = host[1].decode() if host else ""
                self.hear("http", host=named, line=head.split(b"\r\n")[0].decode("latin-1"))
                if b"websocket" in head.lower():
                    writer.write(
                        b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n"
                    )
                    await self.echo(reader, writer)
                    return
                length = re.search(rb"(?i)\ncontent-length: *(\d+)", head)
                if length:
                    await reader.readexactly(int(length[1]))
                body = f"you asked {named}".encode()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
                await writer.drain()
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            writer.close()

    async def speaks_first(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-outside\r\n")
        await self.echo(reader, writer)

    async def echo(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Until the end of the input; then says how much it was."""
        count = 0
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                count += len(data)
                writer.write(data)
                await writer.drain()
            writer.write(b"<%d>" % count)
            await writer.drain()
        writer.close()

    async def bulk(self, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            for _ in range(BULK_BYTES // len(self._bulk)):
                writer.write(self._bulk)
                await writer.drain()
        writer.close()

    def resolve(self, query: bytes) -> bytes:
        message = dns.message.from_wire(query)
        name = message.question[0].name.to_text(omit_final_dot=True).lower()
        self.hear("dns", name=name)
        reply = dns.message.make_response(message)
        literal = re.fullmatch(r"ip-(\d+)-(\d+)-(\d+)-(\d+)\.example", name)
        known = ".".join(literal.groups()) if literal else self._address if name in NAMES else None
        if known is None:
            reply.set_rcode(dns.rcode.NXDOMAIN)
        elif message.question[0].rdtype == dns.rdatatype.A:
            reply.answer.append(dns.rrset.from_text(f"{name}.", 1, "IN", "A", known))
        return reply.to_wire()


class _Datagrams(asyncio.DatagramProtocol):
    def __init__(self, servers: _Servers, port: int) -> None:
        self._servers = servers
        self._port = port

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, peer: Any) -> None:
        self._transport.sendto(self._servers.resolve(data) if self._port == 53 else data, peer)


if __name__ == "__main__":
    asyncio.run(_Servers(sys.argv[1], Path(sys.argv[2])).start())
