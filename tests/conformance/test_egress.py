"""`allow_egress`: what a sandbox with a list reaches, and everything that it does not."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from tests.conformance.conftest import NewBox
from tests.support.egress import UNREACHED, address_of, denials, sandbox_pid, talk
from tests.support.inside import inside
from tests.support.outside import DATAGRAMS, ECHO, HTTP, SPEAKS_FIRST, TLS, Outside
from tests.support.rest import Box, Rest
from tests.support.service import Service
from tests.support.waiting import eventually

IMAGE = "host"


@pytest.fixture(scope="module")
def rest(filtering: Service) -> Rest:
    return filtering.rest


@pytest.fixture(scope="module")
def box(rest: Rest) -> Iterator[Box]:
    """Several names, one of them with some ports only."""
    entries = ["allowed.example", "*.allowed.example", "other.example:8000-8999"]
    with rest.sandbox(IMAGE, allow_egress=entries) as made:
        yield made


# -- names


def test_an_allowed_name_is_reached_over_http(box: Box) -> None:
    assert talk(box, "request('allowed.example')").endswith("you asked allowed.example")


def test_an_allowed_name_is_reached_over_tls_end_to_end(box: Box, out: Outside) -> None:
    answer = talk(box, f"secure('allowed.example', 'allowed.example', {out.certificate!r})")
    assert answer.endswith("you asked allowed.example")


def test_names_below_are_reached(box: Box) -> None:
    assert talk(box, "request('sub.allowed.example')").endswith("you asked sub.allowed.example")


def test_another_name_is_not_resolved_and_asked_of_nobody(box: Box, out: Outside) -> None:
    assert talk(box, "request('secret.attacker.test')") == "UNRESOLVED"
    assert "secret.attacker.test" not in out.looked_up()


def test_other_record_types_are_refused(box: Box) -> None:
    program = r"""
import random
def ask(name, kind, server):
    question = b"".join(bytes([len(p)]) + p for p in name.encode().split(b".")) + b"\0"
    s = socket.socket(2, 2); s.settimeout(10); s.connect((server, 53))
    s.send(struct.pack(">6H", 77, 0x100, 1, 0, 0, 0) + question + struct.pack(">2H", kind, 1))
    reply = s.recv(4096)
    return [reply[3] & 15, struct.unpack(">H", reply[6:8])[0]]
server = open("/etc/resolv.conf").read().split()[1]
report({kind: ask("allowed.example", kind, server) for kind in (1, 16, 28, 10, 15)})
"""
    # code and number of answers: A is answered, AAAA is empty, TXT, NULL and MX are refused
    assert inside(box, program) == {"1": [0, 1], "28": [0, 0], "16": [5, 0], "10": [5, 0], "15": [5, 0]}


def test_another_name_server_is_not_reached(box: Box, out: Outside) -> None:
    program = f"""
s = socket.socket(2, 2); s.settimeout(10); s.connect(({out.address!r}, 53))
s.send(bytes.fromhex("004d01000001000000000000") + b"\\6leaked\\7example\\0\\0\\1\\0\\1")
report(attempt(lambda: s.recv(4096).hex()))
"""
    assert inside(box, program) in UNREACHED
    assert "leaked.example" not in out.looked_up()


def test_another_port_of_a_name_is_refused(box: Box) -> None:
    assert talk(box, f"request('other.example', port={HTTP})") in UNREACHED


def test_a_server_that_speaks_first_is_heard(box: Box) -> None:
    assert talk(box, f"talk('allowed.example', {SPEAKS_FIRST}, b'SSH-2.0-me\\r\\n')") == (
        "SSH-2.0-outside\r\nSSH-2.0-me\r\n<12>"
    )


def test_a_half_closed_connection_is_heard_to_its_end(box: Box) -> None:
    assert talk(box, f"talk('allowed.example', {ECHO}, b'\\0' + b'x' * 200000)")[-8:] == "<200001>"


def test_datagrams_to_a_name_are_refused(box: Box) -> None:
    program = f"""
s = socket.socket(2, 2); s.settimeout(10); s.connect(("allowed.example", {DATAGRAMS})); s.send(b"x")
report(attempt(lambda: s.recv(10).decode()))
"""
    assert inside(box, program) in UNREACHED


# -- relaying and spoofing


def test_another_server_name_in_the_handshake_is_refused(box: Box, out: Outside) -> None:
    answer = talk(box, f"secure('allowed.example', 'other.example', {out.certificate!r})")
    assert "UNRECOGNIZED_NAME" in answer
    assert "other.example" not in out.hosts()


def test_a_handshake_without_a_name_is_refused(box: Box, out: Outside) -> None:
    assert "UNRECOGNIZED_NAME" in talk(box, f"secure('allowed.example', None, {out.certificate!r})")


def test_a_handshake_in_small_pieces_is_understood(box: Box, out: Outside) -> None:
    program = f"""
context = ssl.create_default_context(cadata={out.certificate!r})
read, write = ssl.MemoryBIO(), ssl.MemoryBIO()
tls = context.wrap_bio(read, write, server_hostname="other.example")
try: tls.do_handshake()
except ssl.SSLWantReadError: pass
s = socket.create_connection(("allowed.example", {TLS}), 20)
s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
hello = write.read()[5:]
try:
    for i in range(0, len(hello), 40):
        part = hello[i:i + 40]
        s.sendall(b"\\x16\\x03\\x01" + struct.pack(">H", len(part)) + part)
    report(s.recv(100).hex())
except OSError as error: report(errno.errorcode[error.errno])
"""
    assert inside(box, "import ssl" + program) in {"15030100020270", "ECONNRESET", "EPIPE"}
    assert "other.example" not in out.hosts()


@pytest.mark.parametrize(
    "said",
    [
        "GET / HTTP/1.1\r\nHost: other.example\r\n\r\n",
        "GET / HTTP/1.1\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: allowed.example\r\nHost: other.example\r\n\r\n",
        "GET http://other.example/ HTTP/1.1\r\nHost: allowed.example\r\n\r\n",
        "CONNECT other.example:443 HTTP/1.1\r\nHost: allowed.example\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: allowed.example\r\n\r\nGET / HTTP/1.1\r\nHost: other.example\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: allowed.example\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: allowed.example\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n\r\n",
        "\r\n\r\nGET / HTTP/1.1\r\nHost: other.example\r\n\r\n",
        "PROXY TCP4 1.1.1.1 1.1.1.1 1 80\r\nGET / HTTP/1.1\r\nHost: other.example\r\n\r\n",
        "GET / HTTP/1.1\nHost: other.example\n\n",
        "GET /\u00e9 HTTP/1.1\r\nHost: other.example\r\n\r\n",
        "GET /\1 HTTP/1.1\r\nHost: other.example\r\n\r\n",
        "GET /\rHTTP/1.1\r\nHost: other.example\r\n\r\n",
        "\vGET / HTTP/1.1\r\nHost: other.example\r\n\r\n",
        "POST / HTTP/1.0\r\nHost: allowed.example\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ],
    ids=[
        "host", "no-host", "two-hosts", "absolute", "connect", "pipelined", "two-lengths", "http2", "h2c",
        "after-empty-lines", "proxy-protocol", "bare-newlines",
        "no-ascii", "control", "bare-return", "odd-space", "old-chunked",
    ],
)  # fmt: skip
def test_a_request_for_another_host_is_refused(box: Box, out: Outside, said: str) -> None:
    before = len(out.heard())
    answer = talk(box, f"talk('allowed.example', {HTTP}, {said!r}.encode())")
    assert "403 Forbidden" in answer or answer in UNREACHED | {"EPIPE"}
    arrived = [each for each in out.heard()[before:] if each["what"] == "http"]
    assert arrived == []


def test_a_later_request_for_another_host_is_refused(box: Box, out: Outside) -> None:
    program = f"""
s = socket.create_connection(("allowed.example", {HTTP}), 20)
def ask(host):
    s.sendall(f"GET / HTTP/1.1\\r\\nHost: {{host}}\\r\\n\\r\\n".encode())
    return s.recv(65536).decode()
report([ask("allowed.example")[:15], ask("allowed.example")[:15], attempt(lambda: ask("other.example"))])
"""
    first, second, third = inside(box, program)
    assert (first, second) == ("HTTP/1.1 200 OK", "HTTP/1.1 200 OK")
    assert third == "" or third in UNREACHED or "403 Forbidden" in third
    assert "other.example" not in out.hosts()


def test_a_websocket_is_carried_after_its_request(box: Box) -> None:
    said = "GET / HTTP/1.1\r\nHost: allowed.example\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    program = f"""
s = socket.create_connection(("allowed.example", {HTTP}), 20)
s.sendall({said!r}.encode())
head = s.recv(65536).decode()
s.sendall(b"GET / HTTP/1.1\\r\\nHost: other.example\\r\\n\\r\\n")
report([head[:12], s.recv(65536).decode()[:3]])
"""
    assert inside(box, program) == ["HTTP/1.1 101", "GET"]


@pytest.mark.parametrize("address", ["127.0.0.1", "169.254.169.254", "100.100.100.200", "0.0.0.0"])
def test_a_name_that_leads_to_a_forbidden_address_is_refused(listed: NewBox, address: str) -> None:
    box = listed("*.example")
    name = f"ip-{address.replace('.', '-')}.example"
    assert talk(box, f"request({name!r})") in UNREACHED
    eventually(lambda: any(address in line for line in denials(box)), "it is told")


def test_a_name_that_leads_to_this_machine_is_refused(listed: NewBox, out: Outside, rest: Rest) -> None:
    box = listed("*.example")
    port = int(rest.base_url.rsplit(":", 1)[1])
    name = f"ip-{out.our_address.replace('.', '-')}.example"
    assert talk(box, f"request({name!r}, port={port})") in UNREACHED
    eventually(lambda: any(out.our_address in line for line in denials(box)), "it is told")


def test_a_name_that_leads_to_a_sibling_is_refused(listed: NewBox) -> None:
    one, other = listed("*.example"), listed("*.example")
    one.start("python3 -m http.server 8123 --bind 0.0.0.0", background=True)
    address = address_of(one)
    name = f"ip-{address.replace('.', '-')}.example"
    assert talk(other, f"request({name!r}, port=8123)") in UNREACHED
    eventually(lambda: any(address in line for line in denials(other)), "it is told")


# -- networks


def test_an_address_with_a_port_is_reached_there_alone(listed: NewBox, out: Outside) -> None:
    box = listed(f"{out.address}/32:{HTTP}")
    assert talk(box, f"request({out.address!r})").endswith(f"you asked {out.address}")
    assert talk(box, f"talk({out.address!r}, {ECHO}, b'x')") in UNREACHED


def test_datagrams_to_a_network_arrive(listed: NewBox, out: Outside) -> None:
    box = listed(f"{out.address}:9000-9999")
    program = f"""
s = socket.socket(2, 2); s.settimeout(10); s.connect(({out.address!r}, {DATAGRAMS})); s.send(b"echoed")
report(attempt(lambda: s.recv(10).decode()))
"""
    assert inside(box, program) == "echoed"


def test_an_empty_list_is_nothing(listed: NewBox, out: Outside) -> None:
    box = listed()
    assert talk(box, f"request({out.address!r})") in UNREACHED
    assert talk(box, "request('allowed.example')") == "UNRESOLVED"


def test_no_network_includes_the_machine_its_siblings_or_metadata(
    listed: NewBox, out: Outside, rest: Rest
) -> None:
    box, sibling = listed("0.0.0.0/0"), listed("0.0.0.0/0")
    assert talk(box, f"request({out.address!r})").endswith(f"you asked {out.address}")
    sibling.start("python3 -m http.server 8124 --bind 0.0.0.0", background=True)
    theirs = address_of(sibling)
    gateway = theirs.rsplit(".", 2)[0]
    port = int(rest.base_url.rsplit(":", 1)[1])
    subprocess.run(["ip", "addr", "add", "169.254.169.254/32", "dev", out.device], check=True)
    try:
        for address, at in (
            (theirs, 8124), (out.our_address, port), (out.our_address, 22), ("169.254.169.254", 80),
            ("100.100.100.200", 80), (f"{gateway}.0.1", port),
        ):  # fmt: skip
            assert talk(box, f"talk({address!r}, {at}, b'x')") in UNREACHED, address
    finally:
        subprocess.run(["ip", "addr", "del", "169.254.169.254/32", "dev", out.device], check=True)


def test_the_address_of_a_sibling_cannot_be_borrowed(listed: NewBox, out: Outside) -> None:
    """Even by root of the machine inside its network namespace, which no sandbox is."""
    poor, rich = listed(), listed(f"{out.address}:{DATAGRAMS}")
    # So that it knows its way out already, and need not ask with the address that it borrows.
    assert talk(poor, "request('allowed.example')") == "UNRESOLVED"
    pid, borrowed = sandbox_pid(poor), address_of(rich)
    inner = ["nsenter", "-t", str(pid), "-n"]
    subprocess.run([*inner, "ip", "addr", "add", f"{borrowed}/32", "dev", "eth0"], check=True)
    program = f"""
import socket
s = socket.socket(2, 2); s.settimeout(2); s.bind(({borrowed!r}, 0)); s.sendto(b"spoofed", ({out.address!r}, {DATAGRAMS}))
try: print(s.recv(10))
except OSError: print("nothing")
"""
    seen = subprocess.Popen(
        ["ip", "netns", "exec", out.namespace, "nft", "-f", "-"], stdin=subprocess.PIPE, text=True
    )
    seen.communicate(
        "table ip t { chain c { type filter hook input priority 0;\n"
        f"udp dport {DATAGRAMS} @th,64,56 0x73706f6f666564 counter\n}}\n}}\n"
    )
    assert seen.returncode == 0
    done = subprocess.run(
        [*inner, "/usr/bin/python3", "-c", program], capture_output=True, text=True, check=True
    )
    count = ["ip", "netns", "exec", out.namespace, "nft", "list", "table", "ip", "t"]
    assert "packets 0 " in subprocess.run(count, capture_output=True, text=True, check=True).stdout
    subprocess.run(["ip", "netns", "exec", out.namespace, "nft", "delete", "table", "ip", "t"], check=True)
    assert done.stdout.strip() == "nothing"
