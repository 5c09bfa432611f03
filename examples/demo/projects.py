"""Which projects, at which versions, how their tests run, and the faults that are put into four of them."""

from __future__ import annotations

from dataclasses import dataclass

#: Runs from its own wheel inside the sandbox, where nothing is installed.
PIP = "pip==26.3"


@dataclass(frozen=True, slots=True)
class Fault:
    """An edit of one source file: `old`, once in `path` (relative to the sdist's root), becomes `new`.

    breaks: part of the name of a test that must then fail.
    """

    path: str
    old: str
    new: str
    breaks: str
    story: str


@dataclass(frozen=True, slots=True)
class Project:
    """A project on PyPI whose sdist carries its tests.

    sha256: of the sdist; pip refuses another file. build: what its build back end needs. tests: what its
    tests need. arguments: for pytest; `why` gives the reason of each.
    """

    name: str
    version: str
    sha256: str
    build: tuple[str, ...]
    tests: tuple[str, ...]
    sandboxes: int
    faults: tuple[Fault, ...]
    arguments: tuple[str, ...] = ()
    why: str = ""

    @property
    def requirement(self) -> str:
        return f"{self.name}=={self.version}"


PROJECTS = (
    Project(
        name="tomlkit",
        version="0.15.2",
        sha256="83e32755ba1d20d9340bd069ee97e9f6232ba2346b63ffcba425de01f7e327a6",
        build=("poetry-core==2.5.0",),
        tests=("pytest==9.0.2", "pyyaml==6.0.4"),
        sandboxes=6,
        faults=(
            Fault(
                path="tomlkit/_utils.py",
                old='                if sign == "-":',
                new='                if sign == "+":',
                breaks="test_parse_rfc3339_datetime",
                story="time zones east and west swapped",
            ),
        ),
    ),
    Project(
        name="python-dateutil",
        version="2.9.0.post0",
        sha256="37dd54208da7e1cd875388217d5e00ebd4179249f90fb72437e91a35459a0ad3",
        build=("setuptools==80.9.0", "setuptools-scm==7.1.0", "wheel==0.45.1"),
        tests=("pytest==9.0.2", "hypothesis==6.170.17", "freezegun==1.5.5", "six==1.17.0"),
        sandboxes=5,
        faults=(
            Fault(
                path="src/dateutil/easter.py",
                old="d = 1 + (p",
                new="d = 2 + (p",
                breaks="test_easter",
                story="Easter on a Monday",
            ),
            Fault(
                path="src/dateutil/relativedelta.py",
                old="self.days = days + weeks * 7",
                new="self.days = days + weeks * 6",
                breaks="testNextMonthPlusOneWeek",
                story="weeks of six days",
            ),
        ),
        arguments=("-W", "ignore::pytest.PytestUnknownMarkWarning"),
        why="its conftest uses a mark that it does not register, which its own settings turn into an error",
    ),
    Project(
        name="sqlparse",
        version="0.6.1",
        sha256="ca722573f848ff2d30e40ea30f53a104b7dea7635ea9285891263eb2c58fb6e7",
        build=("hatchling==1.33.0", "editables==0.6"),
        tests=("pytest==9.0.2",),
        sandboxes=5,
        faults=(
            Fault(
                path="sqlparse/__init__.py",
                old="return [str(stmt).strip() for stmt in",
                new="return [str(stmt) for stmt in",
                breaks="test_split_simple",
                story="statements keep their blank lines",
            ),
        ),
        arguments=("-k", "not under_1s"),
        why="three tests demand to end within a second of wall-clock time, and 16 suites share this machine",
    ),
)
