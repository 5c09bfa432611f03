"""`keys new`: an entry that the service takes, and a key that is shown once."""

from __future__ import annotations

import json
from pathlib import Path

from orchard.env.orchestrator.auth import KeyRing, hash_key
from orchard.env.orchestrator.quotas import Quotas
from orchard.env.orchestrator.settings import ServiceSettings
from tests.cli.conftest import environment, run_cli


def test_the_entry_goes_into_a_file_and_the_key_to_the_terminal(tmp_path: Path) -> None:
    quotas = ("--max-sandboxes", "5", "--max-cpu", "2", "--max-memory", "4Gi", "--creates-per-minute", "60")
    done = run_cli("keys", "new", "--owner", "alice", "--role", "admin", *quotas, env=environment())
    assert done.returncode == 0, done.stderr
    (tmp_path / "keys.yaml").write_text(done.stdout)
    key = done.stderr.split()[-1]
    found = KeyRing.from_settings(ServiceSettings(keys_file=tmp_path / "keys.yaml")).principal(key.encode())
    assert (found.owner, found.admin, found.quotas) == ("alice", True, Quotas(5, 2.0, 4 << 30, 60))
    assert key not in done.stdout


def test_entries_of_several_runs_make_one_file(tmp_path: Path) -> None:
    runs = [run_cli("keys", "new", "--owner", owner, env=environment()) for owner in ("alice", "bob")]
    (tmp_path / "keys.yaml").write_text("".join(run.stdout for run in runs))
    assert len(KeyRing.from_settings(ServiceSettings(keys_file=tmp_path / "keys.yaml"))) == 2


def test_as_json_key_and_entry_come_together() -> None:
    done = run_cli("keys", "new", "--owner", "alice", "--json", env=environment())
    answer = json.loads(done.stdout)
    assert answer["entry"] == {"owner": "alice", "role": "user", "hash": hash_key(answer["key"])}
    assert answer["key"] not in done.stderr


def test_what_the_service_would_refuse_is_refused() -> None:
    done = run_cli("keys", "new", "--owner", "alice", "--max-cpu", "lots", env=environment())
    assert (done.returncode, done.stdout) == (1, "")
    assert "max_cpu must be cores" in done.stderr
    assert "ork_" not in done.stderr
