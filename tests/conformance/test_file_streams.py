"""Files of any size as bytes: whole or not at all, in constant memory, in both directions."""

from __future__ import annotations

import hashlib
import http.client
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlencode

import pytest

from tests.conformance.conftest import NewBox
from tests.conformance.runtimes import RuntimeCase
from tests.conformance.test_file_paths import SECRET, host_secret, tricks  # noqa: F401 - a fixture
from tests.support.machine import Growth, namespace_init, pids_with_argument
from tests.support.rest import Box, new_id
from tests.support.service import Service
from tests.support.waiting import eventually

SIZES = [0, 1, 18 * 1024, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 64 << 20]
GIB = 1 << 30
MOST_GROWTH = 64 << 20
BLOCK = os.urandom(1 << 20)


def blocks(size: int) -> Iterator[bytes]:
    """Bytes that take no memory: one block again and again, numbered so that none can be lost or swapped."""
    for number in range(size >> 20):
        yield number.to_bytes(8, "big") + BLOCK[8:]


def begin_put(box: Box, path: str, size: int) -> http.client.HTTPConnection:
    """An upload whose body is still to be sent."""
    connection = box.rest.connect()
    connection.putrequest("PUT", f"{box.path}/files/content?{urlencode({'path': path})}")
    for name, value in {**box.rest.headers(), "Content-Length": str(size)}.items():
        connection.putheader(name, value)
    connection.endheaders()
    return connection


def begin_get(box: Box, path: str, what: str = "files/content") -> http.client.HTTPResponse:
    connection = box.rest.connect()
    connection.request("GET", f"{box.path}/{what}?{urlencode({'path': path})}", headers=box.rest.headers())
    return connection.getresponse()


def rest_of(response: http.client.HTTPResponse) -> int:
    """How many bytes still come until the end, or until the connection breaks."""
    count = 0
    try:
        while piece := response.read(1 << 20):
            count += len(piece)
    except (http.client.IncompleteRead, ConnectionError):
        pass
    return count


@pytest.mark.parametrize("size", SIZES)
def test_any_size_makes_the_round_trip(box: Box, place: str, size: int) -> None:
    content = (BLOCK * (size // len(BLOCK) + 1))[:size]
    answer = box.put_content(f"{place}/f", content)
    assert answer.expect(200) == {"success": True, "path": f"{place}/f", "size": size}
    inside = box.out(["/usr/bin/sha256sum", f"{place}/f"]).split()[0]
    assert inside == hashlib.sha256(content).hexdigest()
    back = box.get_content(f"{place}/f")
    assert (back.status, back.headers["content-length"]) == (200, str(size))
    assert back.body == content


def test_a_gibibyte_goes_up_and_down_in_constant_memory(
    own_service: Callable[..., Service], runtime: RuntimeCase
) -> None:
    service = own_service()
    with service.rest.sandbox("host") as box:
        pids = {"service": service.pid}
        if runtime.on_this_machine:
            tag = f"{os.getpid() + 10**6}.25"
            box.running(["sleep", tag])
            pids["agent"] = namespace_init(pids_with_argument(tag)[0])
        growth = {name: Growth(pid) for name, pid in pids.items()}
        sent = hashlib.sha256()

        def counted() -> Iterator[bytes]:
            for block in blocks(GIB):
                sent.update(block)
                yield block

        connection = box.rest.connect()
        path = f"{box.path}/files/content?path=/tmp/f"
        connection.request("PUT", path, counted(), {**box.rest.headers(), "Content-Length": str(GIB)})
        answer = connection.getresponse()
        assert (answer.status, b'"size":1073741824' in answer.read()) == (200, True)
        received = hashlib.sha256()
        response = begin_get(box, "/tmp/f")
        while piece := response.read(1 << 20):
            received.update(piece)
        assert received.digest() == sent.digest()
        inside = box.out(["sha256sum", "/tmp/f"], concurrent=True).split()[0]
        assert inside == sent.hexdigest()
        assert {name: each.bytes for name, each in growth.items() if each.bytes > MOST_GROWTH} == {}


def test_a_body_without_a_length_is_taken(box: Box, place: str) -> None:
    connection = box.rest.connect()
    path = f"{box.path}/files/content?{urlencode({'path': place + '/f'})}"
    connection.request("PUT", path, iter([b"one ", b"two"]), box.rest.headers(), encode_chunked=True)
    assert connection.getresponse().status == 200
    assert box.read(f"{place}/f") == b"one two"


@pytest.mark.parametrize(("mode", "expected"), [("0755", "755"), ("600", "600"), ("4711", "4711")])
def test_a_mode_is_set(box: Box, place: str, mode: str, expected: str) -> None:
    box.put_content(f"{place}/f", b"", mode=mode).expect(200)
    assert box.out(["/usr/bin/stat", "-c", "%a", f"{place}/f"]) == f"{expected}\n"


def test_without_a_mode_the_one_that_was_there_stays(box: Box, place: str) -> None:
    box.out(f"touch {place}/f; chmod 751 {place}/f")
    box.put_content(f"{place}/f", b"x").expect(200)
    assert box.out(["/usr/bin/stat", "-c", "%a", f"{place}/f"]) == "751\n"


@pytest.mark.parametrize("mode", ["rwx", "0999", "-1", ""])
def test_a_malformed_mode_is_refused(box: Box, place: str, mode: str) -> None:
    assert box.put_content(f"{place}/f", b"x", mode=mode).status == 422
    assert box.ls(place) == {}


def test_the_old_file_stays_until_the_new_one_is_whole(box: Box, place: str) -> None:
    box.write(f"{place}/f", b"old")
    connection = begin_put(box, f"{place}/f", 8 << 20)
    connection.send(BLOCK * 7)
    eventually(lambda: len(box.ls(place)) == 2, "the upload is under way")
    assert box.read(f"{place}/f") == b"old"
    connection.send(BLOCK)
    assert connection.getresponse().status == 200
    assert list(box.ls(place)) == ["f"]
    assert box.get_content(f"{place}/f").body == BLOCK * 8


def test_an_upload_that_breaks_off_leaves_nothing(box: Box, place: str) -> None:
    connection = begin_put(box, f"{place}/f", 8 << 20)
    connection.send(BLOCK * 5)
    eventually(lambda: len(box.ls(place)) == 1, "the upload is under way")
    connection.close()
    eventually(lambda: box.ls(place) == {}, "nothing is left of it")


def test_an_upload_to_a_service_that_is_killed_leaves_nothing(own_service: Callable[..., Service]) -> None:
    service = own_service()
    box = service.rest.create("host")
    connection = begin_put(box, "/tmp/f", 8 << 20)
    connection.send(BLOCK * 5)
    eventually(lambda: len(box.ls("/tmp")) == 1, "the upload is under way")
    service.kill()
    connection.close()
    service.start()
    again = Box(service.rest, box.id)
    eventually(lambda: again.ls("/tmp") == {}, "nothing is left of it")


def test_a_full_disk_is_told_and_leaves_nothing(new_box: NewBox) -> None:
    box = new_box(disk="64Mi")
    answer = box.put_content("/tmp/f", BLOCK * 80)
    assert (answer.status, answer.code) == (507, "disk_full")
    assert box.ls("/tmp") == {}


def test_a_download_of_a_sandbox_that_ends_breaks_off(new_box: NewBox) -> None:
    box = new_box()
    box.out(["truncate", "-s", "1G", "/tmp/f"])
    response = begin_get(box, "/tmp/f")
    response.read(1 << 20)
    box.delete()
    assert rest_of(response) < GIB - (1 << 20)


def test_a_download_of_a_file_that_is_replaced_breaks_off(box: Box, place: str) -> None:
    box.out(f"truncate -s 1G {place}/f; truncate -s 1G {place}/g")
    response = begin_get(box, f"{place}/f")
    response.read(1 << 20)
    box.out(f"mv {place}/g {place}/f")
    assert rest_of(response) < GIB - (1 << 20)


def test_a_reader_that_goes_away_disturbs_nobody(box: Box, place: str) -> None:
    box.out(["truncate", "-s", "1G", f"{place}/f"])
    response = begin_get(box, f"{place}/f")
    response.read(1 << 20)
    response.close()
    box.put_content(f"{place}/g", b"x").expect(200)
    assert box.get_content(f"{place}/g").body == b"x"


def test_files_of_proc_are_read_although_their_size_is_zero(box: Box) -> None:
    assert box.get_content("/proc/version").body.startswith(b"Linux version")


def test_a_missing_file_is_404(box: Box, place: str) -> None:
    answer = box.get_content(f"{place}/nope")
    assert (answer.status, answer.code) == (404, "file_not_found")


@pytest.mark.parametrize("path", ["/tmp", "/dev/zero", "/etc/passwd/x"])
def test_what_is_no_regular_file_is_refused(box: Box, path: str) -> None:
    answer = box.get_content(path)
    assert (answer.status, answer.code) == (400, "path_invalid")


def test_a_path_is_required(box: Box) -> None:
    assert box.rest.raw("PUT", f"{box.path}/files/content", b"x").status == 422
    assert box.rest.get(f"{box.path}/files/content").status == 422
    assert box.put_content("", b"x").code == "path_invalid"


def test_an_unknown_sandbox_is_404(box: Box) -> None:
    other = Box(box.rest, new_id())
    for answer in (other.get_content("/etc/passwd"), other.put_content("/tmp/f", b"x")):
        assert (answer.status, answer.code) == (404, "sandbox_not_found")


@pytest.mark.parametrize("name", tricks(""))
def test_no_path_leads_out(box: Box, host_secret: Path, name: str) -> None:  # noqa: F811
    path = tricks(str(host_secret))[name]
    assert b"secret of" not in box.get_content(path).body
    box.put_content(path, b"overwritten")
    assert host_secret.read_bytes() == SECRET
