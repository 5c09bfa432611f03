"""What the zygote has ready for its children, and how they tell the service what becomes of a launch."""

from __future__ import annotations

import fcntl
import json
import os
import socket

from orchard.env.agent.containment import CgroupContainment
from orchard.env.runtimes.local import kernel, seccomp

TYPE_CHECKING = False  # importing typing would cost every sandbox most of a megabyte
if TYPE_CHECKING:
    from typing import Any

    from orchard.env.agent.containment import Containment
    from orchard.env.runtimes.local.cgroups import Cgroups
    from orchard.env.runtimes.local.processes import Processes


#: Descriptors that every child keeps have fixed numbers, so that it can close all others with one call.
NULL_FD, CONTROL_FD, ORDER_FD = 3, 4, 5
LAST_KEPT_FD = ORDER_FD


class Nursery:
    """What every child of the zygote starts from.

    scratch: the private tmpfs with mount points (`root`, `l0`…, `proc`, `dev`, `disk`). control: where events are told
    to the service. order: the socket that a newborn puts at `ORDER_FD`. ids: as in `LaunchSpec`.

    The last four methods are those in which an ordinary user's differs (`OrdinaryNursery`).
    """

    ids = 0

    def __init__(
        self,
        state_dir: str,
        cgroups: Cgroups | Processes,
        control_fd: int,
        words: tuple[int, int] | None = None,
    ) -> None:
        """Takes `control_fd` over. For a new process, in which the fixed numbers are free or control_fd itself.
        words: for the filter, see `seccomp.build`."""
        self.state_dir = state_dir
        self.scratch = f"{state_dir}/mnt"
        self.cgroups = cgroups
        self.seccomp = kernel.SeccompFilter(seccomp.build(words=words))
        self.last_capability = kernel.last_capability()
        high_fd = fcntl.fcntl(control_fd, fcntl.F_DUPFD_CLOEXEC, LAST_KEPT_FD + 1)
        os.close(control_fd)
        null_fd = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        for fd, number in ((high_fd, CONTROL_FD), (null_fd, NULL_FD)):
            if fd != number:
                os.dup2(fd, number, inheritable=False)
                os.close(fd)
        kind = (socket.AF_UNIX, socket.SOCK_SEQPACKET, 0)
        self.control = socket.socket(*kind, fileno=CONTROL_FD)
        os.dup2(CONTROL_FD, ORDER_FD, inheritable=False)
        self.order = socket.socket(*kind, fileno=ORDER_FD)

    def tell(self, event: str, launch: int, **facts: Any) -> None:
        """One event about a launch, to the service. SystemExit when that is gone; its next one has its own zygote."""
        try:
            self.control.send(json.dumps({"event": event, "launch": launch, **facts}).encode())
        except ConnectionError:
            raise SystemExit(0) from None

    def tell_failure(self, launch: int, error: BaseException) -> None:
        # Another process was gone: killed, or the whole zygote is. The next attempt has others.
        lost = isinstance(error, (ProcessLookupError, ConnectionError))
        self.tell(
            "failed", launch, detail=f"{type(error).__name__}: {error}", errno=getattr(error, "errno", None),
            retryable=lost,
        )  # fmt: skip

    def enter(self) -> None:
        """Go to where the zygote works. Raises OSError."""

    def note(self, pid: int) -> dict[str, str]:
        """What is noted of the first process of a sandbox."""
        del pid
        return {}

    def contain(self, groups: dict[str, int], told: dict[str, Any]) -> Containment:
        """In a newborn, before its filter: what keeps its commands together. groups: as `CgroupContainment` takes them.
        told: by `Midwife.deliver`."""
        del told
        return CgroupContainment(groups)

    def remove(self, launch: int, sandbox_id: str) -> None:
        """In the zygote: remove the tree of a sandbox, by a process of its own that tells the launch when it is done."""
        raise OSError("root's service removes trees itself")
