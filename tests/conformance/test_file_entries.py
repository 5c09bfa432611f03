"""Looking at, making, moving and removing files and directories."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance.test_file_paths import SECRET, host_secret, tricks  # noqa: F401 - a fixture
from tests.support.rest import Answer, Box


def refused(answer: Answer, status: int, code: str) -> bool:
    return (answer.status, answer.code) == (status, code)


# -- stat


def test_stat_tells_type_size_mode_and_time(box: Box, place: str) -> None:
    box.out(f"cd {place}; printf abc > f; chmod 4750 f; touch -d @1000000000.5 f")
    found = box.stat(f"{place}/f").expect(200)
    expected = {"path": f"{place}/f", "type": "file", "size": 3, "mode": 0o4750, "modified": 1000000000.5}
    assert found == expected


def test_stat_of_a_link_is_of_the_link_or_of_what_it_leads_to(box: Box, place: str) -> None:
    box.out(f"cd {place}; mkdir d; ln -s d l; ln -s nowhere broken")
    link = box.stat(f"{place}/l").expect(200)
    assert (link["type"], link["target"]) == ("symlink", "d")
    assert box.stat(f"{place}/l", follow="true").expect(200)["type"] == "directory"
    assert box.stat(f"{place}/broken").expect(200)["target"] == "nowhere"
    assert refused(box.stat(f"{place}/broken", follow="true"), 404, "file_not_found")


@pytest.mark.parametrize(
    ("path", "kind"), [("/", "directory"), ("/tmp/.", "directory"), ("/dev/null", "other")]
)
def test_stat_takes_any_path(box: Box, path: str, kind: str) -> None:
    assert box.stat(path).expect(200)["type"] == kind


def test_stat_of_what_is_not_there_is_404(box: Box, place: str) -> None:
    assert refused(box.stat(f"{place}/nope"), 404, "file_not_found")


# -- mkdir


def test_a_directory_is_made_with_its_mode(box: Box, place: str) -> None:
    box.mkdir(f"{place}/a").expect(200)
    box.mkdir(f"{place}/b", mode="0700").expect(200)
    box.mkdir(f"{place}/c", mode=0o1777).expect(200)
    assert box.out(f"cd {place}; stat -c %a a b c") == "755\n700\n1777\n"


def test_parents_are_made_when_asked_for(box: Box, place: str) -> None:
    assert refused(box.mkdir(f"{place}/a/b/c"), 404, "file_not_found")
    box.mkdir(f"{place}/a/b/c", parents=True).expect(200)
    assert box.stat(f"{place}/a/b/c").expect(200)["type"] == "directory"


def test_parents_are_made_at_any_depth(box: Box, place: str) -> None:
    deep = place + "/d" * 1500
    box.mkdir(deep, parents=True).expect(200)
    assert box.stat(deep).expect(200)["type"] == "directory"


def test_a_directory_that_exists_is_a_conflict_unless_parents(box: Box, place: str) -> None:
    assert refused(box.mkdir(place), 409, "conflict")
    box.out(["chmod", "700", place])
    box.mkdir(place, parents=True, mode="0755").expect(200)
    assert box.stat(place).expect(200)["mode"] == 0o700


def test_a_file_in_the_place_of_a_directory_is_refused(box: Box, place: str) -> None:
    box.write(f"{place}/f", b"")
    assert box.mkdir(f"{place}/f").status == 409
    assert refused(box.mkdir(f"{place}/f", parents=True), 400, "path_invalid")
    assert refused(box.mkdir(f"{place}/f/g", parents=True), 400, "path_invalid")


@pytest.mark.parametrize(
    "fields", [{"mode": "rwx"}, {"mode": -1}, {"unknown": 1}, {"path": ""}, {"parents": "yes"}]
)
def test_a_malformed_request_is_refused(box: Box, place: str, fields: dict[str, object]) -> None:
    answer = box.rest.post(f"{box.path}/files/mkdir", {"path": f"{place}/d", **fields})
    assert answer.status == 422
    assert box.ls(place) == {}


# -- move


def test_a_file_is_moved_and_the_way_to_it_made(box: Box, place: str) -> None:
    box.write(f"{place}/f", b"content")
    box.move(f"{place}/f", f"{place}/new/dir/g").expect(200)
    assert box.read(f"{place}/new/dir/g") == b"content"
    assert list(box.ls(place)) == ["new"]


def test_a_directory_is_moved_with_what_is_in_it(box: Box, place: str) -> None:
    box.write(f"{place}/d/e/f", b"content")
    box.move(f"{place}/d", f"{place}/g").expect(200)
    assert box.read(f"{place}/g/e/f") == b"content"


def test_a_link_is_moved_itself(box: Box, place: str) -> None:
    box.out(f"cd {place}; echo x > f; ln -s f l")
    box.move(f"{place}/l", f"{place}/m").expect(200)
    assert {name: e["type"] for name, e in box.ls(place).items()} == {"f": "file", "m": "symlink"}


def test_a_target_that_exists_is_a_conflict_unless_overwritten(box: Box, place: str) -> None:
    box.write(f"{place}/f", b"new")
    box.write(f"{place}/g", b"old")
    assert refused(box.move(f"{place}/f", f"{place}/g"), 409, "conflict")
    assert box.read(f"{place}/g") == b"old"
    box.move(f"{place}/f", f"{place}/g", overwrite=True).expect(200)
    assert box.read(f"{place}/g") == b"new"


def test_a_directory_with_content_is_never_overwritten(box: Box, place: str) -> None:
    box.out(f"cd {place}; mkdir a b; touch b/f")
    assert refused(box.move(f"{place}/a", f"{place}/b", overwrite=True), 409, "conflict")
    assert list(box.ls(f"{place}/b")) == ["f"]


def test_a_directory_is_not_moved_into_itself(box: Box, place: str) -> None:
    assert refused(box.move(place, f"{place}/inner"), 400, "path_invalid")


def test_moving_what_is_not_there_is_404(box: Box, place: str) -> None:
    answer = box.move(f"{place}/nope", f"{place}/f")
    assert refused(answer, 404, "file_not_found")
    assert f"{place}/nope" in answer.json["detail"]


# -- remove


def test_a_file_is_removed(box: Box, place: str) -> None:
    box.write(f"{place}/f", b"")
    assert box.remove(f"{place}/f").expect(200) == {"status": "deleted", "path": f"{place}/f"}
    assert box.ls(place) == {}
    assert refused(box.remove(f"{place}/f"), 404, "file_not_found")


def test_a_link_is_removed_and_not_what_it_leads_to(box: Box, place: str) -> None:
    box.out(f"cd {place}; mkdir d; touch d/f; ln -s d l; ln -s nowhere b")
    for name in ("l", "b"):
        box.remove(f"{place}/{name}", recursive="true").expect(200)
    assert list(box.ls(place)) == ["d"]
    assert list(box.ls(f"{place}/d")) == ["f"]


def test_a_directory_that_is_not_empty_needs_recursive(box: Box, place: str) -> None:
    box.out(f"cd {place}; mkdir -p d/e; touch d/f")
    assert refused(box.remove(f"{place}/d"), 409, "conflict")
    box.remove(f"{place}/d/e").expect(200)
    box.remove(f"{place}/d", recursive="true").expect(200)
    assert box.ls(place) == {}


def test_a_large_and_deep_tree_is_removed_without_following_links(box: Box, place: str) -> None:
    box.out(
        f"cd {place}; touch keep; mkdir t; cd t; ln -s .. up; ln -s /etc etc; seq 20000 | xargs touch; ln -s {place}/keep k;"
        " for i in $(seq 300); do mkdir d; cd d; touch f; done"
    )
    box.remove(f"{place}/t", recursive="true").expect(200)
    assert list(box.ls(place)) == ["keep"]
    assert box.stat("/etc/passwd").status == 200


def test_others_are_served_while_a_large_tree_is_removed(fresh: Box) -> None:
    fresh.out("mkdir /tmp/t; cd /tmp/t; seq 60000 | xargs touch")
    fresh.remove("/tmp/t", recursive="true").expect(200)
    assert fresh.alive()


@pytest.mark.parametrize("path", ["/", ".", "..", "/tmp/..", "/tmp/."])
def test_what_is_no_name_is_not_removed(box: Box, path: str) -> None:
    assert refused(box.remove(path, recursive="true"), 400, "path_invalid")
    assert box.alive()


# -- nothing leads out


@pytest.mark.parametrize("name", tricks(""))
def test_no_path_leads_out(box: Box, place: str, host_secret: Path, name: str) -> None:  # noqa: F811
    path = tricks(str(host_secret))[name]
    assert box.stat(path).status in (400, 404)
    box.move(path, f"{place}/stolen")
    box.write(f"{place}/mine", b"overwritten")
    box.move(f"{place}/mine", path, overwrite=True)
    box.remove(path)
    box.remove(tricks(str(host_secret.parent))[name], recursive="true")
    box.mkdir(tricks(str(host_secret.parent / "planted"))[name], parents=True)
    assert host_secret.read_bytes() == SECRET
    assert [each.name for each in host_secret.parent.iterdir()] == ["secret"]


def test_links_to_the_outside_lead_nowhere(box: Box, place: str, host_secret: Path) -> None:  # noqa: F811
    box.out(f"cd {place}; ln -s {host_secret.parent} d; ln -s /proc/1/root r; touch mine")
    box.remove(f"{place}/d/secret")
    box.remove(f"{place}/r{host_secret}")
    box.move(f"{place}/mine", f"{place}/r{host_secret}", overwrite=True)
    box.mkdir(f"{place}/r{host_secret.parent}/planted", parents=True)
    assert [each.name for each in host_secret.parent.iterdir()] == ["secret"]
    assert host_secret.read_bytes() == SECRET


@pytest.mark.parametrize("path", ["/proc/1/exe", "/proc/self/root", "/proc/1/fd/0", "/proc/1/cwd"])
def test_the_agents_own_are_not_looked_at(box: Box, path: str) -> None:
    for follow in ("false", "true"):
        answer = box.stat(path, follow=follow)
        assert answer.status in (400, 404), answer
