"""The synchronous client is the generated one, and says the same as the asynchronous one."""

from __future__ import annotations

import importlib.util
import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest

from orchard.env import client as sdk

ROOT = Path(__file__).resolve().parents[3]
PAIRS = [
    (sdk.AsyncSandboxClient, sdk.SandboxClient),
    (sdk.AsyncSandbox, sdk.Sandbox),
    (sdk.AsyncCommands, sdk.Commands),
    (sdk.AsyncCommandHandle, sdk.CommandHandle),
    (sdk.AsyncFiles, sdk.Files),
]


def _generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generator", ROOT / "tools/generate_sync_client.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_written_modules_are_up_to_date() -> None:
    for path, source in _generator().generate().items():
        assert path.read_text() == source, f"{path}: run python tools/generate_sync_client.py"


def _public(cls: type) -> set[str]:
    return {name for name in vars(cls) if not name.startswith("_")}


@pytest.mark.parametrize(("asynchronous", "synchronous"), PAIRS)
def test_both_have_the_same_names_and_parameters(asynchronous: type, synchronous: type) -> None:
    assert _public(asynchronous) == _public(synchronous)
    for name in _public(asynchronous):
        theirs, ours = inspect.getattr_static(asynchronous, name), inspect.getattr_static(synchronous, name)
        assert isinstance(theirs, property) == isinstance(ours, property)
        if isinstance(theirs, property):
            continue
        expected = [(p.name, p.kind, p.default) for p in inspect.signature(theirs).parameters.values()]
        found = [(p.name, p.kind, p.default) for p in inspect.signature(ours).parameters.values()]
        assert found == expected, name


@pytest.mark.parametrize("cls", [each for pair in PAIRS for each in pair])
def test_everything_public_is_documented(cls: type) -> None:
    assert cls.__doc__
    for name in _public(cls):
        assert inspect.getdoc(getattr(cls, name)), f"{cls.__name__}.{name}"


def test_nothing_synchronous_speaks_of_awaiting() -> None:
    for _, synchronous in PAIRS:
        assert not re.search(r"\b(async|await)\b", inspect.getsource(synchronous))
