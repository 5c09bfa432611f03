"""What the newborn process of a sandbox does before it becomes its agent.

It starts as real root in fresh mount, PID, network, IPC and UTS namespaces (which therefore belong to the machine, not
to the sandbox: nothing inside ever holds a capability over them). A midwife makes what is around it; it enters the user
namespace, gives up what it does not need and never returns.
"""

from __future__ import annotations

# The function itself: `signal` wraps it into enumerations, at ten times the cost.
import _signal  # type: ignore[import-not-found]
import gc
import json
import os
import socket

from orchard.env.agent import syscalls
from orchard.env.agent.server import Agent
from orchard.env.runtimes.local import kernel
from orchard.env.runtimes.local.descriptors import receive_fds
from orchard.env.runtimes.local.etc import write_etc_files
from orchard.env.runtimes.local.interfaces import bring_up_interface
from orchard.env.runtimes.local.midwife import MAX_ORDER_BYTES
from orchard.env.runtimes.local.nursery import LAST_KEPT_FD, NULL_FD, ORDER_FD
from orchard.env.runtimes.local.prefault import give_pages
from orchard.env.runtimes.local.spec import NetworkSpec

TYPE_CHECKING = False  # importing typing would cost every sandbox most of a megabyte
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from orchard.env.runtimes.local.nursery import Nursery

KEPT_CAPABILITIES = frozenset((
    "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETPCAP", "NET_BIND_SERVICE",
    "SYS_CHROOT", "SETFCAP",
))  # fmt: skip


def be_born(nursery: Nursery, order_fd: int, pages: Sequence[tuple[int, int]]) -> None:
    """In a newly forked process: wait for the order, then become the sandbox that it asks for. Never returns.

    pages: what it may take its time for now, to have it ready later.
    """
    launch = 0
    try:
        score_fd = prepare(nursery, order_fd)
        give_pages(pages)
        data, fds = receive_fds(nursery.order, MAX_ORDER_BYTES)
        if data:  # else the zygote is gone, or the midwife could not deliver
            told = json.loads(data)
            launch = told["launch"]
            wake(nursery, told, fds, score_fd).run()
    except ConnectionError:
        os._exit(0)  # nobody waits for it any more
    except BaseException as error:
        try:
            nursery.tell_failure(launch, error)
        finally:
            os._exit(70)
    os._exit(0)


def prepare(nursery: Nursery, order_fd: int) -> int:
    """What can be done before it is known which sandbox this is to be. Returns a descriptor of its `oom_score_adj`."""
    # The zygote's other descriptors are no business of a sandbox, its standard error among them.
    os.dup2(NULL_FD, 2)
    os.dup2(order_fd, ORDER_FD, inheritable=False)
    syscalls.close_range(LAST_KEPT_FD + 1)
    _signal.set_wakeup_fd(-1)
    # Only from inside its PID namespace can /proc be mounted; the midwife puts it into place.
    proc = f"{nursery.scratch}/proc"
    kernel.attach(kernel.new_mount("proc", [], kernel.PROC_ATTRIBUTES), proc)
    score_fd = os.open(f"{proc}/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
    nursery.order.send(b"1")
    return score_fd


def wake(nursery: Nursery, told: dict[str, Any], fds: list[int], score_fd: int) -> Agent:
    """The way from a delivered newborn to its agent. Raises OSError on the way.

    `told` and `fds` are what `Midwife.deliver` sends.
    """
    channel_fd, userns_fd, go_fd, folder_fd, log_fd, listener_fd, *group_fds = fds
    # Its own group is the root of what it sees from here on.
    kernel.unshare(kernel.CLONE_NEWCGROUP)
    network = told["network"] and NetworkSpec(**told["network"])
    if network:
        if os.read(go_fd, 1) != b"1":
            raise OSError("the network interface did not come up")
        bring_up_interface(network)
    os.close(go_fd)
    ids = told.get("ids", 0)
    enter_user_namespace(userns_fd, groups=ids != 1)
    groups = dict(zip(told["groups"], group_fds, strict=True), score=score_fd)
    containment = nursery.contain(groups, told)
    kernel.limit_capabilities(KEPT_CAPABILITIES, nursery.last_capability)
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
    nursery.seccomp.install()
    if not nursery.order.recv(1):
        os._exit(0)  # its tree could not be made
    nursery.order.close()
    os.close(nursery.control.detach())
    write_etc_files(told["sandbox_id"], network)
    # What was there before the birth is frozen; what an agent makes has few cycles.
    gc.set_threshold(20_000, 20, 100)
    gc.enable()
    # With its type told, a socket object need not ask the kernel.
    listener, channel = (
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, fileno=fd) for fd in (listener_fd, channel_fd)
    )
    agent = Agent(listener, told["token"], containment, NULL_FD, log_fd, folder_fd)
    if ids:
        agent.jobs.surroundings.limit_ids(ids)
    agent.attach(channel)
    return agent


def enter_user_namespace(userns_fd: int, *, groups: bool) -> None:
    """From here on root is the sandbox's root. groups: there are any that could be set."""
    kernel.setns(userns_fd, kernel.CLONE_NEWUSER)
    os.close(userns_fd)
    if groups:
        os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    os.umask(0o022)
    if os.getsid(0) != os.getpid():
        os.setsid()
