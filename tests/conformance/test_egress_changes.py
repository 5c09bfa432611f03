"""`allow_egress` over time: lists that change, what is told of refusals, load, and ends of all kinds."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from orchard.env.client import AsyncSandboxClient
from tests.conformance.conftest import NewBox
from tests.support.egress import (
    TALK,
    UNREACHED,
    address_of,
    cut,
    denials,
    gateways,
    packet_rules,
    start_talking,
    talk,
)
from tests.support.inside import inside
from tests.support.machine import kill
from tests.support.outside import BULK, BULK_BYTES, ECHO, HTTP, Outside
from tests.support.rest import Box, Rest
from tests.support.service import Service
from tests.support.waiting import eventually

IMAGE = "host"


@pytest.fixture
def rest(filtering: Service) -> Rest:
    return filtering.rest


# -- change


def test_a_longer_list_holds_at_once(listed: NewBox) -> None:
    box = listed()
    box.rest.patch(box.path, {"allow_egress": ["Allowed.example."]}).expect(200)
    assert box.info()["allow_egress"] == ["allowed.example"]
    assert talk(box, "request('allowed.example')").endswith("you asked allowed.example")


def test_a_shorter_list_cuts_connections_to_names(listed: NewBox) -> None:
    assert "ECONNRESET" in cut(listed("allowed.example"), "allowed.example", ["other.example"])


def test_a_shorter_list_cuts_connections_to_networks(listed: NewBox, out: Outside) -> None:
    assert "ECONNRESET" in cut(listed(out.address), out.address, [f"{out.address}:{HTTP}"])


def test_an_open_sandbox_becomes_one_with_a_list(rest: Rest, out: Outside) -> None:
    with rest.sandbox(IMAGE, block_network=False) as box:
        assert "ECONNRESET" in cut(box, out.address, ["allowed.example"])
        assert talk(box, f"request({out.address!r})") in UNREACHED
        assert talk(box, "request('allowed.example')").endswith("you asked allowed.example")


def test_a_blocked_sandbox_gets_a_list(rest: Rest) -> None:
    with rest.sandbox(IMAGE) as box:
        assert talk(box, "request('allowed.example')") == "UNRESOLVED"
        info = box.rest.patch(box.path, {"allow_egress": ["allowed.example"]}).expect(200)
        assert (info["block_network"], info["allow_egress"]) == (True, ["allowed.example"])
        assert talk(box, "request('allowed.example')").endswith("you asked allowed.example")
        assert talk(box, "request('other.example')") == "UNRESOLVED"


def test_the_first_instruction_is_held_to_the_list_already(rest: Rest, out: Outside) -> None:
    """Commands that wait for their sandboxes: the earliest moment at which user code runs."""
    program = (
        TALK + f"print(request({out.address!r}), request('other.example'), request('allowed.example')[-10:])"
    )
    boxes = [rest.submit(IMAGE, allow_egress=["allowed.example"]) for _ in range(8)]
    try:
        for box in boxes:
            box.wait_ready()
            said = box.python("import errno, socket\n" + program)["stdout"].split()
            assert said[0] in UNREACHED
            assert said[1:] == ["UNRESOLVED", "ed.example"]
    finally:
        for box in boxes:
            box.delete()


# -- other ways to ask


async def test_the_sdk_creates_with_a_list_and_changes_it(filtering: Service) -> None:
    async with (
        AsyncSandboxClient(filtering.base_url, filtering.api_key) as client,
        await client.create(IMAGE, allow_egress=["allowed.example"]) as sandbox,
    ):
        assert sandbox.info.allow_egress == ["allowed.example"]
        info = await sandbox.update(allow_egress=["other.example:80"])
        assert info.allow_egress == ["other.example:80"]


def test_the_command_line_runs_with_a_list(filtering: Service) -> None:
    look_up = "getent ahostsv4 allowed.example >/dev/null && ! getent ahostsv4 other.example"
    command = [sys.executable, "-m", "orchard.cli.main", "run", "--base-url", filtering.base_url, "--api-key"]
    words = [str(filtering.api_key), "--allow-egress", "allowed.example", "--shell", "host", "--", look_up]
    done = subprocess.run([*command, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_list_is_changed_while_the_sandbox_waits_to_start(rest: Rest) -> None:
    boxes = [rest.submit(IMAGE, allow_egress=[]) for _ in range(12)]
    for box in boxes:
        rest.patch(box.path, {"allow_egress": ["allowed.example"]}).expect(200)
    for box in boxes:
        box.wait_ready()
        assert talk(box, "request('allowed.example')").endswith("allowed.example")
        box.delete()


# -- refused requests


@pytest.mark.parametrize(
    "entry",
    ["", "*", "http://example.org", "example.org/path", "a b", "10.0.0.1/8", "300.1.1.1", "1.2.3", "example.org:0",
     "example.org:70000", "example.org:9-8", "example.org:http", "[::1]:80", "2001:db8::/32", "*.*.example", "198.18.0.1",
     "-a.example", "x" * 64 + ".example"],
)  # fmt: skip
def test_nonsense_is_refused_with_the_entry_and_what_is_right(rest: Rest, entry: str) -> None:
    answer = rest.post("/sandboxes", {"image": IMAGE, "allow_egress": ["allowed.example", entry]})
    assert answer.status == 422
    assert repr(entry)[:100] in answer.json["detail"]


def test_too_many_entries_are_refused(rest: Rest) -> None:
    entries = [f"n{i}.example" for i in range(257)]
    assert rest.post("/sandboxes", {"image": IMAGE, "allow_egress": entries}).status == 422


def test_a_list_for_an_open_sandbox_is_a_contradiction(rest: Rest) -> None:
    body = {"image": IMAGE, "allow_egress": ["allowed.example"], "block_network": False}
    answer = rest.post("/sandboxes", body)
    assert answer.status == 422
    assert "allow_egress" in answer.json["detail"]


# -- what is told


def test_refused_attempts_are_told_in_events_and_log(listed: NewBox, out: Outside) -> None:
    box = listed("allowed.example:81")
    connection = box.rest.connect()
    connection.request("GET", "/events", headers=box.rest.headers())
    stream = connection.getresponse()
    assert b"event: open" in (stream.readline(), stream.readline()[:-1])
    talk(box, f"[request({out.address!r}), request('allowed.example'), request('other.example')]")
    found: list[dict[str, Any]] = []

    while len(found) < 3:
        line = stream.readline()
        if line.startswith(b"data: ") and json.loads(line[6:])["type"] == "egress_denied":
            found.append(json.loads(line[6:]))
    connection.close()
    told = {(each["egress"]["protocol"], each["egress"]["name"], each["egress"]["port"]) for each in found}
    assert told == {("tcp", None, HTTP), ("tcp", "allowed.example", HTTP), ("dns", "other.example", None)}
    assert {each["sandbox_id"] for each in found} == {box.id}
    assert any(out.address in line for line in denials(box))


def test_many_refusals_of_one_kind_are_counted(listed: NewBox, out: Outside) -> None:
    box = listed()
    talk(box, f"[request({out.address!r}) for _ in range(50)] and 0")
    eventually(lambda: any("times)" in line for line in denials(box)), "they are gathered")
    assert len(denials(box)) < 10


# -- load


def test_two_hundred_connections_at_once(listed: NewBox) -> None:
    box = listed("allowed.example")
    program = f"""
import threading
done = []
def one(n):
    s = socket.create_connection(("allowed.example", {ECHO}), 30)
    barrier.wait(60)
    s.sendall(b"%d\\n" % n); s.shutdown(1)
    data = b""
    while piece := s.recv(100): data += piece
    done.append(data == b"%d\\n<%d>" % (n, len(str(n)) + 1))
barrier = threading.Barrier(200)
threads = [threading.Thread(target=one, args=(n,)) for n in range(200)]
[t.start() for t in threads]; [t.join(60) for t in threads]
report([len(done), all(done)])
"""
    assert inside(box, program) == [200, True]


def test_a_hundred_megabytes_arrive_whole(listed: NewBox) -> None:
    box = listed("allowed.example")
    program = f"""
import hashlib
s = socket.create_connection(("allowed.example", {BULK}), 30)
h, n = hashlib.md5(), 0
while data := s.recv(1 << 18): h.update(data); n += len(data)
expected = hashlib.md5(bytes(range(256)) * ({BULK_BYTES} // 256)).hexdigest()
report([n, h.hexdigest() == expected])
"""
    assert inside(box, program) == [BULK_BYTES, True]


# -- ends


def test_a_dead_gateway_lets_nothing_through_and_is_replaced(filtering: Service, listed: NewBox) -> None:
    box = listed("allowed.example")
    assert talk(box, "request('allowed.example')").endswith("you asked allowed.example")
    for pid in gateways(filtering):
        kill(pid)
    eventually(
        lambda: talk(box, "request('allowed.example')").endswith("you asked allowed.example"), "it is back"
    )
    assert talk(box, "request('other.example')") == "UNRESOLVED"


def test_a_killed_service_leaves_it_closed_and_the_next_one_works(
    filtering: Service, listed: NewBox, out: Outside
) -> None:
    box = listed("allowed.example", f"{out.address}:{HTTP}")
    changed = filtering.rest.create(IMAGE)
    changed.rest.patch(changed.path, {"allow_egress": ["allowed.example"]}).expect(200)
    watch = f"""
tried = []
while not os.path.exists("/tmp/enough"):
    tried.append([request("other.example", port={HTTP}), talk({out.address!r}, {ECHO}, b"x")])
    open("/tmp/tried", "w").close()
    time.sleep(0.02)
report([len(tried), sorted({{str(t) for t in tried}})])
"""
    job = start_talking(box, watch)
    box.until("test -e /tmp/tried")
    filtering.kill()
    filtering.start()
    again = Box(filtering.rest, box.id)
    assert again.info()["allow_egress"] == ["allowed.example", f"{out.address}:{HTTP}"]
    eventually(
        lambda: talk(again, "request('allowed.example')", concurrent=True).endswith("allowed.example"),
        "names work again",
    )
    assert talk(again, f"request({out.address!r})", concurrent=True).endswith(out.address)
    again.out("touch /tmp/enough", concurrent=True)
    changed = Box(filtering.rest, changed.id)
    assert talk(changed, "request('allowed.example')").endswith("allowed.example")
    assert talk(changed, "request('other.example')") == "UNRESOLVED"
    changed.delete()
    done = filtering.rest.wait_job(job)

    count, kinds = json.loads(done["stdout"])
    assert count > 1
    for kind in kinds:
        assert "you asked" not in kind
        assert "ECONNREFUSED" in kind


def test_nothing_of_a_deleted_sandbox_is_left_in_the_rules(filtering: Service, rest: Rest) -> None:
    with rest.sandbox(IMAGE, allow_egress=["10.77.88.0/24:4321"]) as box:
        address = address_of(box)
        assert "10.77.88.0/24" in packet_rules()
    assert "10.77.88.0/24" not in packet_rules()
    assert address not in packet_rules().replace(f"{address} limit", "")
