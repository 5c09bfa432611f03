"""Every operation of the OpenAPI document against the running service: requests that follow the document and requests
that break it, with ids of things that exist and of things that do not.

Whatever comes: no server error but the documented 503 with Retry-After and 507, only documented statuses and content
types, bodies as their models say, errors in the one shape, and a request that breaks its model is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import given
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.core.transport import Response
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from tests.fuzz.profile import examples
from tests.support.rest import Box, Rest
from tests.support.service import Service
from tools.reference import METHODS, openapi

schemathesis.serializer.alias("application/x-tar", "application/octet-stream")
DOCUMENT = openapi()
OPERATIONS = [
    (method, path) for path, found in DOCUMENT["paths"].items() for method in METHODS if method in found
]
CHECKS = [
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
]
ERROR_FIELDS = {"detail", "code", "retryable", "infra", "request_id"}
#: No answer may take longer; those that never end are read up to their first piece.
ANSWER_WITHIN_S = 30.0
ENDLESS = (
    "/events",
    "/jobs/{job_id}/stream",
    "/sandboxes/{sandbox_id}/archive",
    "/sandboxes/{sandbox_id}/files/content",
    "/sandboxes/{sandbox_id}/files/watch",
)
PATHS = st.sampled_from(
    ["/tmp/fuzz/file", "/tmp/fuzz", "/etc/passwd", "/proc/self/mem", "/dev/zero", "relative", "/"]
)
#: Nothing that takes long, or that fills the sandbox.
COMMANDS = st.sampled_from(
    ["true", "exit 3", "echo out; echo err >&2", ["printf", "%s", "a"], ["no-such-program"]]
)


@dataclass
class World:
    """What exists: a sandbox that the operations may use, one that they may spoil, and commands."""

    rest: Rest
    box: Box
    doomed: Box
    finished: str = ""
    running: str = ""

    def refresh(self) -> None:
        """What an operation has ended is there again."""
        for name in ("box", "doomed"):
            box = getattr(self, name)
            if self.rest.get(box.path).status != 200:
                setattr(self, name, self.rest.create("host"))
        if not self.finished or self.rest.get(f"/jobs/{self.finished}").status != 200:
            self.box.run("mkdir -p /tmp/fuzz; echo content > /tmp/fuzz/file")
            self.finished = self.box.run("echo out; echo err >&2; exit 3", session="known")["job_id"]
        if not self.running or self.rest.get(f"/jobs/{self.running}").json.get("status") != "running":
            self.running = self.box.running("cat", stdin_open=True, background=True)

    def tidy(self) -> None:
        """What operations have created is gone."""
        kept = {self.box.id, self.doomed.id}
        for sandbox in self.rest.get("/sandboxes").expect(200)["sandboxes"]:
            if sandbox["sandbox_id"] not in kept:
                self.rest.delete(f"/sandboxes/{sandbox['sandbox_id']}").expect(200, 404)


@pytest.fixture(scope="module")
def world(rest: Rest) -> Iterator[World]:
    made = World(rest, rest.create("host"), rest.create("host"))
    yield made
    made.tidy()
    made.box.delete()
    made.doomed.delete()


@pytest.fixture(scope="module")
def schema(service: Service) -> Any:
    loaded = schemathesis.openapi.from_dict(DOCUMENT)
    loaded.config.update(base_url=service.base_url)
    # Every request here carries the key; tests/conformance has what comes without it.
    loaded.config.generation.with_security_parameters = False
    return loaded


@pytest.mark.parametrize(("method", "path"), OPERATIONS, ids=[f"{m.upper()} {p}" for m, p in OPERATIONS])
def test_an_operation_keeps_to_its_document(
    world: World, schema: Any, rest: Rest, method: str, path: str
) -> None:
    world.refresh()
    operation = schema[path][method]

    @examples(12, shrink=False)
    @given(case=_cases(operation, DOCUMENT["paths"][path][method]), data=st.data())
    def attempt(case: Case, data: st.DataObject) -> None:
        _aim(case, world, data)
        response = _answer(case, rest)
        assert response.status_code < 500 or _is_documented(response), (response.status_code, response.text)
        if response.status_code >= 400:
            assert response.json().keys() >= ERROR_FIELDS, response.text
        case.validate_response(response, checks=CHECKS)

    attempt()
    if method in ("post", "delete", "patch"):
        world.tidy()
    assert rest.get("/health").status == 200


def _cases(operation: Any, described: dict[str, Any]) -> st.SearchStrategy[Case]:
    follows = operation.as_strategy(generation_mode=GenerationMode.POSITIVE)
    if "requestBody" not in described and not described.get("parameters"):
        return follows
    return follows | operation.as_strategy(generation_mode=GenerationMode.NEGATIVE)


def _aim(case: Case, world: World, data: st.DataObject) -> None:
    """Point a request at what exists, mostly, and take from it what would only make it long."""
    spoils = case.method in ("DELETE", "PATCH") and case.path.count("/") == 2
    known: dict[str, st.SearchStrategy[str]] = {
        "sandbox_id": st.just(world.doomed.id if spoils else world.box.id),
        # The raw stream of a command that writes nothing has no first piece.
        "job_id": st.sampled_from(
            [world.finished, world.finished if case.path in ENDLESS else world.running]
        ),
        "name": st.just("known"),
    }
    for name in case.path_parameters or {}:
        if name in known and data.draw(st.integers(0, 3)):
            case.path_parameters[name] = data.draw(known[name])
    followed = case.meta is None or case.meta.generation.mode is GenerationMode.POSITIVE
    if followed and isinstance(case.query, dict) and "path" in case.query and data.draw(st.booleans()):
        case.query["path"] = data.draw(PATHS)
    if case.path.endswith("/wait"):
        case.query = {"timeout": 0.2, **(case.query if isinstance(case.query, dict) else {})}
    if isinstance(case.query, dict):
        for name in ("wait", "timeout"):
            with contextlib.suppress(ValueError, TypeError):
                if float(case.query.get(name, "")) > 0.2:
                    case.query[name] = 0.2
    if isinstance(case.body, dict):
        _tame(case.body, followed, data)


def _tame(body: dict[str, Any], followed: bool, data: st.DataObject) -> None:
    if followed and "command" in body:
        body["command"] = data.draw(COMMANDS)
    if followed and "image" in body:
        body["image"] = data.draw(st.sampled_from(["host", "no-such-image:1"]))
    if followed and "path" in body and data.draw(st.booleans()):
        body["path"] = data.draw(PATHS)


def _answer(case: Case, rest: Rest) -> Response:
    """The answer; of one that need not end, what has come first."""
    arguments = case.as_transport_kwargs()
    arguments["headers"] = {**arguments.get("headers", {}), **rest.headers()}
    with requests.request(**arguments, timeout=ANSWER_WITHIN_S, stream=True) as answer:
        if answer.ok and case.method == "GET" and case.path in ENDLESS:
            answer._content = next(answer.iter_content(1 << 16), b"")
            answer._content_consumed = True
        else:
            assert answer.content is not None
        return Response.from_requests(answer, verify=True)


def _is_documented(response: Response) -> bool:
    return response.status_code == 507 or (response.status_code == 503 and "retry-after" in response.headers)
