"""What the documents show is what is there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "benchmarks/README.md",
    *(ROOT / "docs").rglob("*.md"),
]


def test_readme_shows_the_tested_example() -> None:
    code = (ROOT / "examples/quickstart.py").read_text()
    shown = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert shown, "the README shows no example"
    assert code.partition('"""\n\n')[2] == shown[0]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_that_exist(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
    local = [target for target in targets if "://" not in target]
    assert [target for target in local if not (page.parent / target).exists()] == []


def test_readme_names_targets_that_the_makefile_has() -> None:
    makefile = (ROOT / "Makefile").read_text()
    named = set(re.findall(r"^    make (\w+)", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert {"demo", "test"} <= named
    assert [target for target in named if not re.search(rf"^{target}:", makefile, re.MULTILINE)] == []


def test_reference_pages_are_current() -> None:
    result = subprocess.run(
        [sys.executable, str(ROOT / "tools/reference.py"), "--check"], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
