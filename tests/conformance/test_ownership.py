"""Keys see and touch only their own sandboxes and jobs; an admin key sees all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance.conftest import end_and_check
from tests.conformance.runtimes import RuntimeCase
from tests.support.keys import Tenant, write_keys_file
from tests.support.rest import Box, Rest, new_id
from tests.support.service import Service

IMAGE = "host"
ALICE, BOB, ROOT = Tenant("alice"), Tenant("bob"), Tenant("root", role="admin")

FOREIGN_CALLS = [
    ("GET", "", None),
    ("GET", "/wait", None),
    ("DELETE", "", None),
    ("PATCH", "", {"labels": {"stolen": "yes"}}),
    ("POST", "/heartbeat", None),
    ("POST", "/exec", {"command": "touch /tmp/stolen", "wait": True}),
    ("POST", "/files", {"path": "/tmp/stolen", "content": ""}),
    ("GET", "/files?path=/etc/passwd", None),
    ("GET", "/files/list?path=/", None),
    ("POST", "/apply_patch", {"patch": "x"}),
    ("GET", "/jobs", None),
    ("GET", "/stats", None),
    ("GET", "/logs", None),
]


@pytest.fixture(scope="module")
def shared(runtime: RuntimeCase, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("owners")
    keys = write_keys_file(folder / "keys.json", [ALICE, BOB, ROOT])
    service = Service(
        folder / "state", arguments=(*runtime.serve_arguments, "--keys-file", str(keys))
    ).start()
    yield service
    end_and_check(service, runtime)


@pytest.fixture(scope="module")
def alice(shared: Service) -> Rest:
    return shared.rest.with_key(ALICE.key)


@pytest.fixture(scope="module")
def bob(shared: Service) -> Rest:
    return shared.rest.with_key(BOB.key)


@pytest.fixture(scope="module")
def root(shared: Service) -> Rest:
    return shared.rest.with_key(ROOT.key)


@pytest.fixture
def hers(alice: Rest) -> Iterator[Box]:
    with alice.sandbox(IMAGE, labels={"whose": "alice"}) as box:
        yield box


@pytest.mark.parametrize(
    ("method", "path", "body"), FOREIGN_CALLS, ids=[f"{m} {p.split('?')[0]}" for m, p, _ in FOREIGN_CALLS]
)
def test_a_foreign_sandbox_is_as_if_it_did_not_exist(
    bob: Rest, hers: Box, method: str, path: str, body: object
) -> None:
    answer = bob.request(method, hers.path + path, body)
    unknown = bob.request(method, f"/sandboxes/{new_id()}{path}", body)
    assert (answer.status, answer.code) == (unknown.status, unknown.code) == (404, "sandbox_not_found")
    assert hers.ls("/tmp") == {}
    assert hers.info()["labels"] == {"whose": "alice"}


def test_a_foreign_job_is_as_if_it_did_not_exist(bob: Rest, hers: Box) -> None:
    job_id = hers.running("sleep 30")
    for method, path, body in [("GET", "", None), ("GET", "/wait", None), ("DELETE", "", None),
                               ("POST", "/signal", {"signal": "KILL"}), ("POST", "/stdin", {"data": ""})]:  # fmt: skip
        answer = bob.request(method, f"/jobs/{job_id}{path}", body)
        assert (answer.status, answer.code) == (404, "job_not_found"), (method, path)
    assert hers.rest.job(job_id)["status"] == "running"


def test_a_list_shows_only_ones_own(alice: Rest, bob: Rest, hers: Box) -> None:
    assert hers.id in [s["sandbox_id"] for s in alice.get("/sandboxes").expect(200)["sandboxes"]]
    assert bob.get("/sandboxes").expect(200)["sandboxes"] == []
    assert bob.get("/sandboxes", label="whose=alice").expect(200)["sandboxes"] == []


def test_bulk_delete_reaches_only_ones_own(bob: Rest, hers: Box) -> None:
    assert bob.delete("/sandboxes", label="whose=alice").expect(200)["sandbox_ids"] == []
    assert hers.alive()


def test_an_admin_key_sees_and_touches_all(root: Rest, hers: Box) -> None:
    assert hers.id in [s["sandbox_id"] for s in root.get("/sandboxes").expect(200)["sandboxes"]]
    assert Box(root, hers.id).out("echo root was here") == "root was here\n"
    assert root.get(hers.path).expect(200)["owner"] == "alice"


def test_a_foreign_id_cannot_be_taken_over(bob: Rest, hers: Box) -> None:
    answer = bob.post("/sandboxes", {"image": IMAGE, "sandbox_id": hers.id})
    assert answer.status == 409
    assert "alice" not in answer.body.decode()
    assert hers.alive()


def test_idempotency_keys_of_owners_do_not_meet(alice: Rest, bob: Rest) -> None:
    body = {"image": IMAGE, "idempotency_key": new_id("key")}
    boxes = [Box(rest, rest.post("/sandboxes", body).expect()["sandbox_id"]) for rest in (alice, bob)]
    assert boxes[0].id != boxes[1].id
    for box in boxes:
        box.delete()


def test_job_ids_of_owners_give_nothing_away(alice: Rest, bob: Rest, hers: Box) -> None:
    job_id = new_id("job")
    hers.run("echo secret of alice", job_id=job_id)
    with bob.sandbox(IMAGE) as his:
        answer = his.post_exec("echo secret of alice", job_id=job_id, wait=True)
        assert answer.status in (200, 409)
        assert answer.json.get("sandbox_id") in (None, his.id)


def test_resources_of_a_user_do_not_name_others(bob: Rest, hers: Box) -> None:
    assert hers.id not in bob.get("/resources").expect(200).__repr__()


def test_keys_are_in_no_log(shared: Service, alice: Rest) -> None:
    alice.get("/sandboxes").expect(200)
    alice.get("/sandboxes", api_key=ALICE.key)
    log = shared.log_path.read_text() + shared.out_path.read_text()
    assert ALICE.key not in log
    assert shared.api_key is not None
    assert shared.api_key not in log


def test_directories_of_the_machine_are_images_for_admins_only(
    alice: Rest, root: Rest, runtime: RuntimeCase, tmp_path: Path
) -> None:
    assert runtime.on_this_machine
    (tmp_path / "secret").write_text("of another tenant")
    answer = alice.request("POST", "/sandboxes", {"image": f"dir:{tmp_path}"})
    assert (answer.status, answer.code) == (403, "forbidden")
    with root.sandbox(f"dir:{tmp_path}") as box:
        listing = box.rest.request("GET", f"{box.path}/files/list?path=/")
        assert "secret" in {entry["name"] for entry in listing.json["files"]}


@pytest.mark.parametrize("path", ["/", "/root", "/etc", "/proc", "{state}", "{state}/.."])
def test_directories_of_the_machine_are_no_images_for_users(alice: Rest, shared: Service, path: str) -> None:
    answer = alice.post("/sandboxes", {"image": "dir:" + path.format(state=shared.state_dir)})
    assert (answer.status, answer.code) == (403, "forbidden")


@pytest.mark.parametrize("path", ["/", "{state}", "{state}/sandboxes", "{state}/.."])
def test_the_machine_and_the_services_own_state_are_no_images_for_anyone(
    root: Rest, shared: Service, path: str
) -> None:
    """The state directory holds the tokens of every sandbox."""
    answer = root.post("/sandboxes", {"image": "dir:" + path.format(state=shared.state_dir)})
    if answer.status < 300:
        box = Box(root, answer.json["sandbox_id"])
        assert root.get(f"{box.path}/wait", timeout=60).expect(200)["status"] == "failed"
        box.delete()
