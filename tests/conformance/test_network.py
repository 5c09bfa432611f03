"""The network: none unless allowed; and when allowed, neither the machine nor other sandboxes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from tests.conformance.conftest import NewBox
from tests.conformance.runtimes import Images, RuntimeCase
from tests.support.inside import inside
from tests.support.machine import network_devices
from tests.support.rest import Box, Rest
from tests.support.waiting import Stopwatch, eventually

SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = self.client_address[0].encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_): pass
http.server.ThreadingHTTPServer((sys.argv[1], 8099), Handler).serve_forever()
"""

#: Tries a TCP connection and an HTTP request: the body, or the name of the error.
FETCH = """
def fetch(host, port, patience=3):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    s = socket.socket(family, socket.SOCK_STREAM); s.settimeout(patience)
    try:
        s.connect((host, port)); s.sendall(b"GET / HTTP/1.0\\r\\n\\r\\n")
        data = b""
        while True:
            piece = s.recv(4096)
            if not piece: break
            data += piece
        return data.partition(b"\\r\\n\\r\\n")[2].decode()
    except TimeoutError: return "TIMEOUT"
    except OSError as error: return errno.errorcode.get(error.errno, str(error))
"""

UNREACHED = {
    "TIMEOUT",
    "ECONNREFUSED",
    "ENETUNREACH",
    "EHOSTUNREACH",
    "EACCES",
    "EPERM",
    "ENETDOWN",
    "EADDRNOTAVAIL",
}


def fetch(box: Box, host: str, port: int) -> str:
    return inside(box, FETCH + f"report(fetch({host!r}, {port}))")


@dataclass(frozen=True)
class Elsewhere:
    """A host that is not this machine: a network namespace with an HTTP server that tells who asked."""

    address: str
    our_address: str
    #: its network namespace, and our end of the wire to it
    namespace: str
    device: str


@pytest.fixture(scope="module")
def elsewhere(runtime: RuntimeCase) -> Iterator[Elsewhere]:
    assert runtime.on_this_machine
    taken = subprocess.run(["ip", "-4", "addr"], capture_output=True, text=True, check=True).stdout
    number = next(n for n in range(60) if f"198.51.100.{4 * n + 1}/" not in taken)
    name = f"ot{os.getpid()}"
    ours, theirs = f"198.51.100.{4 * number + 1}", f"198.51.100.{4 * number + 2}"

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    with ExitStack() as stack:
        ip("netns", "add", name)
        stack.callback(subprocess.run, ["ip", "netns", "del", name], check=True)
        ip("link", "add", f"{name}a", "type", "veth", "peer", "name", f"{name}b", "netns", name)
        ip("addr", "add", f"{ours}/30", "dev", f"{name}a")
        ip("link", "set", f"{name}a", "up")
        ip("-n", name, "addr", "add", f"{theirs}/30", "dev", f"{name}b")
        ip("-n", name, "link", "set", f"{name}b", "up")
        ip("-n", name, "link", "set", "lo", "up")
        # No route back to the sandboxes: without address translation no answer arrives.
        server = subprocess.Popen(["ip", "netns", "exec", name, sys.executable, "-c", SERVER, theirs])
        stack.callback(lambda: (server.kill(), server.wait()))
        check = [sys.executable, "-c", f"import socket; socket.create_connection(('{theirs}', 8099), 1)"]
        eventually(
            lambda: subprocess.run(check, capture_output=True).returncode == 0, "the server elsewhere answers"
        )
        yield Elsewhere(theirs, ours, name, f"{name}a")


class _Hello(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"the machine itself")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def on_the_machine() -> Iterator[int]:
    """The port of a server on every address of this machine."""
    server = ThreadingHTTPServer(("0.0.0.0", 0), _Hello)
    Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


def machine_addresses() -> list[str]:
    """Every IPv4 address of this machine."""
    lines = subprocess.run(["ip", "-4", "-o", "addr"], capture_output=True, text=True, check=True).stdout
    return [line.split()[3].split("/")[0] for line in lines.splitlines()]


@pytest.fixture(scope="module")
def opened(rest: Rest, images: Images, elsewhere: Elsewhere) -> Iterator[Box]:
    """A sandbox with the network allowed."""
    with rest.sandbox(images.full, block_network=False) as box:
        yield box


# -- blocked


def test_a_blocked_sandbox_has_only_loopback(box: Box) -> None:
    assert box.out("tail -n +3 /proc/net/dev | cut -d: -f1").split() == ["lo"]


def test_the_network_is_blocked_by_default(new_box: NewBox) -> None:
    box = new_box()
    assert box.info()["block_network"] is True
    assert box.out("tail -n +3 /proc/net/dev | cut -d: -f1").split() == ["lo"]


def test_loopback_works_when_blocked(box: Box) -> None:
    program = """
import threading
s = socket.create_server(("127.0.0.1", 0))
threading.Thread(target=lambda: s.accept()[0].sendall(b"hi"), daemon=True).start()
report(socket.create_connection(s.getsockname(), 5).recv(10).decode())
"""
    assert inside(box, program) == "hi"


def test_ipv6_loopback_and_low_ports_work_when_blocked(box: Box) -> None:
    program = """
s = socket.create_server(("127.0.0.1", 80))
t = attempt(lambda: (socket.create_server(("::1", 8080), family=socket.AF_INET6), "OK")[1])
report(t)
"""
    assert inside(box, program) == "OK"


def test_localhost_is_resolved_without_a_network(box: Box) -> None:
    assert inside(box, "report(socket.gethostbyname('localhost'))") == "127.0.0.1"


@pytest.mark.parametrize(
    "host", ["8.8.8.8", "1.1.1.1", "169.254.169.254", "10.0.0.1", "192.168.0.1", "2001:4860:4860::8888"]
)
def test_no_address_is_reached_when_blocked(box: Box, host: str) -> None:
    assert fetch(box, host, 80) in UNREACHED


def test_the_machine_is_not_reached_when_blocked(box: Box, on_the_machine: int, elsewhere: Elsewhere) -> None:
    for address in [*machine_addresses(), elsewhere.address]:
        assert fetch(box, address, on_the_machine) in UNREACHED, address


def test_no_name_is_resolved_when_blocked(box: Box) -> None:
    watch = Stopwatch()
    program = "report(attempt(lambda: socket.gethostbyname('secret.attacker.example')) if 0 else 'x')"
    program = """
try: report(socket.gethostbyname("secret.attacker.example"))
except socket.gaierror: report("unresolved")
"""
    assert inside(box, program) == "unresolved"
    assert watch.seconds < 60


def test_datagrams_leave_nowhere_when_blocked(box: Box) -> None:
    program = "report(attempt(lambda: (socket.socket(2, 2).sendto(b'x', ('8.8.8.8', 53)), 'OK')[1]))"
    assert inside(box, program) in UNREACHED


def test_no_interface_can_be_added_or_moved(box: Box) -> None:
    for command in (
        "ip link add d0 type dummy",
        "ip link set lo down",
        "ip addr add 10.1.1.1/8 dev lo",
        "ip route add default dev lo",
    ):
        assert box.run(command)["exit_code"] != 0, command


# -- allowed


def test_another_host_is_reached_through_translation(opened: Box, elsewhere: Elsewhere) -> None:
    assert fetch(opened, elsewhere.address, 8099) == elsewhere.our_address


def test_several_sandboxes_reach_it_at_once(new_box: NewBox, elsewhere: Elsewhere) -> None:
    boxes = [new_box(block_network=False) for _ in range(3)]
    assert [fetch(b, elsewhere.address, 8099) for b in boxes] == [elsewhere.our_address] * 3


def test_the_machines_own_addresses_are_refused(
    opened: Box, elsewhere: Elsewhere, on_the_machine: int
) -> None:
    for address in machine_addresses():
        if address != "127.0.0.1":
            assert fetch(opened, address, on_the_machine) in UNREACHED, address


def test_the_gateway_is_refused(opened: Box, on_the_machine: int) -> None:
    program = "report([l.split()[2] for l in open('/proc/net/route').read().splitlines()[1:] if l.split()[1] == '00000000'])"
    (gateway,) = inside(opened, program)
    address = ".".join(str(int(gateway[i : i + 2], 16)) for i in (6, 4, 2, 0))
    assert fetch(opened, address, on_the_machine) in UNREACHED


def test_the_service_is_refused(opened: Box, rest: Rest, elsewhere: Elsewhere) -> None:
    port = int(rest.base_url.rsplit(":", 1)[1])
    for address in machine_addresses():
        assert fetch(opened, address, port) in UNREACHED


@pytest.mark.parametrize("host", ["169.254.169.254", "169.254.170.2", "169.254.1.1"])
def test_metadata_addresses_are_refused(opened: Box, elsewhere: Elsewhere, host: str) -> None:
    """The address is given to a server on this machine, so that only a rule can keep it from being reached."""
    subprocess.run(["ip", "addr", "add", f"{host}/32", "dev", elsewhere.device], check=True)
    try:
        assert fetch(opened, host, 80) in UNREACHED
    finally:
        subprocess.run(["ip", "addr", "del", f"{host}/32", "dev", elsewhere.device], check=True)


def test_a_metadata_address_elsewhere_is_refused(opened: Box, elsewhere: Elsewhere) -> None:
    """Routed to the other host, which listens on it: the connection is still refused on its way out."""
    name = elsewhere.namespace
    subprocess.run(["ip", "-n", name, "addr", "add", "169.254.169.254/32", "dev", "lo"], check=True)
    subprocess.run(["ip", "route", "add", "169.254.169.254/32", "via", elsewhere.address], check=True)
    server = subprocess.Popen(["ip", "netns", "exec", name, sys.executable, "-c", SERVER, "169.254.169.254"])
    try:
        check = [
            sys.executable,
            "-c",
            "import socket; socket.create_connection(('169.254.169.254', 8099), 1)",
        ]
        eventually(
            lambda: subprocess.run(check, capture_output=True).returncode == 0,
            "the machine itself reaches it",
        )
        assert fetch(opened, "169.254.169.254", 8099) in UNREACHED
    finally:
        server.kill()
        server.wait()
        subprocess.run(["ip", "route", "del", "169.254.169.254/32"], check=True)


def test_a_sibling_is_refused(new_box: NewBox) -> None:
    one, other = new_box(block_network=False), new_box(block_network=False)
    one.start("python3 -m http.server 8123 --bind 0.0.0.0", background=True)
    eventually(lambda: fetch(one, "127.0.0.1", 8123) not in UNREACHED, "the sibling's server listens")
    address = inside(
        one,
        """
import fcntl
s = socket.socket(2, 2)
report(socket.inet_ntoa(fcntl.ioctl(s, 0x8915, struct.pack("256s", b"eth0"))[20:24]))
""",
    )
    assert fetch(one, address, 8123) not in UNREACHED, "it reaches itself by that address"
    assert fetch(other, address, 8123) in UNREACHED
    program = f"report(attempt(lambda: (socket.socket(2, 2).sendto(b'x', ({address!r}, 53)), 'OK')[1]))"
    inside(other, program)


def test_a_sandbox_cannot_take_another_address(opened: Box, elsewhere: Elsewhere) -> None:
    for command in ("ip addr add 203.0.113.9/32 dev eth0", "ip link set eth0 address 02:00:00:00:00:09",
                    "ip link set eth0 promisc on"):  # fmt: skip
        assert opened.run(command)["exit_code"] != 0, command


def test_ipv6_is_no_way_around(opened: Box) -> None:
    program = "report([l.split()[5] for l in open('/proc/net/if_inet6')])"
    assert set(inside(opened, program)) <= {"lo"}


def test_nothing_from_outside_reaches_in(opened: Box, elsewhere: Elsewhere) -> None:
    """The other host does not reach the sandbox's address, even with a route to it."""
    opened.start("python3 -m http.server 8124 --bind 0.0.0.0", background=True)
    eventually(lambda: fetch(opened, "127.0.0.1", 8124) not in UNREACHED, "it listens")
    address = inside(
        opened,
        """
import fcntl
report(socket.inet_ntoa(fcntl.ioctl(socket.socket(2, 2), 0x8915, struct.pack("256s", b"eth0"))[20:24]))
""",
    )
    name = elsewhere.namespace
    subprocess.run(["ip", "-n", name, "route", "add", "default", "via", elsewhere.our_address], check=True)
    try:
        code = f"import socket; socket.create_connection(('{address}', 8124), 2)"
        done = subprocess.run(["ip", "netns", "exec", name, sys.executable, "-c", code], capture_output=True)
        assert done.returncode != 0
    finally:
        subprocess.run(["ip", "-n", name, "route", "del", "default"], check=True)


def test_deletion_removes_the_network_device(rest: Rest, images: Images) -> None:
    before = network_devices()
    with rest.sandbox(images.full, block_network=False):
        pass
    with rest.sandbox(images.full):
        blocked = network_devices()
    eventually(lambda: not {d for d in network_devices() - before if d.startswith("v")}, "no device is left")
    assert not {d for d in blocked - before if d.startswith("v")}, "a blocked sandbox has none on the machine"


def test_the_gateway_is_the_same_while_others_come_and_go(opened: Box, new_box: NewBox) -> None:
    before = network_devices()
    others = [new_box(block_network=False)]
    (device,) = network_devices() - before
    address = Path(f"/sys/class/net/{device}/master/address")
    seen = {address.read_text()}
    for _ in range(6):
        others.append(new_box(block_network=False))
        seen.add(address.read_text())
    for other in others[1:]:
        other.rest.delete(other.path)
        seen.add(address.read_text())
    assert len(seen) == 1


def test_the_files_that_name_resolution_needs_are_there(opened: Box) -> None:
    assert "localhost" in opened.read("/etc/hosts").decode()
    assert opened.read("/etc/resolv.conf") is not None
