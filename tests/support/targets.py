"""Servers for tunnels to lead to, each on a port of its own, in a thread with an event loop."""

from __future__ import annotations

import asyncio
import hashlib
import ssl
import subprocess
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from websockets.asyncio.server import ServerConnection, serve

Streams = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
PATTERN = bytes(range(256)) * 256


def make_authority(folder: Path) -> tuple[Path, Path, Path]:
    """Files of a certificate authority's certificate, and of a certificate and key of it for localhost."""

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    openssl("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=Test", "-days", "30")
    openssl("req", *key, "-keyout", "host.key", "-out", "host.csr", "-subj", "/CN=localhost")
    (folder / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    openssl("x509", "-req", "-in", "host.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
            "-out", "host.pem", "-days", "30", "-extfile", "names")  # fmt: skip
    return folder / "ca.pem", folder / "host.pem", folder / "host.key"


class Targets:
    """As a context manager: the servers, and `arguments` for a service that allows them by their names.

    http: answers with the request's path, keep-alive; `/events` sends two events, the second after a request of
    `/release`. ws: a WebSocket that sends back. echo: sends back; after the end of its input its size and SHA-256.
    source: told a number of bytes, sends as many, ends, and then reads on (`afterwards`). tls, tls-source: http and source,
    over TLS. stranger: tls of an authority that nobody knows. unix: echo. mute: accepts and says nothing, though https is
    expected. dead: nobody listens.
    """

    def __init__(self, folder: Path) -> None:
        self.authority, *files = make_authority(folder)
        self._context = _tls(*files)
        (folder / "stranger").mkdir()
        _, *files = make_authority(folder / "stranger")
        self._stranger = _tls(*files)
        self._socket = folder / "echo.sock"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._servers: list[Any] = []
        self.urls: dict[str, str] = {}
        self.http_connections = 0
        self.afterwards: Future[bytes] = Future()
        self._released: asyncio.Event

    @property
    def arguments(self) -> list[str]:
        return [word for name, url in self.urls.items() for word in ("--tunnel-target", f"{name}={url}")]

    def __enter__(self) -> Targets:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._open(), self._loop).result(30)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _open(self) -> None:
        self._released = asyncio.Event()
        await self._listen("http", "http", self._http)
        await self._listen("echo", "tcp", _echo)
        await self._listen("source", "tcp", self._source)
        await self._listen("tls", "https", self._http, ssl=self._context)
        await self._listen("tls-source", "https", self._source, ssl=self._context)
        await self._listen("stranger", "https", self._http, ssl=self._stranger)
        await self._listen("mute", "https", _mute)
        self._servers.append(await asyncio.start_unix_server(_echo, self._socket))
        self.urls["unix"] = f"unix://{self._socket}"
        self._servers.append(await serve(_send_back, "127.0.0.1", 0))
        self.urls["ws"] = f"http://127.0.0.1:{self._servers[-1].sockets[0].getsockname()[1]}"
        closed = await asyncio.start_server(_mute, "127.0.0.1", 0)
        self.urls["dead"] = f"tcp://127.0.0.1:{closed.sockets[0].getsockname()[1]}"
        closed.close()

    async def _listen(self, name: str, scheme: str, handler: Streams, **options: Any) -> None:
        server = await asyncio.start_server(handler, "127.0.0.1", 0, backlog=1024, **options)
        self._servers.append(server)
        self.urls[name] = f"{scheme}://localhost:{server.sockets[0].getsockname()[1]}"

    async def _http(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.http_connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                path = head.split(b" ", 2)[1]
                if path == b"/events":
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: first\n\n")
                    await self._released.wait()
                    writer.write(b"data: second\n\n")
                    break
                if path == b"/release":
                    self._released.set()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(path), path))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _source(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            left = int(await reader.readline())
            while left > 0:
                writer.write(PATTERN[:left])
                left -= len(PATTERN)
                await writer.drain()
            if not writer.can_write_eof():
                return  # of TLS
            writer.write_eof()
            self.afterwards.set_result(await reader.read())
        except Exception:
            pass  # its client went away, or another test has had the result
        finally:
            writer.close()


def _tls(certificate: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    digest, size = hashlib.sha256(), 0
    try:
        while data := await reader.read(1 << 16):
            digest.update(data)
            size += len(data)
            writer.write(data)
            await writer.drain()
        writer.write(f"\n{size} {digest.hexdigest()}".encode())
    except ConnectionError:
        pass
    finally:
        writer.close()


async def _mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()
    writer.close()


async def _send_back(connection: ServerConnection) -> None:
    async for message in connection:
        await connection.send(message)
