"""What the service asks the zygote to start: plain data over their socket. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

#: First host uid of the sandboxes' ranges, and the size of each: slot n owns 65,536 ids of its own.
FIRST_UID = 0x10000000
UIDS_PER_SANDBOX = 65536
MAX_SLOTS = 24_000


@dataclass(slots=True)
class NetworkSpec:
    """Address of the sandbox's interface and its gateway; name servers for resolv.conf."""

    address: str
    prefix_len: int
    gateway: str
    nameservers: list[str] = field(default_factory=list)


@dataclass(slots=True)
class LaunchSpec:
    """One sandbox. layers: directories of the root, topmost first. mounts: (target, layers) of further trees.

    Sizes in bytes, cpu in cores; None is no limit. slot chooses the uid range.
    """

    sandbox_id: str
    slot: int
    layers: list[str]
    mounts: list[tuple[str, list[str]]] = field(default_factory=list)
    image_ref: str = ""
    image_digest: str = ""
    cpu_cores: float | None = None
    memory_bytes: int | None = None
    disk_bytes: int | None = None
    pids: int | None = None
    network: NetworkSpec | None = None

    @property
    def base_uid(self) -> int:
        return FIRST_UID + self.slot * UIDS_PER_SANDBOX

    @classmethod
    def from_wire(cls, data: dict[str, Any]) -> LaunchSpec:
        network = data.pop("network", None)
        spec = cls(**data)
        spec.network = NetworkSpec(**network) if network else None
        return spec
