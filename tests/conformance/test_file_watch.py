"""Following changes of files: what is told, in which order, and how it ends."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from orchard.env.client import SandboxClient
from orchard.env.contract import FileChange
from orchard.env.errors import FileMissing, SandboxDeleted
from tests.conformance.conftest import end_and_check
from tests.conformance.runtimes import Images, RuntimeCase
from tests.conformance.test_archives import archive, member
from tests.support.rest import Box
from tests.support.sdk import Sdk, each
from tests.support.service import Service
from tests.support.waiting import eventually

Change = tuple[str, str]


class Watching:
    """One watch over a connection of its own."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self._response = response

    def next(self) -> dict[str, Any]:
        """The next event, without comments."""
        while True:
            fields = {}
            while line := self._response.readline().decode().rstrip("\n"):
                name, _, value = line.partition(": ")
                fields[name] = value
            if "data" in fields:
                return {**json.loads(fields["data"]), "event": fields["event"]}
            assert fields, "the stream has ended"

    def until(self, kind: str, path: str) -> list[Change]:
        """Types and paths of all events up to this one."""
        found: list[Change] = []
        while not found or found[-1] != (kind, path):
            event = self.next()
            found.append((event["type"], event["path"]))
        return found

    def ended(self) -> bool:
        return self._response.readline() == b""


@contextmanager
def watching(box: Box, path: str, **query: Any) -> Iterator[Watching]:
    """A watch that stands."""
    connection = box.rest.connect()
    connection.timeout = 10
    words = "&".join(f"{name}={value}" for name, value in {"path": path, **query}.items())
    connection.request("GET", f"/sandboxes/{box.id}/files/watch?{words}", headers=box.rest.headers())
    response = connection.getresponse()
    assert response.status == 200, response.read()
    watch = Watching(response)
    assert watch.next()["type"] == "open"
    yield watch
    response.close()
    connection.close()


def test_the_life_of_a_file_is_told(box: Box, place: str) -> None:
    with watching(box, place) as watch:
        box.out(f"cd {place}; echo a > f; chmod 600 f; rm f")
        found = watch.until("removed", f"{place}/f")
    assert found == [
        (kind, f"{place}/f") for kind in ("created", "modified", "written", "attributes", "removed")
    ]


def test_a_move_is_one_event(box: Box, place: str) -> None:
    box.out(f"cd {place}; echo a > old")
    with watching(box, place) as watch:
        box.out(f"mv {place}/old {place}/new")
        event = watch.next()
    assert (event["type"], event["source"], event["path"]) == ("moved", f"{place}/old", f"{place}/new")


def test_what_comes_from_elsewhere_is_created_and_what_goes_there_removed(box: Box, place: str) -> None:
    box.out(f"cd {place}; mkdir in out; touch out/a in/b")
    with watching(box, f"{place}/in") as watch:
        box.out(f"cd {place}; mv out/a in/a; mv in/b out/b")
        assert watch.until("removed", f"{place}/in/b")[0] == ("created", f"{place}/in/a")


def test_below_a_directory_only_when_asked_for(box: Box, place: str) -> None:
    box.out(f"mkdir -p {place}/d")
    with watching(box, place) as flat, watching(box, place, recursive="true") as deep:
        box.out(f"touch {place}/d/x; rm {place}/d/x; touch {place}/end")
        assert ("created", f"{place}/d/x") in deep.until("created", f"{place}/end")
        assert {path for _, path in flat.until("created", f"{place}/end")} <= {f"{place}/d", f"{place}/end"}


def test_what_a_new_directory_holds_is_told_whole(box: Box, place: str) -> None:
    with watching(box, place, recursive="true") as watch:
        box.out(f"cd {place}; mkdir -p a/b/c; touch a/b/c/f; i=0; while [ $i -lt 50 ]; do mkdir -p n$i/m; touch n$i/m/f;"
                " i=$((i+1)); done; touch end")  # fmt: skip
        # Deeper ones are told when they are found, which may be after `end`.
        wanted = {f"{place}/a/b/c/f", *(f"{place}/n{i}/m/f" for i in range(50))}
        told: list[str] = []
        while not wanted <= set(told):
            event = watch.next()
            if event["type"] == "created":
                told.append(event["path"])
        assert len(told) == len(set(told))


def test_a_directory_that_was_moved_is_followed_under_its_new_name(box: Box, place: str) -> None:
    box.out(f"mkdir -p {place}/a/in")
    with watching(box, place, recursive="true") as watch:
        box.out(f"cd {place}; mv a b; touch b/in/f")
        assert watch.until("created", f"{place}/b/in/f")[0] == ("moved", f"{place}/b")


def test_a_directory_that_left_is_not_followed(box: Box, place: str) -> None:
    box.out(f"mkdir -p {place}/w/a {place}/out")
    with watching(box, f"{place}/w", recursive="true") as watch:
        box.out(f"cd {place}; mv w/a out/a")
        watch.until("removed", f"{place}/w/a")
        box.out(f"touch {place}/out/a/f {place}/w/end")
        assert watch.until("created", f"{place}/w/end") == [("created", f"{place}/w/end")]


def test_one_file_is_watched_through_being_replaced(box: Box, place: str) -> None:
    box.out(f"cd {place}; echo 1 > f")
    with watching(box, f"{place}/f") as watch:
        box.out(f"cd {place}; echo x > other; echo 2 > new; mv new f; echo 3 >> f; rm f")
        found = watch.until("removed", f"{place}/f")
    assert found == [(kind, f"{place}/f") for kind in ("created", "modified", "written", "removed")]


def test_a_file_of_the_image_is_watched_through_its_first_change(fresh: Box) -> None:
    path = fresh.out("ls -d /etc/passwd").strip()
    with watching(fresh, path) as watch:
        fresh.out(f"echo '# more' >> {path}")
        assert watch.until("written", path)[0] == ("modified", path)


def test_an_upload_is_told_as_a_file_that_was_written(box: Box, place: str) -> None:
    with watching(box, place, recursive="true") as watch:
        box.write(f"{place}/f", b"whole")
        box.out(f"touch {place}/end")
        found = watch.until("created", f"{place}/end")
    assert {change for change in found if change[0] != "attributes"} == {
        ("written", f"{place}/f"), ("created", f"{place}/end"),
    }  # fmt: skip


def test_an_unpacked_archive_is_told(box: Box, place: str) -> None:
    with watching(box, place, recursive="true") as watch:
        box.put_archive(f"{place}/tree", archive(member("d/f"))).expect(200)
        assert ("created", f"{place}/tree") in watch.until("created", f"{place}/tree/d/f")


def test_many_writes_are_one_change_until_it_is_read(box: Box, place: str) -> None:
    with watching(box, place) as watch:
        box.out(f"cd {place}; i=0; while [ $i -lt 20000 ]; do echo; i=$((i+1)); done > f; touch end")
        found = watch.until("created", f"{place}/end")
    assert found[0] == ("created", f"{place}/f")
    assert found[-2:] == [("written", f"{place}/f"), ("created", f"{place}/end")]
    assert len(found) < 1000


def test_more_changes_than_are_read_leave_a_gap(fresh: Box) -> None:
    place = "/tmp/many"
    fresh.out(f"mkdir {place}")
    with watching(fresh, place) as watch:
        # Nobody reads meanwhile: more than the kernel queues, the agent keeps, and the sockets between hold.
        churn = "for i in range(30000): os.close(os.open(sys.argv[1], os.O_CREAT)); os.unlink(sys.argv[1])"
        fresh.python(f"import os, sys\n{churn}", f"{place}/{'f' * 200}")
        watch.until("gap", place)
        # What was made before the gap was told may be in it; what comes after is told again.
        fresh.out(f"touch {place}/end")
        assert watch.until("created", f"{place}/end")[-1] == ("created", f"{place}/end")


def test_the_end_of_what_is_watched_ends_the_watch(box: Box, place: str) -> None:
    box.out(f"mkdir {place}/d")
    with watching(box, f"{place}/d") as watch:
        box.out(f"rmdir {place}/d")
        assert watch.until("removed", f"{place}/d")[-1] == ("removed", f"{place}/d")
        assert watch.ended()


def test_the_end_of_the_sandbox_is_told(fresh: Box) -> None:
    with watching(fresh, "/tmp") as watch:
        fresh.delete()
        event = watch.next()
        assert (event["event"], event["code"]) == ("error", "sandbox_deleted")
        assert watch.ended()


def test_what_is_not_there_cannot_be_watched(box: Box, place: str) -> None:
    answer = box.rest.get(f"/sandboxes/{box.id}/files/watch", path=f"{place}/nope")
    assert (answer.status, answer.code) == (404, "file_not_found")


@pytest.mark.parametrize("path", ["", "a\0b", "/proc/1/root", "/proc/1/fd"])
def test_no_path_leads_to_what_is_the_agents(box: Box, path: str) -> None:
    assert box.rest.get(f"/sandboxes/{box.id}/files/watch", path=path).status in (400, 404, 422)


def test_links_are_not_followed_into(box: Box, place: str) -> None:
    box.out(f"mkdir {place}/out {place}/w; ln -s {place}/out {place}/w/l")
    with watching(box, f"{place}/w", recursive="true") as watch:
        box.out(f"touch {place}/out/f {place}/w/end")
        assert watch.until("created", f"{place}/w/end") == [("created", f"{place}/w/end")]


def test_one_watch_too_many_is_refused_until_another_ends(fresh: Box) -> None:
    with ExitStack() as stack:
        for _ in range(32):
            stack.enter_context(watching(fresh, "/tmp"))
        answer = fresh.rest.get(f"/sandboxes/{fresh.id}/files/watch", path="/tmp")
        assert (answer.status, answer.code) == (503, "overloaded")

    def fine() -> bool:
        connection = fresh.rest.connect()
        url = f"/sandboxes/{fresh.id}/files/watch?path=/tmp"
        connection.request("GET", url, headers=fresh.rest.headers())
        try:
            return connection.getresponse().status == 200
        finally:
            connection.close()

    eventually(fine, "a watch in place of those that ended")


# -- the SDK


async def test_the_sdk_follows_changes(sdk: Sdk, images: Images) -> None:
    sandbox = await sdk.create(images.full)
    try:
        changes = each(sandbox.files.watch("/tmp", recursive=True))
        assert (await anext(changes)).type == "open"
        await sandbox.exec("mkdir /tmp/d; touch /tmp/d/f")
        found = [await anext(changes), await anext(changes)]
        assert [(c.type, c.path, c.directory) for c in found] == [
            ("created", "/tmp/d", True), ("created", "/tmp/d/f", False),
        ]  # fmt: skip
        await changes.aclose()
        with pytest.raises(FileMissing):
            await anext(each(sandbox.files.watch("/nope")))
        changes = each(sandbox.files.watch("/tmp"))
        await anext(changes)
    finally:
        await sandbox.delete()
    with pytest.raises(SandboxDeleted):
        await anext(changes)


def test_a_watch_of_the_sdk_goes_on_after_the_service_was_killed(
    runtime: RuntimeCase, tmp_path: Path, images: Images
) -> None:
    service = Service(tmp_path / "state", arguments=runtime.serve_arguments).start()
    try:
        with SandboxClient(service.base_url, service.api_key) as client:
            sandbox = client.create("host")
            seen: list[FileChange] = []

            def follow() -> None:
                for change in sandbox.files.watch("/tmp"):
                    seen.append(change)
                    if change.path == "/tmp/end":
                        return

            thread = threading.Thread(target=follow, daemon=True)
            thread.start()
            eventually(lambda: [c.type for c in seen] == ["open"], "the watch stands")
            service.kill()
            service.start()
            eventually(lambda: seen[-1].type == "gap", "the watch stands again")
            sandbox.exec("touch /tmp/end")
            thread.join(30)
            assert (seen[-1].type, seen[-1].path) == ("created", "/tmp/end")
    finally:
        end_and_check(service, runtime)
