"""The service's settings: one dataclass, the same names in Python, YAML, the environment and the command line."""

from __future__ import annotations

import dataclasses
import importlib
import ipaddress
import json
import os
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchard.env.contract import (
    DEFAULT_COMMAND_TIMEOUT_S,
    DEFAULT_READY_TIMEOUT_S,
    DEFAULT_TTL_S,
    FINISHED_JOB_RETENTION_S,
)
from orchard.env.egress import parse_resolver
from orchard.env.errors import SettingsError
from orchard.env.orchestrator.tunnels.targets import parse_targets
from orchard.env.paths import default_state_dir

ENV_PREFIX = "ORCHARD_"
PULL_POLICIES = ("never", "missing")
#: OpenTelemetry's own name of `otel_endpoint`.
OTEL_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"
_LOG_LEVELS = ("debug", "info", "warning", "error", "critical")


def default_max_starting() -> int:
    """Sandboxes that may start at once: four per usable core, at least four."""
    return max(4, 4 * len(os.sched_getaffinity(0)))


@dataclass(slots=True, kw_only=True)
class ServiceSettings:
    """Everything `orchard serve` can be told. Durations in seconds (`_s`), sizes in bytes (`_bytes`).

    Attributes:
        host, port: where to listen; port 0 takes a free one. Without a key only a loopback host is accepted.
        runtime: name of the runtime that holds the sandboxes.
        state_dir: everything the service keeps; one service at a time may use it, or several with `redis_url`.
        redis_url: the Redis in which services that share a state directory tell each other what they hold.
        api_keys: keys of owner `default` with role admin.
        keys_file: YAML or JSON list of tenants, see `orchard.env.orchestrator.auth`; read again on SIGHUP.
        audit_log: file that gets a line for every request that changes something and for every refused key.
        otel_endpoint: base URL of an OTLP receiver (HTTP) for traces; also from OTEL_EXPORTER_OTLP_ENDPOINT.
        max_starting: sandboxes that start at the same time; further creations queue.
        max_sandboxes: live sandboxes of all owners; None means no limit.
        max_queue: creations that may wait; beyond it the answer is 503 at once.
        max_jobs: commands that may be queued or running at once; beyond it the answer is 503 at once.
        ready_timeout_s, command_timeout_s, ttl_s: defaults where a request names none.
        heartbeat_timeout_s: the lease of a sandbox that sends heartbeats but named no timeout of its own.
        job_retention_s: how long a finished job stays readable, also after its sandbox's end.
        ended_retention_s: how long the record of an ended sandbox is kept (and its id stays taken).
        agent_lost_after_s: an agent that cannot be reached for this long while a command runs is given up.
        terminal_detached_s: a terminal to which nobody has come back for this long is ended.
        job_cache_bytes: finished jobs kept in memory; the others are read from disk.
        keep_alive_s: idle HTTP connections are closed after this.
        shutdown_s: how long a stopping service waits for answers under way.
        pull: `missing` pulls images that are not here from their registry when a sandbox asks for one; `never` does not.
        registry_auth_file: credentials for registries; None looks where skopeo and Docker do.
        insecure_registries: `HOST` or `HOST:PORT` of registries that may do without verified HTTPS.
        tunnel_targets: `NAME=URL` of what tunnels may lead to, see `orchard.env.orchestrator.tunnels.targets`.
        tunnel_connect_timeout_s: how long a target may take to accept a connection.
        egress_resolver: `ADDR` or `ADDR:PORT` of the DNS server that resolves the names of `allow_egress`; None resolves
            them as this machine does.
        log_level: debug, info, warning, error or critical.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    runtime: str = "local"
    state_dir: Path = field(default_factory=default_state_dir)
    redis_url: str | None = field(default=None, repr=False)
    api_keys: list[str] = field(default_factory=list, repr=False)
    keys_file: Path | None = None
    audit_log: Path | None = None
    otel_endpoint: str | None = None
    max_starting: int = field(default_factory=default_max_starting)
    max_sandboxes: int | None = None
    max_queue: int = 10_000
    max_jobs: int = 100_000
    ready_timeout_s: float = DEFAULT_READY_TIMEOUT_S
    command_timeout_s: float = DEFAULT_COMMAND_TIMEOUT_S
    ttl_s: float = DEFAULT_TTL_S
    heartbeat_timeout_s: float = 180.0
    job_retention_s: float = FINISHED_JOB_RETENTION_S
    ended_retention_s: float = FINISHED_JOB_RETENTION_S
    agent_lost_after_s: float = 60.0
    terminal_detached_s: float = 900.0
    job_cache_bytes: int = 64 << 20
    keep_alive_s: int = 120
    shutdown_s: int = 10
    pull: str = "never"
    registry_auth_file: Path | None = None
    insecure_registries: list[str] = field(default_factory=list)
    tunnel_targets: list[str] = field(default_factory=list)
    tunnel_connect_timeout_s: float = 10.0
    egress_resolver: str | None = None
    log_level: str = "info"

    def __post_init__(self) -> None:
        self.state_dir = Path(self.state_dir)
        if self.keys_file is not None:
            self.keys_file = Path(self.keys_file)
        if self.registry_auth_file is not None:
            self.registry_auth_file = Path(self.registry_auth_file)
        if self.pull not in PULL_POLICIES:
            raise SettingsError(f"pull {self.pull!r} is unknown: use {' or '.join(PULL_POLICIES)}")
        if self.audit_log is not None:
            self.audit_log = Path(self.audit_log)
        if not 0 <= self.port <= 65535:
            raise SettingsError(f"port {self.port} is out of range: use 0 (a free one) to 65535")
        for name in ("max_starting", "max_queue", "max_jobs", "keep_alive_s"):
            if getattr(self, name) < 1:
                raise SettingsError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in (
            "ready_timeout_s",
            "command_timeout_s",
            "ttl_s",
            "heartbeat_timeout_s",
            "agent_lost_after_s",
            "terminal_detached_s",
            "tunnel_connect_timeout_s",
        ):
            if not getattr(self, name) > 0:
                raise SettingsError(f"{name} must be positive, not {getattr(self, name)}")
        if self.max_sandboxes is not None and self.max_sandboxes < 1:
            raise SettingsError(f"max_sandboxes must be at least 1 or unset, not {self.max_sandboxes}")
        if self.otel_endpoint is not None and not self.otel_endpoint.startswith(("http://", "https://")):
            raise SettingsError(
                f"otel_endpoint {self.otel_endpoint!r:.200} must begin with http:// or https://"
            )
        if self.egress_resolver is not None:
            try:
                parse_resolver(self.egress_resolver)
            except ValueError as error:
                raise SettingsError(f"egress_resolver {error}") from None
        if self.redis_url is not None and not self.redis_url.startswith(("redis://", "rediss://", "unix://")):
            raise SettingsError(
                "redis_url must begin with redis://, rediss:// or unix:// (redis://[:PASSWORD@]HOST:PORT/0)"
            )
        if self.log_level not in _LOG_LEVELS:
            raise SettingsError(
                f"log_level {self.log_level!r} is unknown: use one of {', '.join(_LOG_LEVELS)}"
            )
        parse_targets(self.tunnel_targets)
        if any(not key for key in self.api_keys):
            raise SettingsError(
                "an API key is empty; give a long random text, such as the output of `openssl rand -hex 24`"
            )

    @property
    def open_access(self) -> bool:
        """No key is needed because none is configured."""
        return not self.api_keys and self.keys_file is None

    def check_exposure(self) -> None:
        """Refuse to serve without keys where other machines could reach it. Raises `SettingsError`."""
        if self.open_access and not _is_loopback(self.host):
            raise SettingsError(
                f"refusing to listen on {self.host} without an API key: anyone who reaches it could run commands on"
                " this machine. Give --api-key KEY (or ORCHARD_API_KEYS, or --keys-file), or listen on 127.0.0.1"
            )

    @classmethod
    def load(
        cls, file: Path | None = None, *, environ: Mapping[str, str] | None = None, **overrides: Any
    ) -> ServiceSettings:
        """Settings from a YAML or JSON file, then the environment (`ORCHARD_PORT`, `ORCHARD_API_KEYS=a,b`, …),
        then `overrides` that are not None; the later wins. Raises `SettingsError` for unknown names and values."""
        types_of = typing.get_type_hints(cls)
        values: dict[str, Any] = {}
        if file is not None:
            for name, value in read_mapping(file).items():
                if name not in types_of:
                    raise SettingsError(
                        f"{file}: unknown setting {name!r}; known are {', '.join(sorted(types_of))}"
                    )
                values[name] = _convert(name, types_of[name], value)
        for name, hint in types_of.items():
            text = (environ or {}).get(ENV_PREFIX + name.upper())
            if name == "otel_endpoint":
                text = text or (environ or {}).get(OTEL_VARIABLE)
            if text:
                values[name] = _convert(name, hint, text)
        for name, value in overrides.items():
            if name not in types_of:
                raise SettingsError(f"unknown setting {name!r}; known are {', '.join(sorted(types_of))}")
            if value is not None:
                values[name] = _convert(name, types_of[name], value)
        return cls(**values)

    def public(self) -> dict[str, Any]:
        """What may be logged: everything but the keys and passwords."""
        secret = ("api_keys", "redis_url")
        shown = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in secret}
        return {name: str(value) if isinstance(value, Path) else value for name, value in shown.items()}


def read_mapping(file: Path) -> dict[str, Any]:
    """The mapping in a JSON or YAML file. Raises `SettingsError` when it cannot be read or is no mapping."""
    data = read_document(file)
    if not isinstance(data, dict):
        raise SettingsError(f"{file}: expected a mapping of names to values")
    return data


def read_document(file: Path) -> Any:
    """The content of a JSON or YAML file. Raises `SettingsError` when it cannot be read."""
    try:
        text = file.read_text("utf-8")
    except (OSError, UnicodeError) as error:
        raise SettingsError(f"cannot read {file}: {error}") from None
    try:
        return json.loads(text)
    except ValueError as error:
        if file.suffix == ".json":
            raise SettingsError(f"{file} is not JSON: {error}") from None
    try:
        yaml = importlib.import_module("yaml")
    except ImportError:
        raise SettingsError(f"{file} is not JSON; to read YAML, `pip install pyyaml`") from None
    try:
        return yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise SettingsError(f"{file} is not YAML: {error}") from None


def _convert(name: str, hint: Any, value: Any) -> Any:
    """`value` as the setting's type; text is parsed, so the environment and YAML mean the same."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None or (isinstance(value, str) and value.lower() in ("none", "null")):
        if types.NoneType in options:
            return None
        raise SettingsError(f"{name} needs a value")
    target = next(option for option in options if option is not types.NoneType)
    try:
        if typing.get_origin(target) is list:
            if isinstance(value, str):
                return [item.strip() for item in value.split(",") if item.strip()]
            return [str(item).strip() for item in value]
        if isinstance(value, bool):
            raise ValueError("true and false mean nothing here")
        return target(value)
    except (TypeError, ValueError) as error:
        raise SettingsError(
            f"{name}: {value!r} is not a valid {getattr(target, '__name__', target)} ({error})"
        ) from None


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
