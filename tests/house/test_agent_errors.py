"""The service knows every error that an agent can answer with."""

from __future__ import annotations

import re
from pathlib import Path

import orchard.env.agent
from orchard.env.errors import BY_CODE
from orchard.env.runtimes.answers import _CODES

AGENT = Path(orchard.env.agent.__file__).parent


def test_no_code_of_an_agent_is_taken_for_a_fault_of_it() -> None:
    text = "\n".join(path.read_text() for path in sorted(AGENT.glob("*.py")))
    said = set(re.findall(r'AgentError\(\s*"([a-z_]+)"', text))
    said |= set(re.findall(r'\.error_code = "([a-z_]+)"', text)) & set(BY_CODE)
    assert len(said) > 8
    assert said - _CODES == set()


def test_every_code_is_in_the_table_of_errors() -> None:
    assert _CODES - set(BY_CODE) == set()
