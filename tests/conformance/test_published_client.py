"""The published client's traffic as literal requests: what it sends, and what it needs back.

Its create, exec and wait calls parse every answer as JSON, know only the statuses named here, and resend a
request on a broken connection. Its terminals are in test_published_terminal.py. The facts stand
in shared/spec/facts/published-client.md.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conformance.runtimes import Images
from tests.support.rest import Rest, new_id
from tests.support.service import Service

JOB_FIELDS_READ = {"job_id", "sandbox_id", "command", "status", "created_at", "stdout", "stderr", "exit_code", "error",
                   "started_at", "completed_at"}  # fmt: skip


class Wire:
    """Literal requests on one kept connection, as the published client sends them."""

    def __init__(self, rest: Rest) -> None:
        self._key = rest.api_key or ""
        self._connection = rest.connect()

    def send(self, method: str, path: str, body: str | None = None) -> tuple[int, dict]:  # type: ignore[type-arg]
        headers = {"X-API-Key": self._key} if self._key else {}
        if body is not None:
            headers["Content-Type"] = "application/json"
        self._connection.request(method, path, body, headers)
        response = self._connection.getresponse()
        assert response.getheader("content-type") == "application/json", "its asynchronous half insists on it"
        return response.status, json.loads(response.read())

    @property
    def connection(self) -> http.client.HTTPConnection:
        return self._connection


@pytest.fixture
def wire(rest: Rest) -> Iterator[Wire]:
    opened = Wire(rest)
    yield opened
    opened.connection.close()


@pytest.fixture
def sandbox_id(wire: Wire, images: Images) -> Iterator[str]:
    status, created = wire.send(
        "POST", "/sandboxes", json.dumps({"image": images.full, "block_network": True})
    )
    assert status in (200, 201, 202)
    wire.send("GET", f"/sandboxes/{created['sandbox_id']}/wait?timeout=600")
    yield created["sandbox_id"]
    wire.send("DELETE", f"/sandboxes/{created['sandbox_id']}")


def test_create_with_only_image_and_block_network(wire: Wire, images: Images) -> None:
    status, created = wire.send("POST", "/sandboxes", f'{{"image": "{images.full}", "block_network": true}}')
    assert status in (200, 201, 202)
    assert created["image"] == images.full
    assert created["block_network"] is True
    assert created["namespace"]
    assert created["timeout"] > 0, "it becomes the wait's timeout"
    wire.send("DELETE", f"/sandboxes/{created['sandbox_id']}")


def test_create_with_every_field_that_it_can_send(wire: Wire, images: Images) -> None:
    sandbox_id = f"prefix-{new_id()[-8:]}"
    body = {"image": images.full, "block_network": False, "sandbox_id": sandbox_id, "cpu": "1", "memory": "1Gi",
            "timeout": 300}  # fmt: skip
    status, created = wire.send("POST", "/sandboxes", json.dumps(body))
    assert status in (200, 201, 202)
    assert (created["sandbox_id"], created["timeout"]) == (sandbox_id, 300)
    status, ready = wire.send("GET", f"/sandboxes/{sandbox_id}/wait?timeout=300")
    assert (status, ready["status"]) == (200, "ready")
    wire.send("DELETE", f"/sandboxes/{sandbox_id}")


def test_wait_tells_ready(wire: Wire, sandbox_id: str) -> None:
    status, answer = wire.send("GET", f"/sandboxes/{sandbox_id}/wait?timeout=3600")
    assert status == 200
    assert answer["ready"] is True or answer["status"] == "ready"


def test_wait_tells_failed_with_a_status_message(wire: Wire) -> None:
    _, created = wire.send(
        "POST", "/sandboxes", '{"image": "no-such-image-anywhere:1", "block_network": true}'
    )
    sandbox_id = created.get("sandbox_id", "")
    status, answer = wire.send("GET", f"/sandboxes/{sandbox_id}/wait?timeout=60")
    assert status == 200, "any error status would be raised as an HTTP error, not as a failed sandbox"
    assert answer["status"] == "failed"
    assert "no-such-image-anywhere" in answer["status_message"]


def test_get_answers_with_the_four_fields_that_it_reads(wire: Wire, sandbox_id: str) -> None:
    status, answer = wire.send("GET", f"/sandboxes/{sandbox_id}")
    assert status == 200
    assert answer.keys() >= {"sandbox_id", "namespace", "image", "block_network", "status"}


def test_exec_of_a_string_as_it_sends_it(wire: Wire, sandbox_id: str) -> None:
    body = (
        '{"command": "echo out; echo err >&2", "timeout_seconds": null, "cwd": null, "env": null, '
        '"login_shell": false, "wait": true}'
    )
    status, job = wire.send("POST", f"/sandboxes/{sandbox_id}/exec", body)
    assert status == 200
    assert job.keys() >= JOB_FIELDS_READ
    assert (job["status"], job["stdout"], job["stderr"], job["exit_code"]) == (
        "succeeded",
        "out\n",
        "err\n",
        0,
    )


def test_exec_of_a_list_as_it_sends_it(wire: Wire, sandbox_id: str) -> None:
    body = {"command": ["printf", "%s", "a b"], "timeout_seconds": 30, "cwd": "/tmp", "env": {"A": "b"},
            "login_shell": True, "wait": True}  # fmt: skip
    status, job = wire.send("POST", f"/sandboxes/{sandbox_id}/exec", json.dumps(body))
    assert (status, job["status"], job["stdout"]) == (200, "succeeded", "a b")


def test_exec_of_a_failing_command_is_an_answer_not_an_error(wire: Wire, sandbox_id: str) -> None:
    status, job = wire.send("POST", f"/sandboxes/{sandbox_id}/exec", '{"command": "exit 3", "wait": true}')
    assert (status, job["status"], job["exit_code"]) == (200, "failed", 3)


def test_a_timeout_is_failed_with_exit_code_124(wire: Wire, sandbox_id: str) -> None:
    body = '{"command": "sleep 60", "timeout_seconds": 1, "wait": true}'
    status, job = wire.send("POST", f"/sandboxes/{sandbox_id}/exec", body)
    assert (status, job["status"], job["exit_code"], job["timed_out"]) == (200, "failed", 124, True)
    assert "timed out" in job["error"]


def test_exec_without_wait_and_polling_every_tenth_of_a_second(wire: Wire, sandbox_id: str) -> None:
    body = '{"command": "sleep 0.4; echo polled", "timeout_seconds": 60, "cwd": null, "env": null, "login_shell": false}'
    status, queued = wire.send("POST", f"/sandboxes/{sandbox_id}/exec", body)
    assert status in (200, 202)
    for _ in range(600):
        status, job = wire.send("GET", f"/jobs/{queued['job_id']}")
        assert status == 200
        assert job.keys() >= JOB_FIELDS_READ
        if job["status"] in ("succeeded", "failed"):
            break
        assert job["status"] in ("queued", "running")
        time.sleep(0.1)
    assert (job["status"], job["stdout"]) == ("succeeded", "polled\n")


def test_upload_download_and_list(wire: Wire, sandbox_id: str) -> None:
    status, written = wire.send(
        "POST", f"/sandboxes/{sandbox_id}/files", '{"path": "/tmp/x/f.txt", "content": "aGVsbG8="}'
    )
    assert status in (200, 201)
    assert (written["success"], written["path"], written["size"]) == (True, "/tmp/x/f.txt", 5)
    status, read = wire.send("GET", f"/sandboxes/{sandbox_id}/files?path=%2Ftmp%2Fx%2Ff.txt")
    assert (status, read["content"]) == (200, "aGVsbG8=")
    status, listing = wire.send("GET", f"/sandboxes/{sandbox_id}/files/list?path=/tmp/x")
    assert status == 200
    assert [(f["name"], f["type"], f["size"]) for f in listing["files"]] == [("f.txt", "file", 5)]
    assert all(isinstance(f["size"], int) and f["modified"] for f in listing["files"])


def test_a_listing_of_the_root_as_it_asks_by_default(wire: Wire, sandbox_id: str) -> None:
    status, listing = wire.send("GET", f"/sandboxes/{sandbox_id}/files/list?path=/")
    assert status == 200
    assert listing["files"]


def test_apply_patch_with_its_two_fields(wire: Wire, sandbox_id: str) -> None:
    patch = "--- /dev/null\n+++ b/tmp/patched\n@@ -0,0 +1 @@\n+x\n"
    body = json.dumps({"patch": patch, "timeout_seconds": 30})
    status, answer = wire.send("POST", f"/sandboxes/{sandbox_id}/apply_patch", body)
    assert status == 200
    assert answer.keys() >= {"success", "stdout", "stderr", "exit_code"}


def test_heartbeat_without_a_body(wire: Wire, sandbox_id: str) -> None:
    status, answer = wire.send("POST", f"/sandboxes/{sandbox_id}/heartbeat")
    assert 200 <= status < 300
    assert isinstance(answer, dict)


def test_delete_and_health_answer_with_json(wire: Wire, sandbox_id: str) -> None:
    assert wire.send("DELETE", f"/sandboxes/{sandbox_id}") == (
        200,
        {"status": "deleted", "sandbox_id": sandbox_id},
    )
    assert wire.send("GET", "/health")[0] == 200


def test_a_base_url_with_a_trailing_slash_cut_and_ids_unquoted(wire: Wire, sandbox_id: str) -> None:
    assert wire.send("GET", f"/sandboxes/{sandbox_id}")[0] == 200


def test_an_idle_connection_is_kept_longer_than_the_client_keeps_it(wire: Wire) -> None:
    """The client keeps idle connections for 30 s; a server that drops them first makes it send an exec twice."""
    assert wire.send("GET", "/health")[0] == 200
    first = wire.connection.sock
    time.sleep(32)
    assert wire.send("GET", "/health")[0] == 200
    assert wire.connection.sock is first


def test_two_hundred_connections_at_once_are_served(rest: Rest) -> None:
    wires = [Wire(rest) for _ in range(200)]
    for opened in wires:
        opened.connection.request("GET", "/health", headers={"X-API-Key": rest.api_key or ""})
    assert [w.connection.getresponse().status for w in wires] == [200] * 200
    for opened in wires:
        opened.connection.close()


# ------------------------------------------------------------------------------------ what it does with the answers


def test_every_optional_field_may_be_null(wire: Wire, images: Images) -> None:
    body = {"image": images.full, "block_network": True, "sandbox_id": None, "cpu": None, "memory": None,
            "timeout": None}  # fmt: skip
    status, created = wire.send("POST", "/sandboxes", json.dumps(body))
    assert status == 200
    sandbox_id = created["sandbox_id"]
    assert wire.send("GET", f"/sandboxes/{sandbox_id}/wait?timeout=600")[1]["status"] == "ready"
    status, answer = wire.send(
        "POST", f"/sandboxes/{sandbox_id}/apply_patch", '{"patch": "x", "timeout_seconds": null}'
    )
    assert (status, answer["success"]) == (200, False)
    wire.send("DELETE", f"/sandboxes/{sandbox_id}")


def test_polling_tells_failed_as_waiting_does(wire: Wire) -> None:
    """Where `/wait` is missing (404, 405) it asks for the sandbox itself, once a second."""
    _, created = wire.send(
        "POST", "/sandboxes", '{"image": "no-such-image-anywhere:1", "block_network": true}'
    )
    sandbox_id = created["sandbox_id"]
    wire.send("GET", f"/sandboxes/{sandbox_id}/wait?timeout=60")
    status, answer = wire.send("GET", f"/sandboxes/{sandbox_id}")
    assert (status, answer["ready"], answer["status"]) == (200, False, "failed")
    assert isinstance(answer["status_message"], str)


def test_polling_tells_ready(wire: Wire, sandbox_id: str) -> None:
    status, answer = wire.send("GET", f"/sandboxes/{sandbox_id}")
    assert (status, answer["ready"], answer["status"]) == (200, True, "ready")


def test_the_fields_of_a_job_have_the_types_that_it_reads(wire: Wire, sandbox_id: str) -> None:
    _, job = wire.send("POST", f"/sandboxes/{sandbox_id}/exec", '{"command": "true", "wait": true}')
    assert isinstance(job["job_id"], str) and job["sandbox_id"] == sandbox_id and job["command"] == "true"
    assert (job["stdout"], job["stderr"], job["exit_code"], job["error"]) == ("", "", 0, None)
    assert isinstance(job["created_at"], float) and isinstance(job["started_at"], float)
    assert job["completed_at"] >= job["started_at"]
    assert wire.send("GET", f"/jobs/{job['job_id']}") == (200, job)


def test_a_patch_that_goes_in_is_a_success(wire: Wire, sandbox_id: str) -> None:
    patch = "--- /dev/null\n+++ b/patched-by-test\n@@ -0,0 +1 @@\n+x\n"
    body = json.dumps({"patch": patch, "timeout_seconds": 30})
    status, answer = wire.send("POST", f"/sandboxes/{sandbox_id}/apply_patch", body)
    assert (status, answer["success"], answer["exit_code"]) == (200, True, 0)
    assert isinstance(answer["stdout"], str) and isinstance(answer["stderr"], str)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/sandboxes/never-seen", 404),
        ("GET", "/sandboxes/never-seen/wait?timeout=1", 404),
        ("DELETE", "/sandboxes/never-seen", 404),
        ("POST", "/sandboxes/never-seen/heartbeat", 404),
        ("GET", "/sandboxes/never-seen/files?path=/f", 404),
        ("GET", "/sandboxes/never-seen/files/list?path=/", 404),
        ("GET", "/jobs/never-seen", 404),
        ("GET", "/no/such/path", 404),
        ("PUT", "/sandboxes", 405),
        ("POST", "/sandboxes", 422),
    ],
)
def test_errors_are_json_too(wire: Wire, method: str, path: str, status: int) -> None:
    answered, body = wire.send(method, path)
    assert answered == status
    assert body["detail"]


def test_a_file_that_is_missing_is_a_404(wire: Wire, sandbox_id: str) -> None:
    status, body = wire.send("GET", f"/sandboxes/{sandbox_id}/files?path=/no/such/file")
    assert (status, body["code"]) == (404, "file_not_found")


def test_a_wrong_key_is_refused_with_json(rest: Rest) -> None:
    wire = Wire(rest.with_key("wrong"))
    status, body = wire.send("GET", "/sandboxes/any")
    assert (status, body["code"]) == (401, "unauthorized")
    wire.connection.close()


def test_health_needs_no_key(rest: Rest) -> None:
    wire = Wire(rest.with_key(None))
    assert wire.send("GET", "/health") == (200, {"status": "healthy"})
    wire.connection.close()


def test_overload_names_the_seconds_to_wait_as_a_number(
    own_service: Callable[..., Service], tmp_path: Path
) -> None:
    """It waits them, and up to two more, three times."""
    config = tmp_path / "config.json"
    config.write_text('{"max_jobs": 1}')
    rest = own_service("--config", str(config)).rest
    with rest.sandbox("host") as box:
        job_id = box.running("cat", stdin_open=True, background=True)
        refused = box.post_exec("true", wait=True)
        assert refused.status == 503
        assert float(refused.headers["retry-after"]) > 0
        rest.delete(f"/jobs/{job_id}").expect(200)
        assert box.run("true")["exit_code"] == 0
