"""Redis away, wiped or started anew while services share a state directory: nothing is lost, nothing is deleted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.replicas.conftest import NewReplicas
from tests.support.replicas import Replicas
from tests.support.rest import Box, new_id
from tests.support.waiting import eventually

IMAGE = "host"


def metric(box: Box, name: str) -> float:
    lines = box.rest.get("/metrics").body.decode().splitlines()
    return float(next(line for line in lines if line.startswith(name + " ")).split()[1])


def keys(replicas: Replicas) -> set[bytes]:
    """Of sandboxes, as Redis has them."""
    client = replicas.redis.client
    found: set[bytes] = set()
    for name in client.keys("orchard:*:sandboxes"):
        found.update(client.hkeys(name))
    return found


def test_redis_goes_and_comes_and_work_goes_on(pair: Replicas) -> None:
    one, other = (service.rest for service in pair.services)
    box = one.create(IMAGE)
    agent = box.agent_start()
    job_id = box.running("sleep 2; echo done")

    pair.redis.wipe()
    assert box.id in [each["sandbox_id"] for each in other.get("/sandboxes").expect(200)["sandboxes"]]
    eventually(lambda: box.id.encode() in keys(pair), "Redis is told anew")

    pair.redis.kill()
    unseen = one.create(IMAGE)
    assert Box(other, unseen.id).out("echo through the other") == "through the other\n"
    assert other.wait_job(job_id)["stdout"] == "done\n"
    named = {"image": IMAGE, "sandbox_id": new_id()}
    assert {rest.post("/sandboxes", named).status for rest in (one, other)} == {200}
    eventually(lambda: metric(box, "orchard_redis_up") == 0, "the service tells that Redis is away")
    assert any("Redis does not answer" in service.log() for service in pair.services)

    pair.redis.start()
    everything = {box.id.encode(), unseen.id.encode(), named["sandbox_id"].encode()}
    eventually(lambda: keys(pair) >= everything, "Redis is told everything")
    eventually(lambda: metric(box, "orchard_redis_up") == 1, "the service tells that Redis is back")
    assert Box(other, box.id).agent_start() == agent


def test_a_frozen_redis_holds_nobody(pair: Replicas) -> None:
    one, other = (service.rest for service in pair.services)
    pair.redis.freeze()
    try:
        box = one.create(IMAGE)
        assert Box(other, box.id).out("echo served") == "served\n"
    finally:
        pair.redis.thaw()


def test_redis_wiped_while_all_were_stopped_is_no_reason_to_delete(pair: Replicas) -> None:
    box = pair.services[0].rest.create(IMAGE)
    agent = box.agent_start()
    job = box.run("echo kept")
    for service in pair.services:
        assert service.stop() == 0
    pair.redis.wipe()
    for service in pair.services:
        service.start()
    for service in pair.services:
        assert Box(service.rest, box.id).agent_start() == agent
        assert service.rest.job(job["job_id"]) == job


def test_a_death_without_redis_is_taken_over_all_the_same(pair: Replicas) -> None:
    dying, other = pair.services
    box = dying.rest.create(IMAGE)
    job_id = box.running("sleep 1; echo done")
    pair.redis.kill()
    dying.kill()
    assert other.rest.wait_job(job_id)["stdout"] == "done\n"
    # Redis is not there when the service starts, either.
    dying.start()
    assert Box(dying.rest, box.id).alive()


def serve(state_dir: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "orchard.cli.main",
        "serve",
        "--port",
        "0",
        "--state-dir",
        str(state_dir),
    ]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=60)


def test_a_service_alone_and_services_that_share_keep_out_of_each_others_way(
    new_replicas: NewReplicas,
) -> None:
    replicas = new_replicas(count=1)
    (service,) = replicas.services
    refused = serve(replicas.state_dir)
    assert refused.returncode != 0 and "in use by another service" in refused.stderr
    box = service.rest.create(IMAGE)
    assert service.stop() == 0
    refused = serve(replicas.state_dir)
    assert refused.returncode != 0 and "--redis-url" in refused.stderr
    service.start()
    assert Box(service.rest, box.id).alive()
