"""The published paths, fields and status codes, exactly."""

from __future__ import annotations

import base64

import pytest

from tests.conformance.conftest import NewBox
from tests.conformance.runtimes import Images
from tests.support.rest import Answer, Box, Rest, new_id

CREATE_FIELDS = {"sandbox_id", "namespace", "image", "block_network", "cpu", "memory", "timeout", "status"}

#: method, path and body of each operation that needs a key; {s} is a sandbox, {j} a job
OPERATIONS = [
    ("GET", "/resources", None),
    ("POST", "/sandboxes", {"image": "host"}),
    ("GET", "/sandboxes", None),
    ("DELETE", "/sandboxes?label=a=b", None),
    ("POST", "/sandboxes/batch", {"sandboxes": [{"image": "host"}]}),
    ("GET", "/sandboxes/{s}", None),
    ("PATCH", "/sandboxes/{s}", {"labels": {}}),
    ("GET", "/sandboxes/{s}/wait", None),
    ("DELETE", "/sandboxes/{s}", None),
    ("POST", "/sandboxes/{s}/heartbeat", None),
    ("POST", "/sandboxes/{s}/exec", {"command": "true"}),
    ("GET", "/sandboxes/{s}/jobs", None),
    ("GET", "/sandboxes/{s}/stats", None),
    ("GET", "/sandboxes/{s}/logs", None),
    ("POST", "/sandboxes/{s}/apply_patch", {"patch": "x"}),
    ("POST", "/sandboxes/{s}/files", {"path": "/tmp/f", "content": ""}),
    ("GET", "/sandboxes/{s}/files?path=/etc/passwd", None),
    ("GET", "/sandboxes/{s}/files/list?path=/", None),
    ("GET", "/jobs/{j}", None),
    ("GET", "/jobs/{j}/wait", None),
    ("DELETE", "/jobs/{j}", None),
    ("POST", "/jobs/{j}/signal", {"signal": "TERM"}),
    ("POST", "/jobs/{j}/stdin", {"data": "", "eof": True}),
]  # fmt: skip
WITH_BODY = [operation for operation in OPERATIONS if operation[2] is not None]


def name(operation: tuple[str, str, object]) -> str:
    return f"{operation[0]} {operation[1].split('?')[0]}"


@pytest.fixture(scope="module")
def job_id(box: Box) -> str:
    return box.run("true")["job_id"]


# -- without a key


def test_the_root_tells_service_version_and_status(rest: Rest) -> None:
    answer = rest.with_key(None).get("/").expect(200)
    assert answer.keys() >= {"service", "version", "status"}


def test_health_is_healthy(rest: Rest) -> None:
    assert rest.with_key(None).get("/health").expect(200) == {"status": "healthy"}


def test_ready_needs_no_key(rest: Rest) -> None:
    rest.with_key(None).get("/ready").expect(200)


def test_metrics_need_no_key_and_are_prometheus_text(rest: Rest) -> None:
    answer = rest.with_key(None).get("/metrics")
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/plain")
    assert b"# TYPE orchard_" in answer.body


@pytest.mark.parametrize("key", [None, "", "wrong"], ids=["no key", "empty key", "wrong key"])
@pytest.mark.parametrize("operation", OPERATIONS, ids=name)
def test_everything_else_needs_the_key(
    rest: Rest, box: Box, job_id: str, operation: tuple[str, str, object], key: str | None
) -> None:
    method, path, body = operation
    answer = rest.with_key(key).request(method, path.format(s=box.id, j=job_id), body)
    assert (answer.status, answer.code) == (401, "unauthorized")


def test_a_key_is_checked_before_the_request_is_read(rest: Rest) -> None:
    assert rest.with_key("wrong").post("/sandboxes", {"nonsense": 1}).status == 401


# -- every answer


@pytest.mark.parametrize(
    "path", ["/", "/health", "/ready", "/resources", "/sandboxes", "/sandboxes/nope", "/nope"]
)
def test_every_answer_tells_the_version(rest: Rest, path: str) -> None:
    for asker in (rest, rest.with_key("wrong")):
        assert asker.get(path).headers["x-orchard-version"].split(".")[0].isdigit()


def test_every_answer_has_a_request_id(rest: Rest) -> None:
    first, second = rest.get("/health"), rest.get("/sandboxes/nope")
    assert first.headers["x-request-id"] != second.headers["x-request-id"]
    assert second.json["request_id"] == second.headers["x-request-id"]


def test_a_request_id_of_the_client_is_kept(rest: Rest) -> None:
    answer = rest.raw("GET", "/sandboxes/nope", headers={"X-Request-ID": "mine-123"})
    assert answer.headers["x-request-id"] == answer.json["request_id"] == "mine-123"


def test_a_request_id_cannot_smuggle_headers(rest: Rest) -> None:
    answer = rest.raw("GET", "/health", headers={"X-Request-ID": "a" * 5000})
    assert len(answer.headers["x-request-id"]) < 300


def is_error_body(answer: Answer) -> bool:
    body = answer.json
    return (
        body.keys() >= {"detail", "code", "retryable", "request_id"}
        and isinstance(body["detail"], str)
        and bool(body["detail"])
        and isinstance(body["code"], str)
        and isinstance(body["retryable"], bool)
    )


def test_errors_have_one_shape(rest: Rest, box: Box) -> None:
    errors = {
        401: rest.with_key(None).get("/sandboxes"),
        404: rest.get("/sandboxes/never-seen"),
        405: rest.request("PUT", "/sandboxes"),
        400: box.post_exec("true", cwd="/nope", wait=True),
        408: rest.get(f"/jobs/{box.start('sleep 2', concurrent=True)}/wait", timeout=0.05),
        409: rest.post("/sandboxes", {"image": "other", "sandbox_id": box.id}),
        422: rest.post("/sandboxes", {}),
    }
    for status, answer in errors.items():
        assert answer.status == status
        assert is_error_body(answer), answer.body


def test_an_unknown_path_is_404_in_the_same_shape(rest: Rest) -> None:
    answer = rest.get("/no/such/path")
    assert answer.status == 404
    assert is_error_body(answer)


# -- requests


@pytest.mark.parametrize("operation", WITH_BODY, ids=name)
def test_unknown_fields_are_refused(
    rest: Rest, box: Box, job_id: str, operation: tuple[str, str, dict]
) -> None:  # type: ignore[type-arg]
    method, path, body = operation
    answer = rest.request(method, path.format(s=box.id, j=job_id), {**body, "surprise": 1})
    assert (answer.status, answer.code) == (422, "invalid_request")
    assert "surprise" in answer.json["detail"]


@pytest.mark.parametrize("operation", WITH_BODY, ids=name)
def test_a_body_that_is_no_json_is_refused(
    rest: Rest, box: Box, job_id: str, operation: tuple[str, str, dict]
) -> None:  # type: ignore[type-arg]
    method, path, _ = operation
    target = path.format(s=box.id, j=job_id)
    for body in (b"{", b"[]", b'"text"', b"\xff"):
        answer = rest.raw(method, target, body, {"Content-Type": "application/json"})
        assert answer.status == 422, answer
        assert is_error_body(answer)


@pytest.mark.parametrize(
    "field", ["image", "block_network", "cpu", "memory", "labels", "env", "ttl_seconds", "pids"]
)
def test_a_field_of_the_wrong_type_is_named(rest: Rest, field: str) -> None:
    answer = rest.post("/sandboxes", {"image": "host", field: ["nonsense"]})
    assert answer.status == 422
    assert field in answer.json["detail"]


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        ({"command": "a\0b"}, "command: must not contain a NUL byte; command: Input should be a valid array"),
        ({"command": 5}, "command: Input should be a valid string; command: Input should be a valid array"),
        ({"command": ["a", 5]}, "command: Input should be a valid string; command.1: Input should be a valid string"),
    ],
)  # fmt: skip
def test_a_field_of_several_kinds_is_named_as_its_user_knows_it(
    box: Box, body: dict[str, object], detail: str
) -> None:
    assert box.rest.post(f"{box.path}/exec", body).json["detail"] == detail


def test_a_field_called_path_is_named(box: Box) -> None:
    answer = box.rest.post(f"{box.path}/files", {"path": "", "content": ""})
    assert answer.json["detail"].startswith("path: ")


def test_null_means_not_given(rest: Rest, images: Images) -> None:
    optional = [
        "sandbox_id",
        "cpu",
        "memory",
        "timeout",
        "labels",
        "env",
        "working_dir",
        "user",
        "disk",
        "pids",
    ]
    body = {
        "image": images.full,
        **dict.fromkeys([*optional, "ttl_seconds", "heartbeat_timeout", "idempotency_key"]),
    }
    box = Box(rest, rest.post("/sandboxes", body).expect()["sandbox_id"])
    box.wait_ready()
    exec_fields = [
        "timeout_seconds",
        "cwd",
        "env",
        "login_shell",
        "stdin",
        "user",
        "grace_seconds",
        "on_disconnect",
    ]
    more = ["job_id", "max_output_bytes", "background", "concurrent", "stdin_open"]
    assert box.run("echo ok", **dict.fromkeys(exec_fields + more))["stdout"] == "ok\n"
    box.write("/tmp/f", b"x", mode=None)
    answer = box.apply_patch(
        "--- a/f\n+++ b/f\n@@ -1 +1 @@\n-x\n+y\n", timeout_seconds=None, cwd=None, strip=None
    )
    answer.expect(200)
    rest.patch(box.path, {"ttl_seconds": None, "labels": None}).expect(200)
    box.delete()


# -- sandboxes


def test_create_answers_at_once_with_the_published_fields(rest: Rest, images: Images) -> None:
    body = {"image": images.full, "block_network": True, "cpu": "500m", "memory": "256Mi", "timeout": 60}
    answer = rest.post("/sandboxes", body).expect()
    assert answer.keys() >= CREATE_FIELDS
    assert answer["status"] == "pending"
    assert {k: answer[k] for k in body} == body
    rest.delete(f"/sandboxes/{answer['sandbox_id']}").expect(200)


def test_get_answers_with_the_same_and_times_reason_and_labels(new_box: NewBox) -> None:
    info = new_box(labels={"a": "b"}).info()
    assert info.keys() >= CREATE_FIELDS | {"created_at", "ready_at", "reason", "labels"}
    assert (info["status"], info["labels"], info["reason"]) == ("ready", {"a": "b"}, None)
    assert info["created_at"] <= info["ready_at"]


def test_wait_answers_with_the_sandbox_when_it_is_ready(rest: Rest, images: Images) -> None:
    box = rest.submit(images.full)
    info = rest.get(f"{box.path}/wait", timeout=60).expect(200)
    assert (info["status"], info["ready"], info["sandbox_id"]) == ("ready", True, box.id)
    assert rest.get(f"{box.path}/wait").expect(200)["status"] == "ready", "it may be asked again"
    box.delete()


def test_delete_answers_with_status_and_id(rest: Rest, images: Images) -> None:
    box = rest.create(images.full)
    assert rest.delete(box.path).expect(200) == {"status": "deleted", "sandbox_id": box.id}


def test_heartbeat_needs_no_body(fresh: Box) -> None:
    assert fresh.rest.raw("POST", f"{fresh.path}/heartbeat").expect(200)["sandbox_id"] == fresh.id


@pytest.mark.parametrize("method_and_path", [("GET", ""), ("GET", "/wait"), ("DELETE", ""), ("POST", "/heartbeat"),
                                             ("GET", "/jobs"), ("GET", "/stats"), ("GET", "/logs")])  # fmt: skip
def test_an_id_never_seen_is_404(rest: Rest, method_and_path: tuple[str, str]) -> None:
    method, path = method_and_path
    answer = rest.request(method, f"/sandboxes/{new_id()}{path}")
    assert (answer.status, answer.code) == (404, "sandbox_not_found")


@pytest.mark.parametrize("text", ["..", "%2e%2e", "a%2Fb", "A", "a_b", "%00", "a" * 100, "%F0%9F%8C%B3"])
def test_an_id_in_a_path_is_never_taken_raw(rest: Rest, text: str) -> None:
    answer = rest.get(f"/sandboxes/{text}/stats")
    assert answer.status in (404, 422)
    assert is_error_body(answer)


# -- files, exec and patch: the published shapes


def test_exec_without_wait_answers_with_job_id_and_status(fresh: Box) -> None:
    answer = fresh.rest.post(f"{fresh.path}/exec", {"command": "true", "timeout_seconds": 30}).expect()
    assert answer.keys() >= {"job_id", "status"}
    assert answer["status"] in ("queued", "running")


def test_files_have_the_published_shapes(box: Box, place: str) -> None:
    written = box.rest.post(f"{box.path}/files", {"path": f"{place}/f", "content": "aGVsbG8="}).expect()
    assert written.items() >= {"success": True, "path": f"{place}/f", "size": 5}.items()
    read = box.rest.get(f"{box.path}/files", path=f"{place}/f").expect(200)
    assert read.items() >= {"path": f"{place}/f", "content": "aGVsbG8=", "size": 5}.items()
    listing = box.rest.get(f"{box.path}/files/list", path=place).expect(200)
    assert listing["path"] == place
    (entry,) = listing["files"]
    assert entry.keys() >= {"name", "type", "size", "modified"}
    assert (entry["name"], entry["type"], entry["size"]) == ("f", "file", 5)
    assert base64.b64decode(read["content"]) == b"hello"


def test_apply_patch_has_the_published_shape(box: Box, place: str) -> None:
    patch = "--- /dev/null\n+++ b/new\n@@ -0,0 +1 @@\n+x\n"
    answer = box.apply_patch(patch, timeout_seconds=30, cwd=place).expect(200)
    assert answer.keys() >= {"success", "stdout", "stderr", "exit_code"}
    assert (answer["success"], answer["exit_code"]) == (True, 0)


def test_resources_tell_capacity_and_use(rest: Rest, box: Box) -> None:
    resources = rest.get("/resources").expect(200)
    assert resources["cpu_cores"] > 0
    assert 0 < resources["memory_available_bytes"] <= resources["memory_bytes"]
    assert resources["sandboxes"]["ready"] >= 1


def test_a_large_request_body_is_refused_not_swallowed(box: Box) -> None:
    answer = box.rest.raw("POST", f"{box.path}/exec", b"x" * 10, {"Content-Type": "application/json"})
    assert answer.status == 422
