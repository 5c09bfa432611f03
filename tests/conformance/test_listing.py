"""Lists, pages, labels, batches."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conformance.runtimes import Images
from tests.support.rest import Box, Rest, new_id


@pytest.fixture(scope="module")
def family(rest: Rest, images: Images) -> Iterator[tuple[str, list[Box]]]:
    """Five sandboxes with a label of their own; the first two also have `kind=even`."""
    label = new_id("family")
    made = [
        rest.create(images.full, labels={"family": label, "kind": "even" if n < 2 else "odd"})
        for n in range(5)
    ]
    yield label, made
    for box in made:
        box.delete()


def listed(rest: Rest, **query: object) -> list[str]:
    return [s["sandbox_id"] for s in rest.get("/sandboxes", **query).expect(200)["sandboxes"]]


def test_a_list_shows_live_sandboxes(rest: Rest, family: tuple[str, list[Box]]) -> None:
    assert {b.id for b in family[1]} <= set(listed(rest, limit=1000))


def test_a_label_selects(rest: Rest, family: tuple[str, list[Box]]) -> None:
    label, boxes = family
    assert set(listed(rest, label=f"family={label}")) == {b.id for b in boxes}
    assert listed(rest, label="family=nobody") == []


def test_several_labels_must_all_match(rest: Rest, family: tuple[str, list[Box]]) -> None:
    label, boxes = family
    assert set(listed(rest, label=[f"family={label}", "kind=even"])) == {b.id for b in boxes[:2]}


def test_a_status_selects(rest: Rest, family: tuple[str, list[Box]]) -> None:
    label, boxes = family
    assert len(listed(rest, label=f"family={label}", status="ready")) == len(boxes)
    assert listed(rest, label=f"family={label}", status="failed") == []


def test_pages_show_everything_once(rest: Rest, family: tuple[str, list[Box]]) -> None:
    label, boxes = family
    seen: list[str] = []
    cursor: str | None = None
    for _ in range(10):
        query = {"cursor": cursor} if cursor else {}
        page = rest.get("/sandboxes", label=f"family={label}", limit=2, **query).expect(200)
        assert len(page["sandboxes"]) <= 2
        seen += [s["sandbox_id"] for s in page["sandboxes"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert sorted(seen) == sorted(b.id for b in boxes)


def test_a_page_begins_after_its_cursor_although_others_were_deleted(rest: Rest, images: Images) -> None:
    label = new_id("family")
    boxes = [rest.create(images.full, labels={"family": label}) for _ in range(4)]
    first = rest.get("/sandboxes", label=f"family={label}", limit=2).expect(200)
    shown = [s["sandbox_id"] for s in first["sandboxes"]]
    Box(rest, shown[-1]).delete()
    rest_of_it = listed(rest, label=f"family={label}", cursor=first["next_cursor"])
    assert sorted(shown + rest_of_it) == sorted(b.id for b in boxes)
    for box in boxes:
        box.delete()


@pytest.mark.parametrize("query", [{"limit": 0}, {"limit": -1}, {"limit": "x"}, {"status": "nonsense"},
                                   {"cursor": "nonsense!"}, {"label": "no-equals-sign"}])  # fmt: skip
def test_senseless_queries_are_refused(rest: Rest, query: dict[str, object]) -> None:
    assert rest.get("/sandboxes", **query).status in (400, 422)


def test_a_deleted_sandbox_is_never_listed_as_alive_again(rest: Rest, images: Images) -> None:
    box = rest.create(images.full, labels={"only": new_id()})
    label = f"only={box.info()['labels']['only']}"
    box.delete()
    for _ in range(20):
        page = rest.get("/sandboxes", label=label).expect(200)["sandboxes"]
        assert all(s["status"] == "deleted" for s in page)
        assert listed(rest, label=label, status="ready") == []


def test_bulk_delete_takes_those_with_the_label_and_no_others(rest: Rest, images: Images) -> None:
    label = new_id("bulk")
    doomed = [rest.create(images.full, labels={"run": label}) for _ in range(3)]
    spared = rest.create(images.full, labels={"run": f"{label}-other"})
    answer = rest.delete("/sandboxes", label=f"run={label}").expect(200)
    assert set(answer["sandbox_ids"]) == {b.id for b in doomed}
    assert {rest.get(b.path).code for b in doomed} == {"sandbox_deleted"}
    assert spared.alive()
    spared.delete()


def test_bulk_delete_without_a_label_is_refused(rest: Rest, family: tuple[str, list[Box]]) -> None:
    assert rest.delete("/sandboxes").status == 422
    assert family[1][0].alive()


def test_a_batch_is_answered_in_order(rest: Rest, images: Images) -> None:
    ids = [new_id("batch") for _ in range(4)]
    entries = [{"image": images.full, "sandbox_id": i} for i in ids]
    results = rest.post("/sandboxes/batch", {"sandboxes": entries}).expect()["results"]
    assert [r["sandbox"]["sandbox_id"] for r in results] == ids
    for sandbox_id in ids:
        box = Box(rest, sandbox_id)
        box.wait_ready()
        box.delete()


def test_one_bad_entry_of_a_batch_does_not_harm_the_others(rest: Rest, images: Images) -> None:
    taken = rest.create(images.full)
    entries = [
        {"image": images.full, "labels": {"n": "0"}},
        {"image": images.busybox, "sandbox_id": taken.id},
        {"image": images.full, "labels": {"n": "2"}},
    ]
    results = rest.post("/sandboxes/batch", {"sandboxes": entries}).expect()["results"]
    assert [r["error"] is None for r in results] == [True, False, True]
    assert results[1]["error"]["code"] == "conflict"
    for result in (results[0], results[2]):
        Box(rest, result["sandbox"]["sandbox_id"]).delete()
    taken.delete()


def test_a_malformed_entry_refuses_the_whole_batch(rest: Rest, images: Images) -> None:
    label = new_id("batch")
    entries = [{"image": images.full, "labels": {"run": label}}, {"image": images.full, "cpu": "x"}]
    assert rest.post("/sandboxes/batch", {"sandboxes": entries}).status == 422
    assert listed(rest, label=f"run={label}") == []


def test_an_empty_batch_is_refused(rest: Rest) -> None:
    assert rest.post("/sandboxes/batch", {"sandboxes": []}).status == 422
