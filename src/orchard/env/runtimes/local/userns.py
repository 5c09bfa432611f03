"""How the zygote of an ordinary user becomes root: of a user namespace, in which everything else happens."""

from __future__ import annotations

import os

from orchard.env.runtimes.local import kernel

TYPE_CHECKING = False  # importing typing would cost every sandbox most of a megabyte
if TYPE_CHECKING:
    from collections.abc import Sequence

    Range = tuple[int, int, int]


def become_root(uids: Sequence[Range], gids: Sequence[Range]) -> None:
    """Enter a new user namespace with these ids: (first inside, first outside, how many). Raises OSError.

    More than the user's own are mapped by newuidmap and newgidmap, which have to be called from outside.
    """
    me = os.getpid()
    ready_read, ready_write = os.pipe2(os.O_CLOEXEC)
    helper = os.fork()
    if helper == 0:
        os.close(ready_write)
        code = 1
        try:
            if os.read(ready_read, 1) == b"1":
                code = _map_from_outside(me, uids, gids)
        finally:
            os._exit(code)
    os.close(ready_read)
    try:
        kernel.unshare(kernel.CLONE_NEWUSER)
        os.write(ready_write, b"1")
    except OSError as error:
        raise OSError(error.errno, f"no user namespace can be made ({error.strerror})") from None
    finally:
        os.close(ready_write)
        _, status = os.waitpid(helper, 0)
    if status != 0:
        raise OSError(
            f"the ids of /etc/subuid and /etc/subgid cannot be mapped (newuidmap ended with {status})"
        )
    if len(uids) == 1:
        kernel.write_control("/proc/self/setgroups", "deny")
        for name, ((inside, outside, count),) in (("uid_map", uids), ("gid_map", gids)):
            kernel.write_control(f"/proc/self/{name}", f"{inside} {outside} {count}")
    else:
        os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)


def _map_from_outside(pid: int, uids: Sequence[Range], gids: Sequence[Range]) -> int:
    if len(uids) == 1:
        return 0  # what a process may do itself
    for program, ranges in (("newuidmap", uids), ("newgidmap", gids)):
        arguments = [program, str(pid), *(str(number) for each in ranges for number in each)]
        environment = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"}
        code = os.spawnvpe(os.P_WAIT, program, arguments, environment)
        if code != 0:
            return code
    return 0


def check_proc() -> None:
    """Try to mount the /proc of a new PID namespace, in a process that ends at once. Raises OSError: the kernel refuses
    it where anything is mounted over parts of the /proc that is there."""
    pid, pidfd = kernel.clone3(kernel.CLONE_NEWPID | kernel.CLONE_NEWNS)
    if pid == 0:
        number = 1
        try:
            os.close(kernel.new_mount("proc", [], kernel.PROC_ATTRIBUTES))
            number = 0
        except OSError as error:
            number = error.errno or number
        finally:
            os._exit(number)
    os.close(pidfd)
    _, status = os.waitpid(pid, 0)
    if status != 0:
        number = os.waitstatus_to_exitcode(status)
        raise OSError(
            number, f"no new /proc can be mounted beside the one that is there ({os.strerror(number)})"
        )
