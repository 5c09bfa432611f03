"""Two services that share a state directory: whichever is asked, the answer is that of one."""

from __future__ import annotations

import hashlib
import http.client
import os
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import Any

import pytest

from tests.conformance.runtimes import RuntimeCase
from tests.conformance.test_command_control import lost_exec
from tests.conformance.test_events import stream as event_stream
from tests.conformance.test_events import types
from tests.conformance.test_pty import Pty
from tests.conformance.test_streams import events
from tests.support.keys import Tenant, write_keys_file
from tests.support.replicas import Replicas
from tests.support.rest import Answer, Box, Rest, new_id
from tests.support.waiting import eventually

IMAGE = "host"


@pytest.fixture(scope="module")
def one(shared: Replicas) -> Rest:
    return shared.services[0].rest


@pytest.fixture(scope="module")
def other(shared: Replicas) -> Rest:
    return shared.services[1].rest


@pytest.fixture(scope="module")
def made_at_one(one: Rest) -> Any:
    with one.sandbox(IMAGE, labels={"made": "at-one"}) as box:
        yield box


@pytest.fixture
def far(made_at_one: Box, other: Rest) -> Box:
    """A sandbox of one service, through the other."""
    return Box(other, made_at_one.id)


# -- one sandbox


def test_a_sandbox_is_the_same_through_both(made_at_one: Box, far: Box) -> None:
    told, known = far.info(), made_at_one.info()
    moving = ("expires_at",)
    assert {k: v for k, v in told.items() if k not in moving} == {
        k: v for k, v in known.items() if k not in moving
    }


def test_a_command_runs(far: Box) -> None:
    job = far.run("echo out; echo err >&2; exit 3")
    assert (job["stdout"], job["stderr"], job["exit_code"]) == ("out\n", "err\n", 3)


def test_a_commands_job_is_known_to_both(far: Box, one: Rest) -> None:
    job_id = far.start("echo x")
    assert far.rest.wait_job(job_id) == one.wait_job(job_id)


def test_a_job_id_of_ones_own_runs_once(far: Box, made_at_one: Box) -> None:
    job_id, file = new_id("job"), f"/tmp/{new_id('n')}"
    for box in (far, made_at_one, far):
        assert box.run(f"echo x >> {file}; wc -l < {file}", job_id=job_id)["stdout"] == "1\n"


def test_output_comes_while_the_command_runs(far: Box) -> None:
    job_id = far.start("echo first; while ! test -e /tmp/go; do sleep 0.05; done; echo last")
    told = events(far.rest, job_id)
    assert next(told).bytes == b"first\n"
    far.write("/tmp/go", b"")
    assert [event.name for event in told] == ["stdout", "exit"]


def test_a_terminal_works(far: Box) -> None:
    with closing(Pty(far.rest, far.id)) as terminal:
        terminal.start("sh", "-c", "read line; echo got $line; exit 4")
        terminal.type("word\r")
        terminal.until(b"got word")
        assert (terminal.exit(), terminal.closed()) == (4, 1000)


def test_a_file_of_many_pieces_makes_the_round_trip(far: Box) -> None:
    content = os.urandom(9 << 20)
    far.put_content("/tmp/big", content).expect(200)
    answer = far.get_content("/tmp/big")
    assert hashlib.sha256(answer.body).digest() == hashlib.sha256(content).digest()
    assert int(answer.headers["content-length"]) == len(content)


def test_an_upload_that_breaks_off_leaves_nothing(far: Box) -> None:
    path = f"/tmp/{new_id('file')}"
    connection = far.rest.connect()
    connection.putrequest("PUT", f"{far.path}/files/content?path={path}")
    for name, value in {**far.rest.headers(), "Content-Length": "1000000"}.items():
        connection.putheader(name, value)
    connection.endheaders(b"half of it")
    connection.close()
    assert far.run(f"test -e {path}", concurrent=True)["exit_code"] == 1


def test_a_client_that_hangs_up_takes_its_command_along_when_it_wants(far: Box) -> None:
    job_id = new_id("job")
    body = f'{{"command": "sleep 306.5", "wait": true, "job_id": "{job_id}", "on_disconnect": "kill"}}'
    lost_exec(far, body)
    eventually(lambda: far.rest.job(job_id)["status"] == "failed", "the command is killed")
    assert far.rest.job(job_id)["error_code"] == "cancelled"


def test_a_refusal_is_passed_on_as_it_is(far: Box, made_at_one: Box) -> None:
    def refused(box: Box) -> tuple[int, str | None, str]:
        answer = box.post_exec("true", cwd="/nowhere")
        return answer.status, answer.code, answer.json["detail"]

    assert refused(far) == refused(made_at_one)
    assert refused(far)[:2] == (400, "cwd_not_found")


def test_a_deletion_is_known_to_both(one: Rest, other: Rest) -> None:
    box = one.create(IMAGE)
    Box(other, box.id).delete()
    assert {rest.get(box.path).code for rest in (one, other)} == {"sandbox_deleted"}


def test_what_nobody_knows_is_not_found(other: Rest) -> None:
    assert other.get(f"/sandboxes/{new_id()}").code == "sandbox_not_found"
    assert other.get(f"/jobs/{new_id()}").code == "job_not_found"


def test_a_wrong_key_is_refused_by_both(far: Box, made_at_one: Box) -> None:
    for box in (far, made_at_one):
        assert box.rest.with_key("wrong").get(box.path).status == 401
        assert box.rest.with_key("wrong").get("/sandboxes").status == 401


def test_where_services_meet_is_for_their_user_alone(shared: Replicas) -> None:
    sockets = list(shared.state_dir.glob("seats/*/http.sock"))
    assert len(sockets) == 2
    assert {stat.S_IMODE(path.stat().st_mode) for path in sockets} == {0o600}
    assert {stat.S_IMODE(path.parent.stat().st_mode) for path in sockets} == {0o700}


def test_questions_between_services_are_not_answered_to_others(one: Rest) -> None:
    assert one.get("/-/use", owner="default").status == 404


# -- one id


def at_once(*asks: Any) -> list[Answer]:
    with ThreadPoolExecutor(len(asks)) as pool:
        return [future.result() for future in [pool.submit(ask) for ask in asks]]


def test_one_id_asked_of_both_at_once_is_one_sandbox(one: Rest, other: Rest) -> None:
    for _ in range(5):
        body = {"image": IMAGE, "sandbox_id": new_id()}
        answers = at_once(*[partial(rest.post, "/sandboxes", body) for rest in (one, other) * 3])
        assert {answer.status for answer in answers} == {200}
        assert len({answer.json["created_at"] for answer in answers}) == 1
        Box(one, body["sandbox_id"]).delete()


def test_one_id_with_two_bodies_is_a_conflict_for_all_but_one(one: Rest, other: Rest) -> None:
    name = new_id()
    answers = at_once(
        *[
            lambda rest=rest, n=n: rest.post(
                "/sandboxes", {"image": IMAGE, "sandbox_id": name, "pids": 50 + n}
            )
            for n, rest in enumerate((one, other) * 2)
        ]
    )
    assert sorted(answer.status for answer in answers) == [200, 409, 409, 409]
    Box(one, name).delete()


def test_one_idempotency_key_is_one_sandbox(one: Rest, other: Rest) -> None:
    body = {"image": IMAGE, "idempotency_key": new_id("key")}
    answers = at_once(*[lambda rest=rest: rest.post("/sandboxes", body) for rest in (one, other)])
    (sandbox_id,) = {answer.expect(200)["sandbox_id"] for answer in answers}
    Box(one, sandbox_id).delete()


def test_an_id_in_a_batch_is_found_where_it_is(made_at_one: Box, other: Rest) -> None:
    same = {"image": IMAGE, "labels": {"made": "at-one"}, "sandbox_id": made_at_one.id}
    body = {"sandboxes": [same, {**same, "pids": 9}]}
    first, second = other.post("/sandboxes/batch", body).expect(200)["results"]
    assert second["error"]["code"] == "conflict"
    assert first["error"] is None and first["sandbox"]["sandbox_id"] == made_at_one.id


# -- all of them


def test_lists_of_both_are_the_same_and_in_order_of_creation(one: Rest, other: Rest) -> None:
    label = new_id("run")
    boxes = [rest.create(IMAGE, labels={"run": label}) for rest in (one, other, other, one)]
    for rest in (one, other):
        listed = rest.get("/sandboxes", label=f"run={label}").expect(200)["sandboxes"]
        assert [each["sandbox_id"] for each in listed] == [box.id for box in boxes]
    for box in boxes:
        box.delete()


def test_pages_go_through_both_wherever_they_are_asked_for(one: Rest, other: Rest) -> None:
    label = new_id("run")
    boxes = [rest.submit(IMAGE, labels={"run": label}) for rest in (one, other, other, one, other)]
    seen: list[str] = []
    cursor: str | None = ""
    for rest in (one, other, one):
        page = rest.get("/sandboxes", label=f"run={label}", limit=2, **({"cursor": cursor} if cursor else {}))
        seen += [each["sandbox_id"] for each in page.expect(200)["sandboxes"]]
        cursor = page.json["next_cursor"]
    assert (seen, cursor) == ([box.id for box in boxes], None)
    deleted = other.delete("/sandboxes", label=f"run={label}").expect(200)["sandbox_ids"]
    assert sorted(deleted) == sorted(seen)
    assert one.get("/sandboxes", label=f"run={label}").expect(200)["sandboxes"] == []


def test_the_resources_count_the_sandboxes_of_both(one: Rest, other: Rest) -> None:
    with one.sandbox(IMAGE), other.sandbox(IMAGE):
        counts = [rest.get("/resources").expect(200)["sandboxes"]["ready"] for rest in (one, other)]
    assert counts[0] == counts[1] >= 2


def test_events_of_both_come_in_one_stream(one: Rest, other: Rest) -> None:
    label = new_id("run")
    with event_stream(one, f"?label=run={label}") as told:
        assert told.event()["type"] == "open"
        for rest in (one, other):
            with rest.sandbox(IMAGE, labels={"run": label}) as box:
                found = told.until("ready")
                assert types(found) == ["created", "starting", "ready"]
            ended = told.until("ended")[-1]
            assert ended["sandbox_id"] == box.id


def test_events_are_resumed_at_the_other_service(one: Rest, other: Rest) -> None:
    label = new_id("run")
    with event_stream(one, f"?label=run={label}") as told:
        seen = told.event()["id"]
    for rest in (one, other):
        rest.create(IMAGE, labels={"run": label}).delete()
    with event_stream(other, f"?label=run={label}", Last_Event_ID=seen) as told:
        found = [told.event() for _ in range(8)]
    assert sorted(types(found)) == sorted(["created", "starting", "ready", "ended"] * 2)


def test_a_reader_that_has_missed_nothing_goes_on_at_once(one: Rest, other: Rest) -> None:
    label = new_id("run")
    with event_stream(one, f"?label=run={label}") as told:
        seen = told.event()["id"]
    resumed = event_stream(other, f"?label=run={label}", Last_Event_ID=seen)
    with resumed as told, one.sandbox(IMAGE, labels={"run": label}):
        assert types(told.until("ready")) == ["created", "starting", "ready"]


def test_a_place_that_is_none_is_a_gap(one: Rest) -> None:
    with event_stream(one, Last_Event_ID="deadbeef-7") as told:
        assert told.event()["type"] == "gap"


# -- limits


KEYS = [Tenant("few", max_sandboxes=2), Tenant("slow", creates_per_minute=3), Tenant("third")]


@pytest.fixture(scope="module")
def limited(runtime: RuntimeCase, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    folder = tmp_path_factory.mktemp("limited")
    file = write_keys_file(folder / "keys.json", KEYS)
    arguments = ("--keys-file", str(file), "--max-sandboxes", "5")
    replicas = Replicas(folder / "state", runtime, arguments=arguments)
    try:
        yield replicas.start()
    finally:
        replicas.end_and_check()


@pytest.fixture
def tenants(limited: Replicas) -> tuple[Replicas, list[Tenant]]:
    limited.services[0].delete_all()
    return limited, KEYS


def test_limits_hold_over_both_together(tenants: tuple[Replicas, list[Tenant]]) -> None:
    replicas, (few, slow, third) = tenants
    ways = [service.rest for service in replicas.services]

    def statuses(tenant: Tenant, count: int) -> list[int]:
        asks = [
            lambda rest=rest: rest.with_key(tenant.key).post("/sandboxes", {"image": IMAGE})
            for rest in (ways * count)[:count]
        ]
        return sorted(answer.status for answer in at_once(*asks))

    assert statuses(few, 6) == [200, 200, 429, 429, 429, 429]
    # The rate is kept by what either admits.
    assert statuses(slow, 6) == [200, 200, 200, 429, 429, 429]
    # And the machine is full.
    assert statuses(third, 2) == [503, 503]


def test_others_sandboxes_are_hidden_at_both(tenants: tuple[Replicas, list[Tenant]]) -> None:
    replicas, (few, _, third) = tenants
    one, other = (service.rest for service in replicas.services)
    box = one.with_key(few.key).create(IMAGE)
    job_id = box.start("sleep 60")
    assert other.with_key(third.key).get(box.path).code == "sandbox_not_found"
    assert other.with_key(third.key).get(f"/jobs/{job_id}").code == "job_not_found"
    assert other.with_key(third.key).get("/sandboxes").expect(200)["sandboxes"] == []
    assert other.with_key(few.key).job(job_id)["status"] == "running"


# -- images


def test_an_image_that_the_others_sandbox_uses_is_not_removed(
    shared: Replicas, one: Rest, other: Rest, images: Any
) -> None:
    with one.sandbox(images.busybox):
        answer = other.delete(f"/images/{images.busybox}")
    assert (answer.status, answer.code) == (409, "conflict")


def test_a_socket_of_http_stays_usable_after_a_passed_on_request(far: Box) -> None:
    connection: http.client.HTTPConnection = far.rest.connect()
    for _ in range(3):
        connection.request("GET", far.path, headers=far.rest.headers())
        response = connection.getresponse()
        assert (response.status, len(response.read()) > 0) == (200, True)
    connection.close()
