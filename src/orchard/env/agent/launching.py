"""The step from a command that was asked for to its processes: streams, group, limits."""

from __future__ import annotations

import errno
import os

from orchard.env.agent import spawn, terminal

TYPE_CHECKING = False  # importing typing would cost every sandbox most of a megabyte
if TYPE_CHECKING:
    from orchard.env.agent import accounts
    from orchard.env.agent.containment import Containment, JobGroup
    from orchard.env.agent.job import Job
    from orchard.env.agent.pipes import Pipes


class Launcher:
    """null_fd: what a command reads that was given no input."""

    def __init__(self, containment: Containment, pipes: Pipes, null_fd: int) -> None:
        self._containment = containment
        self._pipes = pipes
        self._null_fd = null_fd

    def launch(
        self,
        job: Job,
        command: spawn.Command,
        env: list[bytes],
        account: accounts.Account,
        directory_fd: int,
    ) -> None:
        """Start the command of `job`, which then has its group, its pid and its streams. Raises `SpawnError`, OSError."""
        spec = job.spec
        if spec.pty:
            out_read, out_write = terminal.open_terminal(*spec.pty, account.uid)
            ours, theirs = [out_read], [out_write]
            stdin_fd = err_write = out_write
            err_read = -1
        else:
            out_read, out_write = os.pipe2(os.O_CLOEXEC)
            err_read, err_write = os.pipe2(os.O_CLOEXEC)
            ours, theirs = [out_read, err_read], [out_write, err_write]
            stdin_fd = self._null_fd
        stdin_write = -1
        try:
            if (spec.stdin or spec.stdin_open) and not spec.pty:
                stdin_fd, stdin_write = os.pipe2(os.O_CLOEXEC)
                theirs.append(stdin_fd)
                ours.append(stdin_write)
            group = self._containment.acquire()
            try:
                streams = (stdin_fd, out_write, err_write)
                try:
                    pid = self._spawn(job, command, env, account, directory_fd, streams)
                except spawn.SpawnError as error:
                    if error.stage != "fork" or error.number != errno.EAGAIN:
                        raise
                    # The process limit is reached. A command starts all the same, so that what fills the sandbox can
                    # be looked at and ended from inside; it just cannot fork.
                    # It is held until it is under the limit, so that it cannot fork before.
                    pid = self._spawn(
                        job, command, env, account, directory_fd, streams, past_limit_into=group
                    )
                else:
                    self._containment.adopt(group, pid)
            except BaseException:
                self._containment.release(group)
                raise
        except BaseException:
            for fd in (*ours, *theirs):
                os.close(fd)
            raise
        for fd in theirs:
            os.close(fd)
        job.group = group
        job.pid = pid
        if spec.pty:
            self._pipes.attach_terminal(job, out_read)
        else:
            self._pipes.attach(job, out_read, err_read, stdin_write)

    def _spawn(self, job: Job, command: spawn.Command, env: list[bytes], account: accounts.Account, directory_fd: int,
               streams: tuple[int, int, int], *, past_limit_into: JobGroup | None = None) -> int:  # fmt: skip
        """The pid. streams: what becomes stdin, stdout and stderr. past_limit_into: start it although the process limit is
        reached, and adopt it there. Raises `SpawnError`."""

        def hold(pid: int) -> None:
            assert past_limit_into is not None
            self._containment.leave()
            self._containment.adopt(past_limit_into, pid)

        keep_fds = job.turn.show() if job.turn is not None else ()
        self._containment.enter(past_limit=past_limit_into is not None)
        try:
            return spawn.spawn(command, env=env, directory_fd=directory_fd, account=account, stdin_fd=streams[0],
                               stdout_fd=streams[1], stderr_fd=streams[2], null_fd=self._null_fd,
                               terminal=job.spec.pty is not None, keep_fds=keep_fds,
                               hold=None if past_limit_into is None else hold)  # fmt: skip
        finally:
            self._containment.leave()
            if job.turn is not None:
                job.turn.hide()
