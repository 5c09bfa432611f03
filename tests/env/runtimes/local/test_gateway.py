"""The parts of the gateway, without a network."""

from __future__ import annotations

import ssl
import subprocess

import dns.message
import dns.rcode
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchard.env.egress import parse_entry
from orchard.env.runtimes.local import firewall
from orchard.env.runtimes.local.gateway.denials import BURST, SEVERAL, Denials, Refusal
from orchard.env.runtimes.local.gateway.dns import answer
from orchard.env.runtimes.local.gateway.inspection import Inspection, Refused
from orchard.env.runtimes.local.gateway.nflog import packets
from orchard.env.runtimes.local.gateway.policies import MAX_FOUND_NAMES, Policy
from orchard.env.runtimes.local.gateway.proxy import FEW_CONNECTIONS, MAX_CONNECTIONS, Proxy
from orchard.env.runtimes.local.gateway.tls import Incomplete, Malformed, server_name
from orchard.env.runtimes.local.gateway.upstream import forbidden

GET = b"GET / HTTP/1.1\r\nHost: a.example\r\n\r\n"
EVIL = b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n"


def hello(name: str | None) -> bytes:
    """The first message of a real TLS client."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    received, sent = ssl.MemoryBIO(), ssl.MemoryBIO()
    try:
        context.wrap_bio(received, sent, server_hostname=name).do_handshake()
    except ssl.SSLWantReadError:
        pass
    return sent.read()


def passed(name: str, said: bytes, piece: int) -> bytes:
    """What goes on when `said` is said in pieces of this size."""
    inspection = Inspection(name)
    parts = [inspection.client_said(said[i : i + piece]) for i in range(0, len(said), piece)]
    return b"".join(parts) + inspection.client_ended()


# -- TLS


def test_the_server_name_of_a_real_client_is_found() -> None:
    assert server_name(hello("a.example")) == "a.example"
    assert server_name(hello(None)) is None


@pytest.mark.parametrize("cut", [0, 1, 4, 5, 6, 100])
def test_a_part_of_a_handshake_is_incomplete(cut: int) -> None:
    with pytest.raises(Incomplete):
        server_name(hello("a.example")[:cut])


def test_a_second_name_is_refused() -> None:
    names = b"\0\0\x09a.example"
    with pytest.raises(Malformed):
        server_name(_hello_with(b"\0\0" + _vector(_vector(names + names))))
    one = b"\0\0" + _vector(_vector(names))
    assert server_name(_hello_with(one)) == "a.example"
    with pytest.raises(Malformed):
        server_name(_hello_with(one + one))


def _vector(data: bytes) -> bytes:
    return len(data).to_bytes(2, "big") + data


def _hello_with(extensions: bytes) -> bytes:
    body = b"\3\3" + bytes(32) + b"\0" + _vector(b"\x13\x01") + b"\1\0" + _vector(extensions)
    message = b"\1" + len(body).to_bytes(3, "big") + body
    return b"\x16\3\1" + _vector(message)


@given(st.binary(max_size=200))
def test_any_bytes_after_the_type_of_a_handshake_are_told_apart(data: bytes) -> None:
    try:
        server_name(b"\x16\x03\x01" + data)
    except (Incomplete, Malformed):
        pass


# -- what is said


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    "said",
    [
        GET, GET * 3, b"\r\n" + GET, b"EHLO me\r\nMAIL FROM:<a@b>\r\n", b"SSH-2.0-me\r\n\0\1\2", b"\0\1\2\3", b'{"a": 1}',
        b"x", b"", b"\xff\xfb\x18\xff", b"GET /\r\n",
        b"POST / HTTP/1.1\r\nHost: A.example.:80\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n" + GET,
        b"POST / HTTP/1.1\r\nHost: a.example\r\nContent-Length: 80\r\n\r\n" + EVIL.ljust(80),
        b"OPTIONS * HTTP/1.1\r\nHost: a.example\r\n\r\n",
        b"GET http://a.example/x HTTP/1.1\r\nHost: a.example\r\n\r\n",
    ],
)  # fmt: skip
def test_what_means_the_name_or_none_goes_on_as_it_is(said: bytes, piece: int) -> None:
    assert passed("a.example", said, piece).lstrip(b"\r\n") == said.lstrip(b"\r\n")


@pytest.mark.parametrize("piece", [1, 5, 1000])
def test_a_handshake_for_the_name_goes_on_as_it_is(piece: int) -> None:
    said = hello("a.example") + b"\x17\3\3 what follows"
    assert passed("a.example", said, piece) == said


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    "said",
    [
        EVIL, GET + EVIL, b"\n\n" + EVIL, EVIL.replace(b"\r\n", b"\r"), EVIL.replace(b"\r\n", b"\n"),
        b"GET  / HTTP/1.1\r\nHost: evil.example\r\n\r\n", b"GET / HTTP/1.1\r\nHost : evil.example\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a.example\r\n Host: evil.example\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: y\r\nHost: a.example@evil.example\r\n\r\n",
        b"GET http://a.example@evil.example/ HTTP/1.1\r\nHost: a.example\r\n\r\n",
        b"PROXY TCP4 1.1.1.1 1.1.1.1 1 2\r\n", b"\r\n\r\n\0\r\nQUIT\n\x21", b"\x80\x2e\x01\x03\x01",
        b"GET / HTTP/1.1\r\nHost: a.example\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n" + EVIL,
        b"POST / HTTP/1.1\r\nHost: a.example\r\nTransfer-Encoding: xchunked\r\n\r\n" + EVIL,
        b"POST / HTTP/1.1\r\nHost: a.example\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n" + EVIL,
    ],
)  # fmt: skip
def test_what_leads_elsewhere_is_refused_in_time(said: bytes, piece: int) -> None:
    """However it is cut, no complete request for another host, and no complete preface, has gone on."""
    inspection, gone = Inspection("a.example"), b""
    with pytest.raises(Refused):
        for i in range(0, len(said), piece):
            gone += inspection.client_said(said[i : i + piece])
        inspection.client_ended()
    assert said.lstrip(b"\r\n").startswith(gone.lstrip(b"\r\n"))
    assert len(gone) < len(said) and not gone.endswith(b"evil.example\r\n\r\n")


@pytest.mark.parametrize("reply", [b"HTTP/1.1 101 Switching", b"HTTP/1.1 200 OK"])
def test_after_an_upgrade_everything_goes_on_if_the_server_agrees(reply: bytes) -> None:
    inspection = Inspection("a.example")
    request = b"GET / HTTP/1.1\r\nHost: a.example\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n"
    assert inspection.client_said(request + b"early") == request
    released = b"".join(inspection.server_said(reply[i : i + 5]) for i in range(0, len(reply), 5))
    if b"101" in reply:
        assert released == b"early"
        assert inspection.client_said(EVIL) == EVIL
    else:
        assert released == b""
        with pytest.raises(Refused):
            inspection.client_said(EVIL)


# -- names


def test_a_name_has_the_same_address_in_every_run() -> None:
    entries = ["a.example", "b.example:80", "*.c.example"]
    first, second = Policy(entries), Policy(entries)
    for name in ("a.example", "b.example", "x.c.example"):
        address = first.address_of(name)
        assert address is not None and address == second.address_of(name)
        assert first.name_of(address) == name
    assert first.address_of("c.example") is None


def test_a_name_off_the_list_loses_its_address() -> None:
    policy = Policy(["a.example", "*.c.example"])
    lost = [policy.address_of(name) for name in ("a.example", "x.c.example")]
    policy.replace(["b.example"])
    assert [policy.name_of(str(address)) for address in lost] == [None, None]
    assert policy.name_of(str(policy.address_of("b.example"))) == "b.example"


def test_names_below_are_bounded_and_those_of_the_list_stay() -> None:
    policy = Policy(["a.example", "*.c.example"])
    kept, oldest = policy.address_of("a.example"), policy.address_of("old.c.example")
    for number in range(MAX_FOUND_NAMES):
        policy.address_of(f"n{number}.c.example")
    assert policy.name_of(str(oldest)) is None
    assert policy.name_of(str(kept)) == "a.example"


def test_a_query_that_is_none_has_no_answer() -> None:
    assert answer(Policy(["a.example"]), b"nonsense") == (None, None)
    reply = dns.message.make_response(dns.message.make_query("a.example", "A"))
    assert answer(Policy(["a.example"]), reply.to_wire()) == (None, None)


def test_the_case_of_a_query_is_kept_and_does_not_matter() -> None:
    query = dns.message.make_query("A.eXample", "A")
    wire, refusal = answer(Policy(["a.example"]), query.to_wire())
    assert refusal is None and wire is not None
    found = dns.message.from_wire(wire)
    assert query.is_response(found)
    assert found.answer[0].name.to_text() == "A.eXample."


@given(st.binary(max_size=100))
def test_any_datagram_is_answered_or_not(data: bytes) -> None:
    answer(Policy(["a.example"]), data)
    answer(None, dns.message.make_query("a.example", "A").to_wire()[:2] + data)


# -- refusals


def test_a_kind_is_told_at_once_and_then_once_a_second() -> None:
    told: list[tuple[str, Refusal, int]] = []
    denials, one = Denials(lambda *each: told.append(each)), Refusal("tcp", "why", port=1)
    for step in range(25):
        denials.refused("10.0.0.1", one, step / 10)
        denials.tick(step / 10)
    assert told == [("10.0.0.1", one, 1), ("10.0.0.1", one, 10), ("10.0.0.1", one, 10)]


def test_a_flood_of_kinds_is_told_in_sums_and_disturbs_no_other() -> None:
    told: list[tuple[str, Refusal, int]] = []
    denials = Denials(lambda *each: told.append(each))
    for port in range(10_000):
        denials.refused("10.0.0.1", Refusal("tcp", "why", port=port), 0.0)
    denials.refused("10.0.0.2", Refusal("tcp", "why"), 0.0)
    denials.tick(0.5)
    assert len([each for each in told if each[0] == "10.0.0.1"]) == BURST + 1
    assert ("10.0.0.1", SEVERAL, 10_000 - BURST) in told
    assert ("10.0.0.2", Refusal("tcp", "why"), 1) in told


@given(st.binary(max_size=300))
def test_any_message_of_the_log_is_read(data: bytes) -> None:
    list(packets(data))


# -- addresses and rules


@pytest.mark.parametrize(
    ("address", "never"),
    [("127.0.0.1", True), ("169.254.169.254", True), ("100.100.100.200", True), ("224.0.0.1", True), ("0.0.0.0", True),
     ("198.18.0.1", True), ("93.184.216.34", False)],
)  # fmt: skip
def test_addresses_that_no_sandbox_may_reach(address: str, never: bool) -> None:
    assert forbidden(address) is never


@pytest.mark.parametrize(
    "entries", [["0.0.0.0/0", "10.0.0.0/8:80", "10.1.0.0/16:70-90", "10.1.2.3"], ["a.example"], []]
)
def test_the_kernel_takes_the_rules_of_any_list(entries: list[str]) -> None:
    """Overlapping networks and ports too. In a network namespace of its own."""
    policy = firewall.Policy(3, "10.192.0.19", "ovtest3", tuple(parse_entry(entry) for entry in entries))
    wire = firewall.Wire("orctest", "orchard_test", firewall.ipaddress.IPv4Network("10.192.0.0/19"))
    gate = firewall.Gate(1, 2, 3, 4)
    script = firewall.ruleset(wire, gate, [policy]) * 2 + firewall.replacement(wire, policy)
    for text in (script, script + firewall.removal(wire, policy) + firewall.admission(wire, policy)):
        done = subprocess.run(["unshare", "-n", "nft", "-f", "-"], input=text, text=True, capture_output=True)
        assert done.returncode == 0, done.stderr


def test_a_few_sandboxes_cannot_take_all_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _which: (400, 400))
    proxy = Proxy({}, None, None)  # type: ignore[arg-type]
    assert proxy._limit() == MAX_CONNECTIONS
    proxy._open = 100
    assert proxy._limit() == FEW_CONNECTIONS
