"""Quotas of keys, the keys file read again, the audit log, and that no key is ever written down."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode

import pytest
from websockets.sync.client import connect

from tests.conformance.conftest import end_and_check
from tests.conformance.runtimes import RuntimeCase
from tests.support.keys import Tenant, write_keys_file
from tests.support.rest import Box, Rest
from tests.support.service import Service
from tests.support.waiting import eventually

IMAGE = "host"
ROOT = Tenant("root", role="admin")
CORES = Tenant("cores", max_cpu="1500m")
BYTES = Tenant("bytes", max_memory="512Mi")
RATE = Tenant("rate", creates_per_minute=2)


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    return write_keys_file(tmp_path / "keys.json", [ROOT, CORES, BYTES, RATE])


@pytest.fixture
def served(runtime: RuntimeCase, tmp_path: Path, keys_file: Path) -> Iterator[Service]:
    arguments = ("--keys-file", str(keys_file), "--audit-log", str(tmp_path / "audit.jsonl"))
    service = Service(tmp_path / "state", arguments=(*runtime.serve_arguments, *arguments)).start()
    yield service
    end_and_check(service, runtime)


def refused(rest: Rest, **fields: object) -> dict:  # type: ignore[type-arg]
    """The error of a creation that exceeds a quota."""
    answer = rest.post("/sandboxes", {"image": IMAGE, **fields})
    assert (answer.status, answer.code) == (429, "quota_exceeded"), answer
    return answer.json


def test_cores_are_summed_over_live_sandboxes(served: Service) -> None:
    rest = served.rest.with_key(CORES.key)
    first = rest.create(IMAGE, cpu="1")
    assert "1 are in use" in refused(rest, cpu="600m")["detail"]
    rest.create(IMAGE, cpu="500m")
    first.delete()
    rest.create(IMAGE, cpu=1)


def test_memory_is_summed_over_live_sandboxes(served: Service) -> None:
    rest = served.rest.with_key(BYTES.key)
    first = rest.create(IMAGE, memory="256Mi")
    assert refused(rest, memory="257Mi")["retryable"] is True
    first.delete()
    rest.create(IMAGE, memory="257Mi")


def test_more_than_the_whole_quota_is_not_to_be_tried_again(served: Service) -> None:
    assert refused(served.rest.with_key(BYTES.key), memory="1Gi")["retryable"] is False


@pytest.mark.parametrize(("tenant", "field"), [(CORES, "cpu"), (BYTES, "memory")])
def test_a_sandbox_that_does_not_say_its_share_is_refused_with_what_to_give(
    served: Service, tenant: Tenant, field: str
) -> None:
    answer = served.rest.with_key(tenant.key).post("/sandboxes", {"image": IMAGE})
    assert answer.status == 422
    assert f"give {field}" in answer.json["detail"]


def test_creations_are_limited_per_minute_with_an_honest_retry_after(served: Service) -> None:
    rest = served.rest.with_key(RATE.key)
    for _ in range(2):
        rest.create(IMAGE).delete()
    answer = rest.post("/sandboxes", {"image": IMAGE})
    assert (answer.status, answer.code) == (429, "quota_exceeded")
    assert 1 <= int(answer.headers["retry-after"]) <= 30
    assert 0 < answer.json["retry_after_s"] <= int(answer.headers["retry-after"])


def test_a_repeated_creation_uses_no_quota_again(served: Service) -> None:
    rest = served.rest.with_key(RATE.key)
    body = {"image": IMAGE, "idempotency_key": "once"}
    ids = {rest.post("/sandboxes", body).expect()["sandbox_id"] for _ in range(4)}
    assert len(ids) == 1
    Box(rest, ids.pop()).wait_ready()


def test_a_batch_is_admitted_one_by_one(served: Service) -> None:
    rest = served.rest.with_key(RATE.key)
    results = rest.post("/sandboxes/batch", {"sandboxes": [{"image": IMAGE}] * 3}).expect()["results"]
    assert [entry["error"] and entry["error"]["code"] for entry in results] == [None, None, "quota_exceeded"]


def test_what_lives_counts_after_a_restart(served: Service) -> None:
    served.rest.with_key(BYTES.key).create(IMAGE, memory="400Mi")
    served.kill()
    served.start()
    refused(served.rest.with_key(BYTES.key), memory="200Mi")


def test_an_admin_without_quotas_is_not_limited(served: Service) -> None:
    served.rest.with_key(ROOT.key).create(IMAGE)


def test_refusals_are_counted_by_quota(served: Service) -> None:
    refused(served.rest.with_key(BYTES.key), memory="1Gi")
    assert 'orchard_quota_refusals_total{quota="max_memory"} 1.0' in served.rest.get("/metrics").body.decode()


def reload(served: Service, said: str) -> None:
    """SIGHUP; returns when the log tells what came of it."""
    served.process.send_signal(signal.SIGHUP)
    eventually(lambda: said in served.log(), f"the log says {said!r}")


def test_sighup_reads_the_keys_file_again(served: Service, keys_file: Path) -> None:
    new = Tenant("new")
    write_keys_file(keys_file, [ROOT, new])
    reload(served, "was read again: 3 keys are known")
    assert served.rest.with_key(new.key).get("/sandboxes").status == 200
    assert served.rest.with_key(RATE.key).get("/sandboxes").status == 401
    assert served.rest.get("/sandboxes").status == 200


def test_a_bad_keys_file_keeps_the_old_keys_and_says_why(served: Service, keys_file: Path) -> None:
    keys_file.write_text(json.dumps([{**RATE.entry(), "max_cpu": "lots"}]))
    reload(served, "the old keys stay")
    assert "entry 1 (rate): max_cpu" in served.log()
    assert served.rest.with_key(RATE.key).get("/sandboxes").status == 200


def test_sighup_goes_on_in_a_new_audit_log(served: Service, tmp_path: Path) -> None:
    (tmp_path / "audit.jsonl").rename(tmp_path / "audit.1")
    reload(served, "was read again")
    served.rest.post("/sandboxes/none/heartbeat")
    (line,) = (tmp_path / "audit.jsonl").read_text().splitlines()
    assert json.loads(line)["status"] == 404


def test_an_opened_terminal_and_one_with_a_refused_key_are_in_the_audit_log(
    served: Service, tmp_path: Path
) -> None:
    box = served.rest.with_key(RATE.key).create(IMAGE)
    for key in (RATE.key, "stolen"):
        query = urlencode({"api_key": key})
        url = f"{served.base_url.replace('http', 'ws', 1)}{box.path}/exec/pty?{query}"
        with connect(url) as socket:
            if key == RATE.key:
                socket.send("no frame")
            assert json.loads(socket.recv())["type"] == "error"
    text = (tmp_path / "audit.jsonl").read_text()
    opened, refused = (json.loads(line) for line in text.splitlines()[-2:])
    assert (opened["owner"], opened["method"], opened["sandbox_id"], opened["status"]) == (
        "rate", "WEBSOCKET", box.id, 101,
    )  # fmt: skip
    assert (refused["owner"], refused["status"], refused["path"]) == (None, 401, f"{box.path}/exec/pty")
    assert "stolen" not in text


def test_no_key_is_in_any_log_audit_line_metric_or_state(served: Service, tmp_path: Path) -> None:
    box = served.rest.with_key(RATE.key).create(IMAGE)
    box.run("true")
    wrong = Tenant("nobody")
    for key in (RATE.key, wrong.key):
        rest = served.rest.with_key(key)
        rest.get("/sandboxes", api_key=key)
        rest.post("/sandboxes", {"image": 5}, api_key=key)
        rest.request("GET", f"/jobs/x?api_key={key}")
    reload(served, "was read again")
    assert served.api_key is not None
    places = {
        "log": served.log(),
        "stdout": served.out_path.read_text(),
        "audit": (tmp_path / "audit.jsonl").read_text(),
        "metrics": served.rest.get("/metrics").body.decode(),
        "state": b"".join(p.read_bytes() for p in served.state_dir.glob("orchestrator.*")).decode("latin-1"),
    }
    assert '"status": 401' in places["audit"]
    keys = (RATE.key, wrong.key, served.api_key)
    assert [name for name, text in places.items() for key in keys if key in text] == []
