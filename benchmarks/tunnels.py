"""Small HTTP requests from inside a sandbox, through a tunnel, to a raw server on this machine; and the same without.

The server and the client are as lean as they can be, each a process of its own; the client inside is the same program
as the one outside.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.samples import Metrics, throughput
from benchmarks.scale import Scale
from examples.demo.service import running_service
from orchard import SandboxClient

NAME = "orchard (tunnel)"
PORT = 8080
WARM_UP = 50

SERVER = """
import asyncio, uvloop
ANSWER = b"HTTP/1.1 200 OK\\r\\nContent-Length: 2\\r\\n\\r\\nok"
class Server(asyncio.Protocol):
    def connection_made(self, transport): self.transport = transport
    def data_received(self, data): self.transport.write(ANSWER * data.count(b"\\r\\n\\r\\n"))
async def main():
    server = await asyncio.get_running_loop().create_server(Server, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()
uvloop.run(main())
"""

#: PORT COUNT CONNECTIONS NEW: a request on each connection as soon as its answer is there; the seconds of each.
CLIENT = """
import json, select, socket, sys, time
port, count, connections, new = map(int, sys.argv[1:])
REQUEST = b"GET / HTTP/1.1\\r\\nHost: t\\r\\n\\r\\n"
poll, sockets, begun, seconds = select.epoll(), {}, {}, []
def connect():
    s = socket.create_connection(("127.0.0.1", port)); s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sockets[s.fileno()] = s; poll.register(s.fileno(), select.EPOLLIN); return s
def ask(s): begun[s.fileno()] = time.perf_counter(); s.sendall(REQUEST)
def begin():
    at = time.perf_counter(); s = connect(); ask(s); begun[s.fileno()] = at
start = time.perf_counter()
for _ in range(connections): begin()
while len(seconds) < count:
    for fd, _ in poll.poll():
        s = sockets[fd]; data = s.recv(65536)
        if not data.endswith(b"ok"): sys.exit("no whole answer: %r" % data)
        seconds.append(time.perf_counter() - begun[fd])
        if new: poll.unregister(fd); del sockets[fd]; s.close(); begin()
        else: ask(s)
print(json.dumps([seconds, time.perf_counter() - start]))
"""


def missing() -> str | None:
    """Why it cannot be measured here, or None."""
    return None if os.geteuid() == 0 else "the local runtime needs root"


def measure(scale: Scale) -> Metrics:
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline())
            return {**_outside(port, scale), **_inside(port, scale)}
        finally:
            server.kill()


def _figures(run: Callable[[list[str]], str], port: int, name: str, scale: Scale) -> Metrics:
    metrics: Metrics = {}
    for figure, connections, new in (("c1", 1, 0), ("c8", 8, 0), ("new_c8", 8, 1)):
        for count in (WARM_UP, scale.execs):
            seconds, wall_s = json.loads(run(["-c", CLIENT, *map(str, (port, count, connections, new))]))
        metrics[f"{name}_{figure}"] = throughput(seconds, wall_s)
    return metrics


def _outside(port: int, scale: Scale) -> Metrics:
    def run(words: list[str]) -> str:
        return subprocess.run([sys.executable, *words], stdout=subprocess.PIPE, text=True, check=True).stdout

    return _figures(run, port, "direct", scale)


def _inside(port: int, scale: Scale) -> Metrics:
    target = ["--tunnel-target", f"raw=http://127.0.0.1:{port}"]
    with (
        tempfile.TemporaryDirectory(prefix="bench-tunnels-") as folder,
        running_service(Path(folder) / "state", target) as (base_url, key),
        SandboxClient(base_url, key) as client,
        client.create("host", tunnels=[{"target": "raw", "listen_port": PORT}]) as sandbox,
    ):

        def run(words: list[str]) -> str:
            command = ["/usr/bin/python3", *words]
            return sandbox.exec(command, check=True, max_output_bytes=64 << 20).stdout

        return _figures(run, PORT, "tunnel", scale)
