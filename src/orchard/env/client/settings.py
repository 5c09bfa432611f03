"""What a client needs to know, as one dataclass; the environment is read when it is made, never at import."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from orchard.env.client.retry import RetryPolicy
from orchard.env.errors import InvalidRequest

DEFAULT_BASE_URL = "http://localhost:8000"
#: First and second names of the environment variables.
BASE_URL_VARIABLES = ("ORCHARD_BASE_URL", "SANDBOX_BASE_URL")
API_KEY_VARIABLES = ("ORCHARD_API_KEY", "SANDBOX_API_KEY")


def environment_value(names: tuple[str, ...], environment: Mapping[str, str] | None = None) -> str | None:
    """The first of the variables that is set and not empty."""
    source = os.environ if environment is None else environment
    return next((source[name] for name in names if source.get(name)), None)


def resolve_base_url(base_url: str | None = None) -> str:
    """The argument, else ORCHARD_BASE_URL, else SANDBOX_BASE_URL, else http://localhost:8000."""
    return base_url or environment_value(BASE_URL_VARIABLES) or DEFAULT_BASE_URL


def resolve_api_key(api_key: str | None = None) -> str | None:
    """The argument, else ORCHARD_API_KEY, else SANDBOX_API_KEY, else none."""
    return api_key or environment_value(API_KEY_VARIABLES)


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """Settings of a client.

    base_url: where the service is; a path after the host is kept. Several with commas between are services that share
    their sandboxes: when one does not answer, the next is asked. api_key: sent as `X-API-Key`. Their defaults
    come from the environment at the moment the settings are made.
    request_timeout_s: longest silence of the service during an ordinary request. connect_timeout_s: longest
    time to open one connection. wait_slice_s: a long wait is made of server-side waits of at most this long,
    so that no gateway's idle limit (usually 60 s) cuts it. cleanup: delete the sandboxes that this client
    created when it closes or the program ends. handle_signals: when sandboxes have to be cleaned up at the
    end of the program and nobody else handles SIGTERM, turn it into `SystemExit`, so that clean-up runs.
    """

    base_url: str = field(default_factory=resolve_base_url)
    api_key: str | None = field(default_factory=resolve_api_key, repr=False)
    request_timeout_s: float = 60.0
    connect_timeout_s: float = 10.0
    wait_slice_s: float = 45.0
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    cleanup: bool = False
    handle_signals: bool = True

    def __post_init__(self) -> None:
        urls = [url.strip().rstrip("/") for url in self.base_url.split(",")]
        if not all(url.startswith(("http://", "https://")) for url in urls):
            raise InvalidRequest(
                f"invalid base_url {self.base_url!r:.200}: begin it with http:// or https:// (each of several, between"
                " commas)"
            )
        object.__setattr__(self, "base_url", ",".join(urls))

    @property
    def base_urls(self) -> tuple[str, ...]:
        """All of `base_url`, at least one."""
        return tuple(self.base_url.split(","))
