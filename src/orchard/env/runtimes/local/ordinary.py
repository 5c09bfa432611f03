"""The local runtime in the hands of an ordinary user: which ids it may use, and what is weaker then."""

from __future__ import annotations

import os
import pwd
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from orchard.env.errors import RuntimeRefused
from orchard.env.runtimes.base import SandboxSpec
from orchard.env.runtimes.local.cgroups import Cgroups
from orchard.env.runtimes.local.delegated import DelegatedCgroups, delegated_group
from orchard.env.runtimes.local.processes import Processes

_MAX_IDS = 65536
_MAPPERS = ("newuidmap", "newgidmap")
HOW_TO_GET_A_RANGE = (
    "apt install uidmap, and a line `USER:100000:65536` in both /etc/subuid and /etc/subgid, gives sandboxes more users"
    " than root"
)
HOW_TO_GET_LIMITS = (
    "start the service in a control group of its own (systemd-run --user --scope -p Delegate=yes orchard serve …), or as"
    " root"
)


@dataclass(frozen=True)
class Ordinary:
    """The ids of sandboxes. uids, gids: (first inside, first outside, how many): the user's own, which is root inside,
    and where there is one the range that belongs to it. group: the directory of the control group that it may use, or
    nothing."""

    uids: tuple[tuple[int, int, int], ...]
    gids: tuple[tuple[int, int, int], ...]
    group: str = ""

    @classmethod
    def detect(cls, subuid: Path = Path("/etc/subuid"), subgid: Path = Path("/etc/subgid")) -> Ordinary:
        """Those of the user that this process runs as."""
        uid, gid = os.geteuid(), os.getegid()
        try:
            name = pwd.getpwuid(uid).pw_name
        except KeyError:
            name = str(uid)
        ranges = [_range(path, name, uid) for path in (subuid, subgid)]
        mappers = all(shutil.which(program) for program in _MAPPERS)
        count = min((length for _, length in ranges), default=0) if mappers else 0
        uids, gids = (
            ((0, own, 1), (1, first, count)) if count else ((0, own, 1),)
            for own, (first, _) in zip((uid, gid), ranges, strict=True)
        )  # fmt: skip
        return cls(uids, gids, delegated_group())

    @property
    def ids(self) -> int:
        """How many users (and groups) there are inside."""
        return sum(count for _, _, count in self.uids)

    def to_wire(self) -> dict[str, Any]:
        """For the zygote."""
        return {**asdict(self), "ids": self.ids}

    def cgroups(self, instance: str, state_dir: str) -> Cgroups | Processes:
        """What the service looks at its sandboxes with."""
        if self.group:
            return DelegatedCgroups(instance, self.group, state_dir)
        return Processes(state_dir)

    def check(self, spec: SandboxSpec, enforced: set[str]) -> None:
        """Raises `RuntimeRefused` for what cannot be kept here. enforced: as `Cgroups.enforced` tells."""
        for name, value in (("memory", spec.memory_bytes), ("cpu", spec.cpu_cores)):
            if value is not None and name not in enforced:
                raise RuntimeRefused(
                    f"{name} cannot be limited by this service of an ordinary user: leave `{name}` out, or"
                    f" {HOW_TO_GET_LIMITS}"
                )
        if not spec.block_network:
            raise RuntimeRefused(
                "a sandbox of an ordinary user's service has no network: leave block_network=true, or run the service"
                " as root"
            )

    def weaker(self, enforced: set[str]) -> list[str]:
        """What sandboxes of root have and these have not."""
        (_, uid, _), *more = self.uids
        lines = [
            f"root of every sandbox is uid {uid} of the machine: only namespaces keep it from this user's files"
        ]
        if more:
            lines.append(
                f"all sandboxes share the ids {more[0][1]} to {more[0][1] + more[0][2] - 1} for other users"
            )
        else:
            lines.append(f"no users but root inside ({HOW_TO_GET_A_RANGE})")
        if missing := [name for name in ("memory", "cpu") if name not in enforced]:
            what = " or ".join(missing)
            lines.append(
                f"asking for a limit of {what} is refused, and its use is not known ({HOW_TO_GET_LIMITS})"
            )
        if "pids" not in enforced:
            lines.append("the process limit holds for each user of a sandbox by itself (RLIMIT_NPROC)")
        if not self.group:
            lines.append(
                "a command's processes are told by a mark and ended one by one, not by a control group at once"
            )
        lines.append("block_network=false is refused (run the service as root)")
        lines.append(
            "files of an image are root's inside, and read-only where they are another user's on this machine"
        )
        return lines


def _range(path: Path, name: str, uid: int) -> tuple[int, int]:
    """First id and number of ids that belong to the user; (0, 0) for none."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0, 0
    for line in lines:
        who, _, rest = line.partition(":")
        first, _, count = rest.partition(":")
        if who in (name, str(uid)) and first.isdigit() and count.strip().isdigit():
            return int(first), min(int(count), _MAX_IDS - 1)
    return 0, 0
