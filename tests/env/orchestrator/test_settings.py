"""Settings and keys: one set of names, refusals that say what to change."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orchard.env.errors import SettingsError, Unauthorized
from orchard.env.orchestrator.auth import KeyRing, Role, hash_key
from orchard.env.orchestrator.quotas import Quotas
from orchard.env.orchestrator.settings import ServiceSettings


def test_file_environment_and_arguments_share_names_and_the_later_wins(tmp_path: Path) -> None:
    file = tmp_path / "settings.json"
    file.write_text('{"port": 1, "host": "::1", "max_starting": 3, "state_dir": "/s", "api_keys": ["f"]}')
    environ = {"ORCHARD_PORT": "2", "ORCHARD_API_KEYS": "a, b", "ORCHARD_MAX_SANDBOXES": "none", "OTHER": "x"}
    settings = ServiceSettings.load(file, environ=environ, port=None, max_starting=7)
    assert (settings.host, settings.port, settings.max_starting) == ("::1", 2, 7)
    assert (settings.state_dir, settings.api_keys, settings.max_sandboxes) == (Path("/s"), ["a", "b"], None)


def test_nothing_is_read_from_the_environment_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORCHARD_PORT", "1234")
    assert ServiceSettings().port == ServiceSettings.load().port == 8000


@pytest.mark.parametrize(
    ("field", "value"),
    [("port", 70_000), ("port", "x"), ("port", True), ("max_starting", 0), ("ttl_s", "-1"), ("ttl_s", "nan"),
     ("log_level", "loud"), ("tunnel_connect_timeout_s", 0), ("api_keys", [""]), ("max_sandboxes", 0), ("nonsense", 1),
     ("redis_url", "somewhere")],
)  # fmt: skip
def test_senseless_values_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(SettingsError, match="API key" if field == "api_keys" else field):
        ServiceSettings.load(**{field: value})


@pytest.mark.parametrize("content", ["[1]", "{", "port: [", ""])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "settings.json"
    file.write_text(content)
    with pytest.raises(SettingsError, match=r"settings\.json"):
        ServiceSettings.load(file)


def test_keys_stay_out_of_what_is_shown() -> None:
    settings = ServiceSettings(api_keys=["very-secret"], redis_url="redis://:very-secret@localhost/0")
    assert "very-secret" not in repr(settings)
    assert "very-secret" not in json.dumps(settings.public())


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_without_a_key_only_loopback_is_served(host: str) -> None:
    with pytest.raises(SettingsError, match="API key"):
        ServiceSettings(host=host).check_exposure()
    ServiceSettings(host=host, api_keys=["k"]).check_exposure()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_needs_no_key(host: str) -> None:
    ServiceSettings(host=host).check_exposure()


def ring(tmp_path: Path, entries: object, **options: object) -> KeyRing:
    file = tmp_path / "keys.json"
    file.write_text(json.dumps(entries))
    return KeyRing.from_settings(ServiceSettings(keys_file=file, **options))  # type: ignore[arg-type]


def test_keys_name_their_owner_and_role(tmp_path: Path) -> None:
    entries = [
        {"owner": "alice", "hash": hash_key("a")},
        {"owner": "root", "hash": hash_key("r"), "role": "admin", "max_sandboxes": 5},
    ]
    keys = ring(tmp_path, entries, api_keys=["k"])
    assert (keys.principal(b"k").owner, keys.principal(b"k").role) == ("default", Role.ADMIN)
    assert (keys.principal(b"a").owner, keys.principal(b"a").admin) == ("alice", False)
    assert (keys.principal(b"r").quotas.max_sandboxes, keys.principal(b"r").admin) == (5, True)
    for wrong in (b"", b"A", b"sha256:", None, b"\xff"):
        with pytest.raises(Unauthorized):
            keys.principal(wrong)


@pytest.mark.parametrize(
    "entries",
    [
        [],
        {},
        ["alice"],
        [{"owner": "alice"}],
        [{"owner": "a b", "hash": hash_key("x")}],
        [{"owner": "alice", "hash": "x"}],
        [{"owner": "alice", "hash": hash_key("x"), "role": "king"}],
        [{"owner": "alice", "hash": hash_key("x"), "max_sandboxes": "many"}],
        [{"owner": "alice", "hash": hash_key("x"), "colour": "red"}],
        [{"owner": "alice", "hash": hash_key("x"), "max_sandboxes": -1}],
        [{"owner": "alice", "hash": hash_key("x"), "max_sandboxes": True}],
        [{"owner": "alice", "hash": hash_key("x"), "max_cpu": 0}],
        [{"owner": "alice", "hash": hash_key("x"), "max_cpu": "many"}],
        [{"owner": "alice", "hash": hash_key("x"), "tunnel_targets": "model"}],
        [{"owner": "alice", "hash": hash_key("x"), "max_memory": -5}],
        [{"owner": "alice", "hash": hash_key("x"), "max_memory": [1]}],
        [{"owner": "alice", "hash": hash_key("x"), "creates_per_minute": 0}],
        [{"owner": "alice", "hash": hash_key("x"), "creates_per_minute": 1.5}],
        [{"owner": "alice", "hash": hash_key("x")}, {"owner": "bob", "hash": hash_key("x")}],
    ],
)
def test_a_keys_file_with_a_fault_is_refused(tmp_path: Path, entries: object) -> None:
    with pytest.raises(SettingsError):
        ring(tmp_path, entries)


def test_a_bad_quota_is_told_with_its_entry_and_what_it_should_be(tmp_path: Path) -> None:
    entries = [
        {"owner": "bob", "hash": hash_key("b")},
        {"owner": "al", "hash": hash_key("x"), "max_cpu": "2 cores"},
    ]
    with pytest.raises(SettingsError, match=r"keys\.json, entry 2 \(al\): max_cpu must be cores.*'2 cores'"):
        ring(tmp_path, entries)


def test_quotas_are_numbers_or_quantities(tmp_path: Path) -> None:
    entries = [
        {
            "owner": "a",
            "hash": hash_key("a"),
            "max_cpu": "500m",
            "max_memory": "1Gi",
            "creates_per_minute": 6,
        },
        {"owner": "b", "hash": hash_key("b"), "max_cpu": 1.5, "max_memory": 2**40, "max_sandboxes": 0},
    ]
    keys = ring(tmp_path, entries)
    assert keys.principal(b"a").quotas == Quotas(None, 0.5, 2**30, 6)
    assert keys.principal(b"b").quotas == Quotas(0, 1.5, 2**40, None)


def test_keys_taken_over_replace_all_earlier_ones(tmp_path: Path) -> None:
    keys = ring(tmp_path, [{"owner": "alice", "hash": hash_key("old")}])
    keys.take_over(ring(tmp_path, [{"owner": "alice", "hash": hash_key("new")}]))
    assert keys.principal(b"new").owner == "alice"
    with pytest.raises(Unauthorized):
        keys.principal(b"old")


def test_no_keys_at_all_never_replace_keys(tmp_path: Path) -> None:
    keys = ring(tmp_path, [{"owner": "alice", "hash": hash_key("a")}])
    with pytest.raises(SettingsError):
        keys.take_over(KeyRing())
    assert not keys.open
