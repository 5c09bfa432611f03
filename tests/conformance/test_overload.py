"""Too much, too many, too slow: answered at once, and accepted work is never dropped."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.conformance.conftest import NewBox
from tests.conformance.runtimes import Images
from tests.support.machine import Leftovers, network_devices, resident_bytes
from tests.support.rest import Box, Rest, new_id
from tests.support.service import Service
from tests.support.waiting import Stopwatch, eventually

Start = Callable[..., Service]
MIB = 1 << 20


def test_more_jobs_than_the_service_holds_are_refused_at_once_and_the_accepted_all_run(
    own_service: Start, tmp_path: Path
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"max_jobs": 20}))
    box = own_service("--config", str(config)).rest.create("host")
    accepted, refused = [], []
    watch = Stopwatch()
    for _ in range(40):
        answer = box.post_exec("sleep 0.05; echo x >> /tmp/n")
        (accepted if answer.status < 300 else refused).append(answer)
    assert watch.seconds < 30
    assert refused
    assert {(a.status, a.code) for a in refused} == {(503, "overloaded")}
    assert all(float(a.headers["retry-after"]) >= 0 for a in refused)
    for answer in accepted:
        assert box.rest.wait_job(answer.json["job_id"])["status"] == "succeeded"
    assert int(box.out("wc -l < /tmp/n")) == len(accepted)


def test_a_finished_job_is_forgotten_after_its_time(own_service: Start, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"job_retention_s": 1, "ended_retention_s": 1}))
    rest = own_service("--config", str(config)).rest
    box = rest.create("host")
    job_id = box.run("true")["job_id"]
    eventually(
        lambda: rest.get(f"/jobs/{job_id}").code == "job_not_found", "the job is forgotten", 120, every_s=0.2
    )
    box.delete()
    eventually(
        lambda: rest.get(box.path).code == "sandbox_not_found", "the sandbox is forgotten", 120, every_s=0.2
    )


def test_connections_that_send_nothing_or_half_do_not_keep_others_out(rest: Rest) -> None:
    address = urlsplit(rest.base_url)
    assert address.hostname and address.port
    halves = []
    try:
        for number in range(400):
            sock = socket.create_connection((address.hostname, address.port), 10)
            if number % 2:
                sock.sendall(b"POST /sandboxes HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n{")
            halves.append(sock)
        watch = Stopwatch()
        for _ in range(20):
            assert rest.get("/health").status == 200
        assert watch.seconds < 20
    finally:
        for sock in halves:
            sock.close()


def test_a_client_that_does_not_read_does_not_hold_the_service(rest: Rest, box: Box) -> None:
    """Large answers to clients that never read them."""
    box.write("/tmp/large", bytes(20 * MIB))
    address = urlsplit(rest.base_url)
    assert address.hostname and address.port
    stuck = []
    try:
        for _ in range(10):
            sock = socket.create_connection((address.hostname, address.port), 10)
            head = f"GET {box.path}/files?path=/tmp/large HTTP/1.1\r\nHost: x\r\nX-API-Key: {rest.api_key}\r\n\r\n"
            sock.sendall(head.encode())
            stuck.append(sock)
        for _ in range(10):
            assert box.out("echo ok") == "ok\n"
    finally:
        for sock in stuck:
            sock.close()


def test_hundreds_may_wait_at_once(rest: Rest, box: Box) -> None:
    job_id = box.start("sleep 2; echo done", concurrent=True)
    with ThreadPoolExecutor(200) as pool:
        waiting = [pool.submit(rest.wait_job, job_id, 60) for _ in range(200)]
        assert box.out("echo meanwhile", concurrent=True) == "meanwhile\n"
        assert {w.result(120)["stdout"] for w in waiting} == {"done\n"}


@pytest.mark.parametrize("path", ["/files", "/exec", "/apply_patch"])
def test_a_body_larger_than_allowed_is_refused_without_being_held(
    service: Service, box: Box, path: str
) -> None:
    """A gigabyte announced: refused early, whatever is sent, and the service's memory does not follow."""
    before = resident_bytes(service.pid)
    connection = box.rest.connect()
    connection.putrequest("POST", box.path + path)
    for name, value in {
        **box.rest.headers(),
        "Content-Type": "application/json",
        "Content-Length": str(1 << 30),
    }.items():
        connection.putheader(name, value)
    connection.endheaders()
    status = None
    try:
        for _ in range(600):
            connection.send(b"x" * MIB)
    except (BrokenPipeError, ConnectionResetError):
        pass
    try:
        status = connection.getresponse().status
    except (ConnectionError, OSError):
        pass
    finally:
        connection.close()
    assert status in (None, 413)
    assert resident_bytes(service.pid) - before < 450 * MIB
    assert box.alive()


def test_deeply_nested_json_is_refused(box: Box) -> None:
    for body in (b"[" * 100_000, b'{"command": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", b'{"a":' * 50_000):
        answer = box.rest.raw("POST", f"{box.path}/exec", body, {"Content-Type": "application/json"})
        assert answer.status == 422
    assert box.alive()


def test_a_ready_sandbox_runs_its_first_command_at_once(rest: Rest, images: Images) -> None:
    """Ready means ready: no first command fails."""
    label = new_id("ready")
    with ThreadPoolExecutor(8) as pool:

        def first(_: int) -> str:
            return rest.create(images.full, labels={"run": label}).out("echo first")

        assert set(pool.map(first, range(40))) == {"first\n"}
    rest.delete("/sandboxes", label=f"run={label}").expect(200)


def test_networked_sandboxes_of_a_service_killed_while_it_deletes_them_leave_nothing(
    own_service: Start,
) -> None:
    service = own_service()
    before = network_devices()
    label = new_id("net")
    boxes = [service.rest.create("host", block_network=False, labels={"run": label}) for _ in range(12)]
    devices = network_devices() - before
    assert devices
    with ThreadPoolExecutor(1) as pool:
        deleting = pool.submit(service.rest.delete, "/sandboxes", label=f"run={label}")
        eventually(lambda: devices - network_devices() or deleting.done(), "deletion has begun")
        service.kill()
        deleting.exception(60)
    service.start()
    service.rest.delete("/sandboxes", label=f"run={label}").expect(200)
    left = Leftovers(new_id(), service.state_dir / "nothing", {b.id for b in boxes})
    eventually(lambda: not left.control_groups() and not {d for d in devices & network_devices() if not d.startswith("orc")},
               "nothing of them is left", 20)  # fmt: skip


def test_a_command_of_a_killed_client_ends_when_asked_to(service: Service, new_box: NewBox) -> None:
    """on_disconnect=kill and a client program that is killed, not one that hangs up."""
    import subprocess
    import sys

    box = new_box()
    job_id = new_id("job")
    code = (
        "import sys\nfrom orchard.env.client import SandboxClient\n"
        "c = SandboxClient(base_url=sys.argv[1], api_key=sys.argv[2])\n"
        "c.get(sys.argv[3]).exec('sleep 305.5', job_id=sys.argv[4], on_disconnect='kill')\n"
    )
    client = subprocess.Popen(
        [sys.executable, "-c", code, service.base_url, service.api_key or "", box.id, job_id]
    )
    eventually(
        lambda: (a := box.rest.get(f"/jobs/{job_id}")).status == 200 and a.json["status"] == "running",
        "it runs",
        30,
    )
    client.kill()
    client.wait()
    eventually(lambda: box.rest.job(job_id)["status"] == "failed", "its command is ended")
    assert box.run("pgrep -xf 'sleep 305.5'")["exit_code"] == 1
