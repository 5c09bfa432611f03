"""What the service answers: shapes, ids, keys, errors."""

from __future__ import annotations

import asyncio

import pytest

from orchard.env.contract import API_VERSION
from tests.env.orchestrator.asgi import Caller
from tests.env.orchestrator.conftest import Running, Start

ERROR_FIELDS = {"detail", "code", "retryable", "infra", "request_id"}


async def test_every_answer_carries_the_version_and_a_request_id(call: Caller) -> None:
    for target in ("/health", "/sandboxes", "/sandboxes/none", "/nowhere"):
        reply = await call.get(target)
        assert reply.headers["x-orchard-version"] == API_VERSION
        assert reply.headers["x-request-id"]


async def test_a_sane_request_id_is_kept_and_another_replaced(call: Caller) -> None:
    given = await call.get("/nowhere", headers={"x-request-id": "trace-1"})
    assert given.headers["x-request-id"] == given.json["request_id"] == "trace-1"
    bad = await call.get("/nowhere", headers={"x-request-id": 'x" injected'})
    assert "injected" not in bad.headers["x-request-id"]


@pytest.mark.parametrize("target", ["/", "/health", "/ready", "/metrics", "/openapi.json", "/docs"])
async def test_public_paths_need_no_key(running: Running, target: str) -> None:
    assert (await running.caller(None).get(target)).status == 200


@pytest.mark.parametrize(
    "target", ["/sandboxes", "/resources", "/jobs/x", "/nowhere", "//health", "/health/"]
)
async def test_everything_else_needs_a_key(running: Running, target: str) -> None:
    assert (await running.caller(None).get(target)).expect(401)["code"] == "unauthorized"
    assert (await Caller(running.call.app, "wrong").get(target)).expect(401)["code"] == "unauthorized"


async def test_errors_have_one_shape(call: Caller) -> None:
    box = await call.ready()
    replies = {
        404: await call.get("/nowhere"),
        405: await call("PUT", "/sandboxes"),
        422: await call.post("/sandboxes", {"image": "x", "color": "red"}),
        400: await call.post(f"/sandboxes/{box}/exec", {"command": "pwd", "cwd": "/no/such", "wait": True}),
        409: await call.post("/sandboxes", {"image": "other", "sandbox_id": box}),
    }
    for status, reply in replies.items():
        assert set(reply.expect(status)) >= ERROR_FIELDS
    assert "color" in replies[422].json["detail"]


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'{"image": 1}', b"\xff", b'{"image": "x", "timeout": -1}', b'"x"']
)
async def test_a_malformed_body_is_a_422_that_does_nothing(running: Running, body: bytes) -> None:
    assert (await running.call.post("/sandboxes", body)).expect(422)["code"] == "invalid_request"
    assert (await running.call.get("/sandboxes")).expect()["sandboxes"] == []


@pytest.mark.parametrize(
    "target",
    ["/sandboxes?limit=0", "/sandboxes?status=dreaming", "/sandboxes?cursor=%21", "/sandboxes?label=novalue",
     "/sandboxes?label=a=1&label=a=2"],
)  # fmt: skip
async def test_a_malformed_query_is_a_422(call: Caller, target: str) -> None:
    assert (await call.get(target)).expect(422)["code"] == "invalid_request"


async def test_other_owners_look_like_nobody(running: Running) -> None:
    alice, bob = running.caller("alice"), running.caller("bob")
    await alice.ready("hers")
    job = await alice.run("hers", "true", job_id="job-a")
    for target in (
        "/sandboxes/hers",
        "/sandboxes/hers/wait",
        "/sandboxes/hers/logs",
        f"/jobs/{job['job_id']}",
    ):
        theirs, unknown = (
            await bob.get(target),
            await bob.get(target.replace("hers", "none").replace("job-a", "job-n")),
        )
        assert theirs.status == unknown.status == 404
        assert theirs.json["code"] == unknown.json["code"]
    assert (await bob.delete("/sandboxes/hers")).status == 404
    assert (await bob.get("/sandboxes")).expect()["sandboxes"] == []
    assert (await bob.post("/sandboxes", {"image": "x", "sandbox_id": "hers"})).expect(409)[
        "code"
    ] == "conflict"
    assert (await running.call.get("/sandboxes/hers")).expect()["owner"] == "alice"
    assert (await running.call.get("/jobs/job-a")).expect()["sandbox_id"] == "hers"


async def test_a_quota_counts_live_sandboxes(running: Running) -> None:
    bob = running.caller("bob")
    await bob.ready("b1")
    await bob.ready("b2")
    assert (await bob.post("/sandboxes", {"image": "x"})).expect(429)["retryable"] is True
    (await bob.delete("/sandboxes/b1")).expect()
    await bob.ready("b3")


async def test_the_limit_of_sandboxes_is_a_503_with_retry_after(start: Start) -> None:
    running = await start(max_sandboxes=1)
    await running.call.ready()
    reply = await running.call.post("/sandboxes", {"image": "x"})
    assert reply.expect(503)["code"] == "overloaded"
    assert int(reply.headers["retry-after"]) >= 1


async def test_ids_and_keys_make_creation_idempotent(call: Caller) -> None:
    first = (await call.post("/sandboxes", {"image": "x", "idempotency_key": "k"})).expect()
    again = (await call.post("/sandboxes", {"image": "x", "idempotency_key": "k", "cpu": None})).expect()
    assert first["sandbox_id"] == again["sandbox_id"]
    assert (await call.post("/sandboxes", {"image": "y", "idempotency_key": "k"})).status == 409
    (await call.delete(f"/sandboxes/{first['sandbox_id']}")).expect()
    assert (await call.post("/sandboxes", {"image": "x", "idempotency_key": "k"})).status == 409


async def test_concurrent_creates_of_one_id_make_one_sandbox(running: Running) -> None:
    body = {"image": "x", "sandbox_id": "one"}
    replies = await asyncio.gather(*(running.call.post("/sandboxes", body) for _ in range(20)))
    assert {reply.status for reply in replies} == {200}
    await running.call.ready("one")
    assert running.runtime.created == ["one"]


async def test_batches_answer_in_order_with_errors_of_their_own(call: Caller) -> None:
    entries = [
        {"image": "x", "sandbox_id": "a"},
        {"image": "y", "sandbox_id": "a"},
        {"image": "x", "sandbox_id": "b"},
    ]
    results = (await call.post("/sandboxes/batch", {"sandboxes": entries})).expect()["results"]
    assert [entry["sandbox"] and entry["sandbox"]["sandbox_id"] for entry in results] == ["a", None, "b"]
    assert results[1]["error"]["code"] == "conflict"


async def test_pages_hold_every_sandbox_once(call: Caller) -> None:
    names = [f"s{number}" for number in range(7)]
    for name in names:
        await call.ready(name, labels={"run": "1", "odd": str(int(name[1]) % 2)})
    seen, cursor = [], ""
    while True:
        page = (await call.get(f"/sandboxes?label=run=1&limit=3{cursor}")).expect()
        seen += [entry["sandbox_id"] for entry in page["sandboxes"]]
        if page["next_cursor"] is None:
            break
        cursor = f"&cursor={page['next_cursor']}"
    assert seen == names
    odd = (await call("DELETE", "/sandboxes?label=run=1&label=odd=1")).expect()["sandbox_ids"]
    assert odd == ["s1", "s3", "s5"]
    assert len((await call.get("/sandboxes")).expect()["sandboxes"]) == 4
    assert len((await call.get("/sandboxes?status=deleted")).expect()["sandboxes"]) == 3


async def test_without_keys_no_web_page_gets_in(start: Start) -> None:
    running = await start()
    running.orchestrator.keys.open = True
    anyone = running.caller(None)
    assert (await anyone.get("/sandboxes")).status == 200
    assert (await anyone.get("/sandboxes", headers={"host": "localhost:80"})).status == 200
    assert (await anyone.get("/sandboxes", headers={"host": "[::1]:80"})).status == 200
    assert (await anyone.get("/sandboxes", headers={"origin": "http://127.0.0.1:8000"})).status == 200
    for headers in ({"host": "evil.example:8000"}, {"origin": "http://evil.example"}, {"origin": "null"}):
        assert (await anyone.get("/sandboxes", headers=headers)).expect(403)["code"] == "forbidden"


async def test_metrics_count_by_route_not_by_id(call: Caller) -> None:
    box = await call.ready("a-certain-one")
    await call.run(box, "true")
    await call.run(box, "false")
    text = (await call.get("/metrics")).body.decode()
    assert 'orchard_jobs_finished_total{status="succeeded"} 1.0' in text
    assert 'orchard_jobs_finished_total{status="failed"} 1.0' in text
    assert 'orchard_sandboxes{status="ready"} 1.0' in text
    assert 'route="/sandboxes/{sandbox_id}/exec"' in text
    assert box not in text


async def test_methods_and_paths_of_any_name_make_no_series_of_their_own(call: Caller) -> None:
    for method in ("BREW", "WHEN"):
        await call(method, f"/pot-{method}")
    text = (await call.get("/metrics")).body.decode()
    assert 'orchard_http_requests_total{method="other",route="-",status="404"} 2.0' in text
    assert "BREW" not in text
    assert "pot" not in text


async def test_the_document_names_every_route_its_key_and_its_errors(call: Caller) -> None:
    document = (await call.get("/openapi.json")).expect()
    assert "PatchRequest" in document["components"]["schemas"]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert operation["summary"], path
            if "{sandbox_id}" in path:
                assert {"401", "404", "422", "503"} <= set(operation["responses"]), (method, path)
                assert operation["security"] == [{"key": []}]
    body = document["paths"]["/sandboxes/{sandbox_id}/exec"]["post"]["requestBody"]
    assert body["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/ExecRequest"}


async def test_a_body_beyond_the_limit_is_refused_by_its_announced_length(call: Caller) -> None:
    await call.ready()
    for path, size in (("exec", 65 << 20), ("apply_patch", 65 << 20), ("files", 400 << 20)):
        headers = {"content-length": str(size)}
        reply = await call.post(f"/sandboxes/box/{path}", b"{", headers=headers, more=True)
        assert reply.expect(413)["code"] == "too_large"
