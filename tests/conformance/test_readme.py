"""The README's table names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent


def _test_names() -> set[str]:
    files = [*HERE.glob("test_*.py"), *(HERE.parent / "chaos").glob("test_*.py")]
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {
        node.name
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, kinds)
    }


def test_every_test_named_in_the_table_of_faults_exists() -> None:
    rows = [line for line in (HERE / "README.md").read_text().splitlines() if re.match(r"\| \d", line)]
    named = {name for row in rows for name in re.findall(r"`([a-z0-9_]{20,})(?:\[[^`]*\])?`", row)}
    named = {f"test_{name}" for name in named if not name.startswith("test_")}
    assert len(rows) > 30
    assert named - _test_names() == set()


def test_every_module_is_on_the_map() -> None:
    text = (HERE / "README.md").read_text()
    modules = {path.name for path in HERE.glob("test_*.py")} - {"test_readme.py"}
    missing = {
        m
        for m in modules
        if f"`{m}`" not in text and not (m.startswith("test_command_") and "test_command_*" in text)
    }
    assert missing == set()
