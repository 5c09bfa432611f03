"""Deleting a sandbox frees everything that it was."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.conformance.conftest import NewBox
from tests.conformance.runtimes import Images, RuntimeCase
from tests.support.machine import Leftovers, network_devices, pids_with_argument
from tests.support.rest import Rest, new_id
from tests.support.service import Service
from tests.support.waiting import eventually

WAYS_TO_STAY = {
    "idle": "true",
    "a background process": "sleep {tag} & exit 0",
    "daemons": "for i in 1 2 3; do (setsid nohup sh -c 'trap \"\" TERM HUP; while :; do sleep {tag}; done' "
    ">/dev/null 2>&1 &); done",
    "a deep tree of files": "cd /tmp; for i in $(seq 60); do mkdir d$i; cd d$i; done; touch f; chmod 000 /tmp/d1; "
    "sleep {tag} & exit 0",
    "many files": "cd /tmp; seq 3000 | xargs touch; sleep {tag} & exit 0",
    "odd names and modes": "cd /tmp; mkdir -- -x $'a\\nb'; mkfifo p; ln -s / l; chmod 000 . ; sleep {tag} & exit 0",
    "stopped processes": "sleep {tag} & kill -STOP $!; exit 0",
    "a deleted but open file": "exec 9>/tmp/gone; rm /tmp/gone; head -c 1000000 /dev/zero >&9; sleep {tag} & exit 0",
    "immutable files": "touch /tmp/f; chattr +i /tmp/f 2>/dev/null; sleep {tag} & exit 0",
    "a server": "python3 -m http.server 8080 >/dev/null 2>&1 & sleep {tag} & exit 0",
}


@pytest.mark.unprivileged
@pytest.mark.parametrize("way", WAYS_TO_STAY)
def test_nothing_outlives_deletion(service: Service, runtime: RuntimeCase, new_box: NewBox, way: str) -> None:
    assert runtime.on_this_machine
    tag = f"{random.Random(way).randrange(10**6, 10**7)}.25"
    box = new_box(sandbox_id=new_id("left"))
    box.run(WAYS_TO_STAY[way].format(tag=tag))
    box.delete()
    assert pids_with_argument(tag) == []
    left = Leftovers(new_id(), service.state_dir / "nothing", {box.id})
    assert left.control_groups() == []
    assert list(service.state_dir.rglob(f"*{box.id}*")) == []


@pytest.mark.parametrize(
    "fields", [{"block_network": False}, {"disk": "32Mi"}, {"memory": "64Mi", "cpu": "1", "pids": 50}]
)
def test_nothing_of_its_limits_and_network_outlives_deletion(
    service: Service, new_box: NewBox, fields: dict[str, object]
) -> None:
    before = network_devices()
    box = new_box(sandbox_id=new_id("left"), **fields)
    box.start("sleep 1000")
    during = network_devices() - before
    box.delete()
    eventually(lambda: not during & network_devices() or "block_network" not in fields or
               all(d.startswith("orc") for d in during & network_devices()), "its devices are gone")  # fmt: skip
    assert Leftovers(new_id(), service.state_dir / "nothing", {box.id}).control_groups() == []
    assert list(service.state_dir.rglob(f"*{box.id}*")) == []


@pytest.mark.unprivileged
def test_nothing_of_a_sandbox_deleted_while_it_starts_is_left(
    service: Service, rest: Rest, images: Images
) -> None:
    ids = [new_id("early") for _ in range(24)]

    def come_and_go(sandbox_id: str) -> None:
        rest.post("/sandboxes", {"image": images.full, "sandbox_id": sandbox_id}).expect()
        rest.delete(f"/sandboxes/{sandbox_id}").expect(200)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(come_and_go, ids))
    left = Leftovers(new_id(), service.state_dir, set(ids))
    eventually(lambda: not left.control_groups() + left.directories(), "nothing is left", 30)


@pytest.mark.unprivileged
def test_nothing_of_an_expired_sandbox_is_left(service: Service, new_box: NewBox) -> None:
    box = new_box(sandbox_id=new_id("left"), ttl_seconds=1)
    box.start("sleep 1000", background=True)
    eventually(lambda: box.rest.get(box.path).status == 404, "it expired")
    left = Leftovers(new_id(), service.state_dir, {box.id})
    eventually(lambda: not left.control_groups() + left.directories(), "nothing is left", 30)


def test_nothing_of_a_sandbox_that_could_not_start_is_left(service: Service, rest: Rest) -> None:
    box = rest.submit("dir:/no/such/directory", sandbox_id=new_id("left"))
    rest.get(f"{box.path}/wait", timeout=30)
    left = Leftovers(new_id(), service.state_dir, {box.id})
    eventually(lambda: not left.control_groups() + left.directories(), "nothing is left", 30)


def test_descriptors_and_processes_of_the_service_do_not_grow(
    service: Service, rest: Rest, images: Images
) -> None:
    from tests.support.machine import descendants

    def descriptors_of(pid: int) -> int:
        # User namespaces are made ahead and used again: a store of bounded size, not something held for the dead.
        links = [_link(path) for path in Path(f"/proc/{pid}/fd").glob("*")]
        return sum(link is not None and not link.startswith("user:[") for link in links)

    def held() -> tuple[int, int]:
        family = [service.pid, *descendants(service.pid)]
        return len(family), sum(map(descriptors_of, family))

    def cycle() -> None:
        with rest.sandbox(images.full, block_network=False, disk="32Mi") as box:
            box.out("cat", stdin="x")
            box.run("sleep 60", timeout_seconds=0.2)

    for _ in range(3):
        cycle()
    processes, descriptors = held()
    for _ in range(15):
        cycle()
    eventually(
        lambda: held()[0] <= processes + 1 and held()[1] <= descriptors + 10,
        "nothing is held for those gone",
        10,
    )


def _link(path: Path) -> str | None:
    try:
        return str(path.readlink())
    except OSError:
        return None
