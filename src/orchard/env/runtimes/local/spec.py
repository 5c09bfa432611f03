"""What the service asks the zygote to start: plain data over their socket. Standard library only."""

from __future__ import annotations

import struct

TYPE_CHECKING = False  # importing typing would cost every sandbox most of a megabyte
if TYPE_CHECKING:
    from typing import Any

#: Head of a request to the zygote: b"C" create (followed by the JSON of a `LaunchSpec`), b"G" go (the network
#: interface is there) or b"R" remove (followed by the id of a sandbox whose processes are gone); the number of the
#: launch, its slot, whether it has a network. Fixed, so that the zygote itself need not parse JSON. With b"C" comes a
#: descriptor: the agent's end of its channel.
REQUEST = struct.Struct("<cII?")

#: First host uid of the sandboxes' ranges, and the size of each: slot n owns 65,536 ids of its own.
FIRST_UID = 0x10000000
UIDS_PER_SANDBOX = 65536
MAX_SLOTS = 24_000


def base_uid(slot: int) -> int:
    """The host uid that is root in the sandbox of this slot."""
    return FIRST_UID + slot * UIDS_PER_SANDBOX


class NetworkSpec:
    """Address of the sandbox's interface and its gateway; name servers for resolv.conf."""

    __slots__ = ("address", "gateway", "nameservers", "prefix_len")

    def __init__(self, address: str, prefix_len: int, gateway: str, nameservers: list[str]) -> None:
        self.address = address
        self.prefix_len = prefix_len
        self.gateway = gateway
        self.nameservers = nameservers

    def to_wire(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


class LaunchSpec:
    """One sandbox. layers: directories of the root, topmost first. mounts: (target, layers, read_only) of
    further trees.

    Sizes in bytes, cpu in cores; None is no limit. slot chooses the uid range. ids: 0 where each sandbox has a range
    of its own; for an ordinary user, how many ids there are in the user namespace that all sandboxes are in.
    """

    __slots__ = (
        "cpu_cores", "disk_bytes", "ids", "image_digest", "image_ref", "layers", "memory_bytes", "mounts",
        "network", "pids", "sandbox_id", "slot",
    )  # fmt: skip

    def __init__(
        self, *, sandbox_id: str, slot: int, layers: list[str], mounts: list[tuple[str, list[str], bool]],
        image_ref: str, image_digest: str, cpu_cores: float | None = None, memory_bytes: int | None = None,
        disk_bytes: int | None = None, pids: int | None = None, network: NetworkSpec | None = None,
        ids: int = 0,
    ) -> None:  # fmt: skip
        self.sandbox_id = sandbox_id
        self.slot = slot
        self.layers = layers
        self.mounts = mounts
        self.image_ref = image_ref
        self.image_digest = image_digest
        self.cpu_cores = cpu_cores
        self.memory_bytes = memory_bytes
        self.disk_bytes = disk_bytes
        self.pids = pids
        self.network = network
        self.ids = ids

    @property
    def base_uid(self) -> int:
        """What is root in the sandbox, as the zygote counts."""
        return 0 if self.ids else base_uid(self.slot)

    def to_wire(self) -> dict[str, Any]:
        data = {name: getattr(self, name) for name in self.__slots__}
        if self.network is not None:
            data["network"] = self.network.to_wire()
        return data

    @classmethod
    def from_wire(cls, data: dict[str, Any]) -> LaunchSpec:
        network = data.pop("network")
        return cls(**data, network=NetworkSpec(**network) if network else None)
