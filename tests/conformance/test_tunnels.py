"""Tunnels: a sandbox without network reaches the targets that its operator allows, and nothing else."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.conformance.conftest import end_and_check
from tests.conformance.runtimes import Images, RuntimeCase
from tests.support.inside import PRELUDE, inside
from tests.support.keys import Tenant, write_keys_file
from tests.support.machine import resident_bytes
from tests.support.rest import Answer, Box, Rest
from tests.support.sdk import open_sdk
from tests.support.service import Service
from tests.support.targets import PATTERN, Targets
from tests.support.waiting import Stopwatch, eventually

Start = Callable[..., Service]
SOME = Tenant("some", tunnel_targets=["http"])
LARGE_BYTES = 64 << 20
#: Far less than what goes through, far more than what windows and buffers hold.
GROWTH_BYTES = 24 << 20

#: `connect(port)` and helpers for programs inside.
CLIENT = r"""
import hashlib, http.client, threading
def connect(port, host="127.0.0.1", patience=90):
    s = socket.create_connection((host, port), patience); s.settimeout(patience); return s
def whole(s):
    data = b""
    while piece := s.recv(65536): data += piece
    return data
def get(port, path="/x", host="127.0.0.1"):
    c = http.client.HTTPConnection(host, port, timeout=90)
    c.request("GET", path); body = c.getresponse().read().decode(); c.close(); return body
"""

FIRST_BYTE = "report(attempt(lambda: (connect(int(sys.argv[1])).recv(1), 'OK')[1]))"


def program(box: Box, code: str, *argv: object, **fields: Any) -> Any:
    return inside(box, CLIENT + code, *map(str, argv), **fields)


def background(box: Box, code: str, *argv: object) -> str:
    """The job id of such a program; `begun()` in it makes `until_begun` return."""
    begun = "def begun(): open('/tmp/begun-' + sys.argv[1], 'w').close()\n"
    words = ["python3", "-I", "-c", PRELUDE + CLIENT + begun + code, *map(str, argv)]
    return box.start(words, concurrent=True)


def until_begun(box: Box, name: object) -> None:
    box.until(f"test -e /tmp/begun-{name}")


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Targets]:
    with Targets(tmp_path_factory.mktemp("targets")) as running:
        yield running


@pytest.fixture(scope="module")
def tunnelling(
    runtime: RuntimeCase, targets: Targets, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    """A service that allows the targets; to one key, one of them."""
    folder = tmp_path_factory.mktemp("tunnels")
    keys = write_keys_file(folder / "keys.json", [SOME])
    server = Service(
        folder / "state",
        arguments=(*runtime.serve_arguments, *targets.arguments, "--keys-file", str(keys)),
        environment={"SSL_CERT_FILE": str(targets.authority), "ORCHARD_TUNNEL_CONNECT_TIMEOUT_S": "1"},
    ).start()
    yield server
    end_and_check(server, runtime)


@pytest.fixture(scope="module")
def pictures(runtime: RuntimeCase, tunnelling: Service, tmp_path_factory: pytest.TempPathFactory) -> Images:
    return runtime.images(tmp_path_factory.mktemp("images"), tunnelling.state_dir)


@pytest.fixture(scope="module")
def tunnelled(tunnelling: Service, targets: Targets) -> Iterator[Box]:
    """A sandbox with a tunnel to each target, by `port_of`."""
    wanted = [{"target": name, "listen_port": port_of(targets, name)} for name in targets.urls]
    with tunnelling.rest.sandbox("host", tunnels=wanted) as box:
        yield box


def port_of(targets: Targets, name: str) -> int:
    return 8100 + list(targets.urls).index(name)


def post(box: Box, target: str, **fields: object) -> Answer:
    return box.rest.post(f"{box.path}/tunnels", {"target": target, **fields})


def tunnel(box: Box, port: int) -> dict[str, Any]:
    listing = box.rest.get(f"{box.path}/tunnels").expect(200)["tunnels"]
    return next(each for each in listing if each["listen_port"] == port)


# -- what goes through


def test_http_on_a_kept_connection(tunnelled: Box, targets: Targets) -> None:
    before = targets.http_connections
    code = """
c = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=30)
bodies = []
for number in range(300):
    c.request("GET", f"/{number}"); bodies.append(c.getresponse().read().decode())
report(bodies)
"""
    assert program(tunnelled, code, port_of(targets, "http")) == [f"/{number}" for number in range(300)]
    assert targets.http_connections == before + 1


def test_http_with_a_connection_for_each_request(tunnelled: Box, targets: Targets) -> None:
    before = targets.http_connections
    code = "report([get(int(sys.argv[1]), f'/{number}') for number in range(200)])"
    assert program(tunnelled, code, port_of(targets, "http")) == [f"/{number}" for number in range(200)]
    assert targets.http_connections == before + 200
    eventually(
        lambda: tunnel(tunnelled, port_of(targets, "http"))["open_connections"] == 0, "all of them are closed"
    )


def test_server_sent_events_arrive_one_by_one(tunnelled: Box, targets: Targets) -> None:
    """The second is sent after the first has been seen: were they gathered, neither would come."""
    code = """
port = int(sys.argv[1])
c = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
c.request("GET", "/events"); response = c.getresponse()
first = response.readline().decode()
get(port, "/release")
report([first, response.read().decode()])
"""
    assert program(tunnelled, code, port_of(targets, "http")) == ["data: first\n", "\ndata: second\n\n"]


def test_a_websocket_carries_messages_both_ways(tunnelled: Box, targets: Targets) -> None:
    code = r"""
s = connect(int(sys.argv[1])); f = s.makefile("rb")
s.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
          b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n")
status = f.readline().split()[1].decode()
while f.readline().strip(): pass
answers = []
for text in (b"one", b"two"):
    s.sendall(bytes([0x81, 0x80 | len(text), 0, 0, 0, 0]) + text)
    answers.append(f.read(2 + len(text))[2:].decode())
report([status, *answers])
"""
    assert program(tunnelled, code, port_of(targets, "ws")) == ["101", "one", "two"]


def test_large_streams_arrive_intact_in_bounded_memory(
    tunnelled: Box, tunnelling: Service, targets: Targets
) -> None:
    before = resident_bytes(tunnelling.pid)
    code = """
up, down = connect(int(sys.argv[1])), connect(int(sys.argv[2]))
size, block = int(sys.argv[3]), bytes(range(256)) * 256
def send():
    for _ in range(size // len(block)): up.sendall(block)
    up.shutdown(socket.SHUT_WR)
thread = threading.Thread(target=send); thread.start()
tail, seen = b"", 0
while piece := up.recv(1 << 18):
    seen += len(piece); tail = (tail + piece)[-100:]
thread.join()
down.sendall(b"%d\\n" % size)
digest = hashlib.sha256()
while piece := down.recv(1 << 18): digest.update(piece)
report([tail.rpartition(b"\\n")[2].decode(), seen > size, digest.hexdigest()])
"""
    expected = hashlib.sha256(PATTERN * (LARGE_BYTES // len(PATTERN))).hexdigest()
    ports = port_of(targets, "echo"), port_of(targets, "source")
    answer = program(tunnelled, code, *ports, LARGE_BYTES, timeout_seconds=120)
    assert answer == [f"{LARGE_BYTES} {expected}", True, expected]
    assert resident_bytes(tunnelling.pid) - before < GROWTH_BYTES
    told = tunnel(tunnelled, ports[1])
    assert told["received_bytes"] >= LARGE_BYTES


def test_a_client_that_has_ended_its_input_still_gets_the_answer(tunnelled: Box, targets: Targets) -> None:
    code = """
s = connect(int(sys.argv[1])); s.sendall(b"hello"); s.shutdown(socket.SHUT_WR)
report(whole(s).decode())
"""
    answer = f"hello\n5 {hashlib.sha256(b'hello').hexdigest()}"
    assert program(tunnelled, code, port_of(targets, "echo")) == answer


def test_a_target_that_has_ended_its_output_still_gets_input(tunnelled: Box, targets: Targets) -> None:
    code = """
s = connect(int(sys.argv[1])); s.sendall(b"3\\n")
got = whole(s); s.sendall(b"more"); s.close()
report(len(got))
"""
    targets.afterwards = type(targets.afterwards)()
    assert program(tunnelled, code, port_of(targets, "source")) == 3
    assert targets.afterwards.result(30) == b"more"


def test_a_reader_that_does_not_read_stalls_nobody_else(
    tunnelled: Box, tunnelling: Service, targets: Targets
) -> None:
    before = resident_bytes(tunnelling.pid)
    code = """
slow = [connect(int(sys.argv[1])) for _ in range(8)]
for s in slow: s.sendall(b"1000000000\\n")
time.sleep(600)
"""
    ports = port_of(targets, "source"), port_of(targets, "http")
    job_id = background(tunnelled, code, ports[0])
    eventually(lambda: tunnel(tunnelled, ports[0])["open_connections"] == 8, "they are there")

    def still() -> bool:
        return len({tunnel(tunnelled, ports[0])["received_bytes"] for _ in range(40)}) == 1

    eventually(still, "nothing moves any more")
    assert tunnelled.alive()
    assert program(tunnelled, "report(get(int(sys.argv[1])))", ports[1], concurrent=True) == "/x"
    assert resident_bytes(tunnelling.pid) - before < GROWTH_BYTES
    tunnelled.rest.delete(f"/jobs/{job_id}").expect(200)
    eventually(lambda: tunnel(tunnelled, ports[0])["open_connections"] == 0, "what is killed is closed")


def test_many_connections_at_once(tunnelled: Box, targets: Targets) -> None:
    code = """
sockets = [connect(int(sys.argv[1])) for _ in range(200)]
for number, s in enumerate(sockets): s.sendall(b"%05d" % number)
report([int(s.recv(5, socket.MSG_WAITALL)) for s in sockets])
"""
    assert program(tunnelled, code, port_of(targets, "echo")) == list(range(200))


def test_more_connections_than_there_may_be_are_reset_and_told(tunnelled: Box, targets: Targets) -> None:
    code = """
held, refused = [], 0
for _ in range(540):
    try:
        s = connect(int(sys.argv[1])); s.sendall(b"x"); s.recv(1)
        held.append(s)
    except OSError: refused += 1
report([len(held), refused])
"""
    port = port_of(targets, "echo")
    held, refused = program(tunnelled, code, port)
    assert held + refused == 540
    assert refused > 0
    assert "512" in tunnel(tunnelled, port)["last_error"]
    eventually(lambda: tunnel(tunnelled, port)["open_connections"] == 0, "all of them are closed")
    assert program(tunnelled, "report(get(int(sys.argv[1])))", port_of(targets, "http")) == "/x"


# -- targets of all kinds


def test_tls_is_spoken_and_verified_by_the_service(tunnelled: Box, targets: Targets) -> None:
    port = port_of(targets, "tls")
    assert program(tunnelled, "report(get(int(sys.argv[1]), '/secret'))", port) == "/secret"
    assert tunnel(tunnelled, port)["url"] == f"http://127.0.0.1:{port}"


def test_tls_streams_arrive_intact_at_a_reader_that_comes_late(tunnelled: Box, targets: Targets) -> None:
    """Meanwhile all windows fill: nothing may be read from the target then, nor be lost."""
    code = """
s = connect(int(sys.argv[1])); s.sendall(sys.argv[2].encode() + b"\\n")
time.sleep(0.5)
digest = hashlib.sha256()
while piece := s.recv(1 << 18): digest.update(piece)
report(digest.hexdigest())
"""
    expected = hashlib.sha256(PATTERN * (LARGE_BYTES // len(PATTERN))).hexdigest()
    assert program(tunnelled, code, port_of(targets, "tls-source"), LARGE_BYTES) == expected


def test_a_certificate_of_an_unknown_authority_is_refused(tunnelled: Box, targets: Targets) -> None:
    port = port_of(targets, "stranger")
    assert program(tunnelled, FIRST_BYTE, port) == "ECONNRESET"
    assert "CERTIFICATE_VERIFY_FAILED" in tunnel(tunnelled, port)["last_error"]


def test_a_unix_socket_as_target(tunnelled: Box, targets: Targets) -> None:
    code = "s = connect(int(sys.argv[1])); s.sendall(b'ping'); report(s.recv(4, socket.MSG_WAITALL).decode())"
    assert program(tunnelled, code, port_of(targets, "unix")) == "ping"


def test_a_target_that_is_down_resets_the_connection_and_says_why(tunnelled: Box, targets: Targets) -> None:
    port = port_of(targets, "dead")
    assert program(tunnelled, FIRST_BYTE, port) == "ECONNRESET"
    told = tunnel(tunnelled, port)
    assert "refused" in told["last_error"]
    assert told["failed_connections"] >= 1
    lines = [line["message"] for line in tunnelled.rest.get(f"{tunnelled.path}/logs").expect(200)["lines"]]
    assert any(f"tunnel on port {port} to dead" in line for line in lines)


def test_a_target_that_does_not_answer_is_given_up(tunnelled: Box, targets: Targets) -> None:
    port = port_of(targets, "mute")
    watch = Stopwatch()
    assert program(tunnelled, FIRST_BYTE, port) == "ECONNRESET"
    assert watch.seconds < 20, "the time-out is one second"
    assert "within 1 s" in tunnel(tunnelled, port)["last_error"]


# -- where it listens


def test_the_network_is_blocked_otherwise(tunnelled: Box, targets: Targets) -> None:
    assert tunnelled.out("tail -n +3 /proc/net/dev | cut -d: -f1").split() == ["lo"]
    direct = int(targets.urls["http"].rpartition(":")[2])
    code = "report(attempt(lambda: (connect(int(sys.argv[1])), 'OK')[1]))"
    assert program(tunnelled, code, direct) == "ECONNREFUSED"


def test_ipv6_loopback_and_localhost_lead_there_too(tunnelled: Box, targets: Targets) -> None:
    code = "report([get(int(sys.argv[1]), host=host) for host in ('::1', 'localhost')])"
    assert program(tunnelled, code, port_of(targets, "http")) == ["/x", "/x"]


def test_only_the_loopback_is_listened_on(tunnelling: Service) -> None:
    with tunnelling.rest.sandbox(
        "host", block_network=False, tunnels=[{"target": "http", "listen_port": 8080}]
    ) as box:
        code = """
import fcntl
address = socket.inet_ntoa(fcntl.ioctl(socket.socket(2, 2), 0x8915, struct.pack("256s", b"eth0"))[20:24])
report([get(8080), attempt(lambda: (connect(8080, address), "OK")[1])])
"""
        assert program(box, code) == ["/x", "ECONNREFUSED"]


def test_busybox_alone_is_enough(tunnelling: Service, pictures: Images) -> None:
    with tunnelling.rest.sandbox(pictures.busybox, tunnels=[{"target": "http", "listen_port": 80}]) as box:
        assert box.out("wget -q -O - http://127.0.0.1/small") == "/small"


def test_an_image_without_a_shell_has_tunnels_too(tunnelling: Service, pictures: Images) -> None:
    with tunnelling.rest.sandbox(pictures.shell_less, tunnels=[{"target": "http"}]) as box:
        port = box.rest.get(f"{box.path}/tunnels").expect(200)["tunnels"][0]["listen_port"]
        assert f":{port:04X} 00000000:0000 0A" in box.out(["/bin/cat", "/proc/net/tcp"])


# -- opening and closing


def test_without_a_port_the_agent_picks_one(tunnelled: Box) -> None:
    opened = post(tunnelled, "http").expect(200)
    assert opened["url"] == f"http://127.0.0.1:{opened['listen_port']}"
    assert program(tunnelled, "report(get(int(sys.argv[1])))", opened["listen_port"]) == "/x"
    tunnelled.rest.delete(f"{tunnelled.path}/tunnels/{opened['listen_port']}").expect(200)


def test_the_same_tunnel_twice_is_one(tunnelled: Box) -> None:
    assert post(tunnelled, "http", listen_port=8300).expect(200)["total_connections"] == 0
    program(tunnelled, "report(get(8300))")
    assert post(tunnelled, "http", listen_port=8300).expect(200)["total_connections"] == 1


def test_an_unknown_target_is_refused_with_those_that_are_allowed(
    tunnelled: Box, tunnelling: Service, targets: Targets
) -> None:
    in_creation = tunnelling.rest.post("/sandboxes", {"image": "host", "tunnels": [{"target": "other"}]})
    for answer in (post(tunnelled, "other"), in_creation):
        assert (answer.status, answer.code) == (400, "target_not_allowed")
        assert all(name in answer.json["detail"] for name in targets.urls)


@pytest.mark.parametrize("target", ["http://10.0.0.1:80", "echo=tcp://h:1", "", "x" * 64, 5, None])
def test_nothing_but_a_name_is_a_target(tunnelled: Box, target: object) -> None:
    assert tunnelled.rest.post(f"{tunnelled.path}/tunnels", {"target": target}).status == 422


@pytest.mark.parametrize("port", [-1, 65536, "80", 1.5, True])
def test_what_is_no_port_is_refused(tunnelled: Box, port: object) -> None:
    assert post(tunnelled, "http", listen_port=port).status == 422


def test_a_port_in_use_inside_is_refused(tunnelled: Box) -> None:
    code = "s = socket.create_server(('127.0.0.1', 8400)); begun(); time.sleep(600)"
    job_id = background(tunnelled, code, 8400)
    until_begun(tunnelled, 8400)
    answer = post(tunnelled, "http", listen_port=8400)
    assert (answer.status, answer.code) == (409, "port_in_use")
    assert "8400" in answer.json["detail"]
    tunnelled.rest.delete(f"/jobs/{job_id}").expect(200)


def test_the_port_of_another_tunnel_is_refused(tunnelled: Box, targets: Targets) -> None:
    answer = post(tunnelled, "echo", listen_port=port_of(targets, "http"))
    assert (answer.status, answer.code) == (409, "port_in_use")


def test_a_port_named_twice_in_a_creation_is_refused(tunnelling: Service) -> None:
    twice = [{"target": name, "listen_port": 8080} for name in ("http", "echo")]
    answer = tunnelling.rest.post("/sandboxes", {"image": "host", "tunnels": twice})
    assert answer.status == 422
    assert "8080" in answer.json["detail"]


def test_more_tunnels_than_there_may_be_are_refused(tunnelling: Service) -> None:
    with tunnelling.rest.sandbox("host", tunnels=[{"target": "http"}] * 32) as box:
        assert post(box, "http").status == 422
        listing = box.rest.get(f"{box.path}/tunnels").expect(200)["tunnels"]
        assert len({each["listen_port"] for each in listing}) == 32


def test_a_repeated_creation_with_other_tunnels_is_another_one(tunnelling: Service) -> None:
    body = {"image": "host", "idempotency_key": "k", "tunnels": [{"target": "http", "listen_port": 8080}]}
    made = tunnelling.rest.post("/sandboxes", body).expect(200)["sandbox_id"]
    assert tunnelling.rest.post("/sandboxes", body).expect(200)["sandbox_id"] == made
    assert tunnelling.rest.post("/sandboxes", {**body, "tunnels": [{"target": "echo"}]}).code == "conflict"
    Box(tunnelling.rest, made).delete()


def test_closing_in_mid_stream_breaks_it_and_frees_the_port(tunnelled: Box) -> None:
    post(tunnelled, "source", listen_port=8500).expect(200)
    code = """
s = connect(8500); s.sendall(b"1000000000\\n"); seen = 0
s.recv(1); begun()
try:
    while piece := s.recv(65536): seen += len(piece)
    report("END")
except OSError as error: report(errno.errorcode[error.errno])
"""
    job_id = background(tunnelled, code, 8500)
    until_begun(tunnelled, 8500)
    for _ in range(2):
        tunnelled.rest.delete(f"{tunnelled.path}/tunnels/8500").expect(200)
    assert "ECONNRESET" in tunnelled.rest.wait_job(job_id)["stdout"]
    code = """
refused = attempt(lambda: (connect(8500), "OK")[1])
report([refused, attempt(lambda: (socket.create_server(("127.0.0.1", 8500)), "FREE")[1])])
"""
    assert program(tunnelled, code) == ["ECONNREFUSED", "FREE"]


def test_tunnels_of_others_are_not_to_be_seen(tunnelled: Box) -> None:
    assert tunnelled.rest.with_key("wrong").get(f"{tunnelled.path}/tunnels").status == 401
    assert tunnelled.rest.get("/sandboxes/no-such/tunnels").status == 404


def test_a_key_may_be_kept_to_some_targets(tunnelling: Service) -> None:
    rest = tunnelling.rest.with_key(SOME.key)
    answer = rest.post("/sandboxes", {"image": "host", "tunnels": [{"target": "echo"}]})
    assert (answer.code, answer.json["detail"].partition("use one of: ")[2]) == ("target_not_allowed", "http")
    box = rest.create("host", tunnels=[{"target": "http", "listen_port": 8001}])
    assert program(box, "report(get(8001))") == "/x"
    assert post(box, "echo").code == "target_not_allowed"
    assert post(Box(tunnelling.rest, box.id), "echo").status == 200, "an admin's key is not"
    box.delete()


def test_metrics_count_by_target(tunnelled: Box, tunnelling: Service, targets: Targets) -> None:
    program(tunnelled, "report(get(int(sys.argv[1])))", port_of(targets, "http"))
    text = tunnelling.rest.raw("GET", "/metrics").body.decode()
    values = {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if line[0] != "#"
    }
    assert values['orchard_tunnel_connections_total{target="http"}'] >= 1
    assert values['orchard_tunnel_bytes_total{direction="in",target="http"}'] >= 40
    assert tunnelled.id not in text


def test_several_sandboxes_at_once(tunnelling: Service) -> None:
    rest: Rest = tunnelling.rest
    boxes = [rest.submit("host", tunnels=[{"target": "http", "listen_port": 8080}]) for _ in range(6)]
    for box in boxes:
        box.wait_ready()
    assert [program(box, "report(get(8080, '/' + sys.argv[1]))", box.id) for box in boxes] == [
        f"/{box.id}" for box in boxes
    ]
    for box in boxes:
        box.delete()


@pytest.mark.parametrize("flavour", ["async", "sync"])
async def test_the_sdk_opens_lists_and_closes(flavour: str, tunnelling: Service) -> None:
    async with open_sdk(flavour, tunnelling.base_url, tunnelling.api_key) as client:
        sandbox = await client.create("host", tunnels=[{"target": "http", "listen_port": 8080}])
        box = Box(tunnelling.rest, sandbox.sandbox_id)
        assert program(box, "report(get(8080))") == "/x"
        opened = await sandbox.tunnels.open("echo")
        assert opened.url == f"tcp://127.0.0.1:{opened.listen_port}"
        assert {each.target for each in await sandbox.tunnels.list()} == {"http", "echo"}
        await sandbox.tunnels.close(8080)
        assert [each.listen_port for each in await sandbox.tunnels.list()] == [opened.listen_port]
        await sandbox.delete()


# -- the service goes away


@pytest.mark.parametrize("end", [Service.stop, Service.kill], ids=["stopped", "killed"])
def test_tunnels_outlive_their_service(
    own_service: Start, targets: Targets, end: Callable[[Service], Any]
) -> None:
    """What was open is broken at once; what comes meanwhile waits for the next service."""
    service = own_service(*targets.arguments)
    wanted = [
        {"target": name, "listen_port": port}
        for name, port in (("echo", 8001), ("http", 8002), ("dead", 8003))
    ]
    box = service.rest.create("host", tunnels=wanted)
    box.rest.delete(f"{box.path}/tunnels/8003").expect(200)
    code = """
s = connect(8001); s.sendall(b"x"); s.recv(1)
begun()
def broken():
    try: return s.recv(1).decode() or "END"
    except OSError as error: return errno.errorcode[error.errno]
report([broken(), get(8002, "/meanwhile"), attempt(lambda: (connect(8003), "OK")[1])])
"""
    job_id = background(box, code, 8001)
    until_begun(box, 8001)
    end(service)
    service.start()
    job = service.rest.wait_job(job_id)
    assert '["ECONNRESET", "/meanwhile", "ECONNREFUSED"]' in job["stdout"], job
    assert post(Box(service.rest, box.id), "echo", listen_port=8004).status == 200


def test_a_target_that_is_no_longer_allowed_stays_listed_and_leads_nowhere(
    own_service: Start, targets: Targets
) -> None:
    service = own_service("--tunnel-target", f"gone={targets.urls['http']}")
    box = service.rest.create("host", tunnels=[{"target": "gone", "listen_port": 8001}])
    assert program(box, "report(get(8001))") == "/x"
    service.stop()
    del service.arguments[-2:]
    service.start()
    box = Box(service.rest, box.id)
    assert "not allowed" in tunnel(box, 8001)["last_error"]
    assert program(box, "report(attempt(lambda: (connect(8001).recv(1), 'OK')[1]))") == "ECONNRESET"
