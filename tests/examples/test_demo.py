"""The demo's judgement: a suite counts as broken or whole only by its own report."""

from __future__ import annotations

import pytest

from examples.demo.projects import PROJECTS
from examples.demo.suites import Outcome, read_report

WHOLE = b"""<testsuites><testsuite>
<testcase classname="tests.test_a" name="test_one"/>
<testcase classname="tests.test_a" name="test_two"><skipped message="no"/></testcase>
</testsuite></testsuites>"""
BROKEN = b"""<testsuites><testsuite>
<testcase classname="tests.a.TestEaster" name="test_easter[1990]"><failure message="m"/></testcase>
<testcase classname="tests.test_a" name="test_one"><error message="m">trace</error></testcase>
<testcase classname="tests.test_a" name="test_two"/>
</testsuite></testsuites>"""
DATEUTIL = next(project for project in PROJECTS if project.name == "python-dateutil")
EASTER = DATEUTIL.faults[0]


def outcome(report: bytes, fault: object = None) -> Outcome:
    result = Outcome(1, DATEUTIL, fault)  # type: ignore[arg-type]
    read_report(report, result)
    return result


def test_report_counts_and_names() -> None:
    result = outcome(BROKEN)
    assert (result.passed, result.failed, result.errors, result.skipped) == (1, 1, 1, 0)
    assert result.failing == ["TestEaster::test_easter[1990]", "test_a::test_one"]


def test_skipped_tests_are_no_failures() -> None:
    result = outcome(WHOLE)
    assert (result.passed, result.failed, result.errors, result.skipped) == (1, 0, 0, 1)


def test_released_source_is_right_only_if_all_pass() -> None:
    assert outcome(WHOLE).complaint() == ""
    assert "1 failed, 1 errors" in outcome(BROKEN).complaint()


def test_broken_source_is_right_only_if_its_own_test_fails() -> None:
    assert outcome(BROKEN, EASTER).complaint() == ""
    assert "test_easter" in outcome(WHOLE, EASTER).complaint()


def test_a_suite_without_a_passed_test_is_wrong() -> None:
    assert outcome(b"<testsuites/>").complaint() == "no test passed"


@pytest.mark.parametrize("project", PROJECTS, ids=lambda project: project.name)
def test_each_project_has_more_sandboxes_than_faults(project: object) -> None:
    assert project.sandboxes > len(project.faults) >= 1  # type: ignore[attr-defined]


def test_sixteen_sandboxes_four_of_them_broken() -> None:
    assert sum(project.sandboxes for project in PROJECTS) == 16
    assert sum(len(project.faults) for project in PROJECTS) == 4
