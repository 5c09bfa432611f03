"""The service itself."""

from __future__ import annotations

from pydantic import ConfigDict

from orchard.env.contract.base import Answer


class ServiceInfo(Answer):
    service: str = "orchard"
    version: str
    status: str = "running"


class Health(Answer):
    status: str = "healthy"


class Resources(Answer):
    """Capacity and use of the machine or cluster, and of the create queue. Extra fields vary by runtime."""

    model_config = ConfigDict(extra="allow")

    runtime: str
    cpu_cores: float
    memory_bytes: int
    memory_available_bytes: int
    disk_bytes: int | None = None
    disk_available_bytes: int | None = None
    sandboxes: dict[str, int] = {}
    queue_length: int = 0
    starting: int = 0
    max_starting: int = 0
    max_sandboxes: int | None = None
