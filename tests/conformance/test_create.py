"""Creation: what may be asked for, what is refused, what a repeat does."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.conformance.conftest import NewBox
from tests.conformance.runtimes import Images
from tests.support.rest import Box, Rest, new_id


def test_a_sandbox_gets_an_id_when_none_is_given(rest: Rest, images: Images) -> None:
    one, other = rest.create(images.full), rest.create(images.full)
    assert one.id != other.id
    one.delete()
    other.delete()


def test_a_client_may_choose_the_id(new_box: NewBox) -> None:
    sandbox_id = new_id("mine")
    assert new_box(sandbox_id=sandbox_id).id == sandbox_id


@pytest.mark.parametrize("sandbox_id", ["a", "a-b", "0", "a" * 63])
def test_valid_ids_are_taken(rest: Rest, images: Images, sandbox_id: str) -> None:
    with rest.sandbox(images.full, sandbox_id=sandbox_id) as box:
        assert box.alive()


@pytest.mark.parametrize(
    "sandbox_id", ["", "A", "a_b", "-a", "a-", "a" * 64, "../x", "a/b", "a b", "a\n", "a.b", "ä"]
)
def test_malformed_ids_are_refused(rest: Rest, images: Images, sandbox_id: str) -> None:
    answer = rest.post("/sandboxes", {"image": images.full, "sandbox_id": sandbox_id})
    assert (answer.status, answer.code) == (422, "invalid_request")


@pytest.mark.parametrize(
    ("field", "value"),
    [("cpu", "x"), ("cpu", "-1"), ("cpu", "0"), ("cpu", ""), ("memory", "1GB"), ("memory", "-1"), ("memory", "0"),
     ("disk", "x"), ("pids", 0), ("pids", -5), ("timeout", 0), ("timeout", -1), ("ttl_seconds", 0),
     ("ttl_seconds", -3), ("heartbeat_timeout", 0), ("working_dir", "relative"), ("env", {"A=B": "c"}),
     ("env", {"": "c"}), ("env", {"A": 1}), ("labels", {"": "x"}), ("labels", {"a b": "x"}), ("image", ""),
     ("user", "")],
)  # fmt: skip
def test_senseless_values_are_refused_and_named(
    rest: Rest, images: Images, field: str, value: object
) -> None:
    answer = rest.post("/sandboxes", {"image": images.full, field: value})
    assert answer.status == 422
    assert field in answer.json["detail"]


@pytest.mark.parametrize("cpu", ["1", "0.5", "500m", 1])
def test_cpu_is_a_kubernetes_quantity(rest: Rest, images: Images, cpu: object) -> None:
    with rest.sandbox(images.full, cpu=cpu, memory="512Mi") as box:
        assert (box.info()["cpu"], box.info()["memory"]) == (str(cpu), "512Mi")


def test_the_environment_of_a_sandbox_is_that_of_its_commands(new_box: NewBox) -> None:
    box = new_box(env={"GIVEN": "two words ☃", "PATH": "/usr/bin:/bin:/extra"})
    assert box.out('echo "$GIVEN"; echo "$PATH"') == "two words ☃\n/usr/bin:/bin:/extra\n"
    assert box.out('echo "$GIVEN"', env={"GIVEN": "overridden"}) == "overridden\n"


def test_commands_start_in_the_working_directory(new_box: NewBox) -> None:
    box = new_box(working_dir="/srv/made")
    assert box.out("pwd") == "/srv/made\n", "a working directory that the image lacks is made"
    assert box.out("pwd", cwd="/tmp") == "/tmp\n"


def test_commands_run_as_the_user_of_the_sandbox(new_box: NewBox, images: Images) -> None:
    box = new_box(images.busybox, user="worker", working_dir="/home/worker")
    assert box.out("id -un; pwd; touch mine; ls") == "worker\n/home/worker\nmine\n"
    assert box.out("id -un", user="root") == "root\n"


def test_a_user_that_the_image_lacks_fails_with_a_reason(rest: Rest, images: Images) -> None:
    answer = rest.post("/sandboxes", {"image": images.full, "user": "no-such-user"})
    if answer.status == 400:
        assert answer.code == "user_not_found"
        return
    box = Box(rest, answer.expect()["sandbox_id"])
    info = rest.get(f"{box.path}/wait", timeout=60).expect(200)
    if info["status"] == "ready":
        exec_answer = box.post_exec("true", wait=True)
        assert (exec_answer.status, exec_answer.code) == (400, "user_not_found")
    else:
        assert (info["status"], "no-such-user" in info["status_message"]) == ("failed", True)
    box.delete()


def test_the_host_name_is_not_the_machines(new_box: NewBox) -> None:
    import socket

    assert new_box().out("cat /proc/sys/kernel/hostname").strip() != socket.gethostname()


# -- idempotency


def test_a_repeat_with_the_same_key_and_body_is_the_same_sandbox(rest: Rest, images: Images) -> None:
    body = {"image": images.full, "idempotency_key": new_id("key"), "labels": {"a": "b"}}
    ids = {rest.post("/sandboxes", body).expect()["sandbox_id"] for _ in range(3)}
    assert len(ids) == 1
    Box(rest, ids.pop()).delete()


def test_a_repeat_with_the_same_key_and_another_body_is_a_conflict(rest: Rest, images: Images) -> None:
    body = {"image": images.full, "idempotency_key": new_id("key")}
    box = Box(rest, rest.post("/sandboxes", body).expect()["sandbox_id"])
    answer = rest.post("/sandboxes", {**body, "labels": {"x": "y"}})
    assert (answer.status, answer.code) == (409, "conflict")
    box.delete()


def test_simultaneous_creates_with_one_key_make_one_sandbox(rest: Rest, images: Images) -> None:
    body = {"image": images.full, "idempotency_key": new_id("key")}
    with ThreadPoolExecutor(12) as pool:
        ids = set(pool.map(lambda _: rest.post("/sandboxes", body).expect()["sandbox_id"], range(12)))
    assert len(ids) == 1
    Box(rest, ids.pop()).delete()


def test_the_same_id_and_body_again_is_the_same_sandbox(new_box: NewBox, images: Images, rest: Rest) -> None:
    sandbox_id = new_id()
    box = new_box(sandbox_id=sandbox_id)
    box.out("touch /tmp/mine")
    rest.post("/sandboxes", {"image": images.full, "sandbox_id": sandbox_id}).expect()
    assert box.out("ls /tmp/mine") == "/tmp/mine\n"


def test_the_same_id_with_another_body_is_a_conflict_and_changes_nothing(
    new_box: NewBox, images: Images, rest: Rest
) -> None:
    box = new_box(sandbox_id=new_id())
    box.out("touch /tmp/mine")
    answer = rest.post("/sandboxes", {"image": images.busybox, "sandbox_id": box.id})
    assert (answer.status, answer.code) == (409, "conflict")
    assert box.info()["image"] == images.full
    assert box.out("ls /tmp/mine") == "/tmp/mine\n"


def test_simultaneous_creates_with_one_id_and_different_bodies_make_one(rest: Rest, images: Images) -> None:
    sandbox_id = new_id()

    def create(number: int) -> int:
        body = {"image": images.full, "sandbox_id": sandbox_id, "labels": {"n": str(number)}}
        return rest.post("/sandboxes", body).status

    with ThreadPoolExecutor(8) as pool:
        statuses = sorted(pool.map(create, range(8)))
    assert statuses[0] in (200, 201, 202)
    assert statuses[1:] == [409] * 7
    Box(rest, sandbox_id).delete()


def test_creation_may_wait_until_it_is_ready(rest: Rest, images: Images) -> None:
    info = rest.post("/sandboxes", {"image": images.busybox}, wait=60).expect()
    box = Box(rest, info["sandbox_id"])
    assert (info["status"], info["ready"]) == ("ready", True)
    assert box.run("true")["exit_code"] == 0
    box.delete()


def test_a_creation_that_waits_tells_why_it_failed(rest: Rest) -> None:
    info = rest.post("/sandboxes", {"image": "no-such-image:1"}, wait=60).expect()
    assert (info["status"], info["ready"], info["reason"]) == ("failed", False, "image_not_found")


@pytest.mark.parametrize("wait", ["-1", "0", "nan", "soon", ""])
def test_a_wait_that_is_no_time_is_refused_and_nothing_made(rest: Rest, images: Images, wait: str) -> None:
    name = new_id("never")
    answer = rest.post("/sandboxes", {"image": images.busybox, "sandbox_id": name}, wait=wait)
    assert (answer.status, answer.code) == (422, "invalid_request")
    assert rest.get(f"/sandboxes/{name}").status == 404


# -- failure


def test_an_image_that_does_not_exist_fails_with_that_reason(rest: Rest) -> None:
    answer = rest.post("/sandboxes", {"image": "no-such-image:1"})
    if answer.status == 404:
        assert answer.code == "image_not_found"
        return
    box = Box(rest, answer.expect()["sandbox_id"])
    info = rest.get(f"{box.path}/wait", timeout=60).expect(200)
    assert (info["status"], info["ready"], info["reason"]) == ("failed", False, "image_not_found")
    assert "no-such-image:1" in info["status_message"]


def test_commands_on_a_failed_sandbox_answer_with_the_reason(rest: Rest) -> None:
    box = rest.submit("no-such-image:1")
    rest.get(f"{box.path}/wait", timeout=60)
    answer = box.post_exec("true", wait=True)
    assert (answer.status, answer.code, answer.json["reason"]) == (404, "sandbox_dead", "image_not_found")
    assert answer.json["infra"] is True


def test_a_directory_that_does_not_exist_is_an_image_not_found(rest: Rest) -> None:
    box = rest.submit("dir:/no/such/directory")
    info = rest.get(f"{box.path}/wait", timeout=60).expect(200)
    assert (info["status"], info["reason"]) == ("failed", "image_not_found")


def test_a_failed_sandbox_may_be_deleted(rest: Rest) -> None:
    box = rest.submit("no-such-image:1")
    rest.get(f"{box.path}/wait", timeout=60)
    rest.delete(box.path).expect(200)


@pytest.mark.unprivileged
def test_the_image_is_not_changed_by_a_sandbox(new_box: NewBox, images: Images) -> None:
    first = new_box(images.busybox)
    first.out("rm -rf /home /bin/vi; echo changed > /etc/passwd; echo new > /new")
    second = new_box(images.busybox)
    assert (
        second.out("ls /bin/vi; test -e /new || echo untouched; grep -c worker /etc/passwd")
        == "/bin/vi\nuntouched\n1\n"
    )
