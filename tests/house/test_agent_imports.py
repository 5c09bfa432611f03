"""The agent runs where nothing is installed: it may import the standard library and itself only."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import orchard.env.agent

AGENT = "orchard.env.agent"
MODULES = sorted(Path(orchard.env.agent.__path__[0]).rglob("*.py"))


def imported_names(source: str) -> set[str]:
    """The modules that `source` imports, inside functions too; relative imports as the agent's own."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add(AGENT if node.level == 1 else node.module or "..")
    return names


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.name)
def test_agent_imports_only_itself_and_the_standard_library(module: Path) -> None:
    foreign = {
        name
        for name in imported_names(module.read_text())
        if not (name == AGENT or name.startswith(AGENT + "."))
        and name.partition(".")[0] not in sys.stdlib_module_names
    }
    assert not foreign, f"{module.name} imports {sorted(foreign)}"
