"""The pipes of running commands: output is read into windows, input is written as the command takes it."""

from __future__ import annotations

import os

from orchard.env.agent.loop import READ, WRITE

TYPE_CHECKING = False  # importing typing would cost every sandbox most of a megabyte
if TYPE_CHECKING:
    from orchard.env.agent.job import Job
    from orchard.env.agent.loop import Loop

_READ_BYTES = 65536
_READS_PER_EVENT = 4
#: Reads per stream after the exit: a background child that never stops writing must not hold the job.
_DRAIN_READS = 64
#: How long the output of a new command is left in its pipe.
_UNWATCHED_S = 0.003
#: One buffer for all reads, made before the first fork: an agent's own would be 16 pages that it has to be given.
_BUFFER = bytearray(_READ_BYTES)
_VIEW = memoryview(_BUFFER)


class Pipes:
    """Moves bytes between the loop and the jobs."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    def attach(self, job: Job, stdout_fd: int, stderr_fd: int, stdin_fd: int) -> None:
        """Take over the agent's ends of a started command's pipes; stdin_fd is -1 if it has no input.

        Output is watched after a moment only: most commands have ended by then, and what they wrote lies in the pipe.
        """
        for fd, output in ((stdout_fd, job.stdout), (stderr_fd, job.stderr)):
            os.set_blocking(fd, False)
            job.fds[fd] = output
        job.timers.append(self._loop.after(_UNWATCHED_S, lambda: self._watch(job)))
        if stdin_fd >= 0:
            os.set_blocking(stdin_fd, False)
            job.stdin_fd = stdin_fd
            self.pump_stdin(job)

    def attach_terminal(self, job: Job, fd: int) -> None:
        """Take over the agent's end of a command's terminal: all of its output, and its input."""
        os.set_blocking(fd, False)
        job.terminal_fd = fd
        job.fds[fd] = job.stdout
        # The input is closed for itself.
        job.stdin_fd = os.dup(fd)
        self._watch(job)
        self.pump_stdin(job)

    def _watch(self, job: Job) -> None:
        for fd in job.fds:
            self._loop.watch(fd, READ, lambda _events, fd=fd: self._read(job, fd, _READS_PER_EVENT))  # type: ignore[misc]

    def _read(self, job: Job, fd: int, reads: int) -> None:
        """Read what is there, at most `reads` buffers full; close the pipe at its end."""
        output = job.fds[fd]
        buffer, view = _BUFFER, _VIEW
        for _ in range(reads):
            try:
                count = os.readv(fd, (buffer,))
            except BlockingIOError:
                return
            except OSError:
                count = 0
            if not count:
                del job.fds[fd]
                self._loop.unwatch(fd)
                os.close(fd)
                return
            # After the job's end its result is fixed; what a background child still writes is drained so that
            # it never blocks, and dropped.
            if not job.finished:
                output.write(view[:count])
                if job.watchers:
                    job.fire_watchers()

    def finish(self, job: Job) -> None:
        """The command has exited: take what it has written. Pipes that its children hold are drained from here on."""
        for fd in list(job.fds):
            self._read(job, fd, _DRAIN_READS)
        self.close_stdin(job)
        if job.terminal_fd in job.fds:
            # What else holds the terminal is hung up on, as when a window is closed.
            del job.fds[job.terminal_fd]
            self._loop.unwatch(job.terminal_fd)
            os.close(job.terminal_fd)
        job.terminal_fd = -1
        if job.fds:
            self._watch(job)

    def pump_stdin(self, job: Job) -> None:
        buffer = job.stdin_buffer
        try:
            while buffer:
                with memoryview(buffer) as view:
                    sent = os.write(job.stdin_fd, view[:_READ_BYTES])
                del buffer[:sent]
        except BlockingIOError:
            self._loop.watch(job.stdin_fd, WRITE, lambda _events: self.pump_stdin(job))
            return
        except OSError:
            # The command closed its input: what it did not want is dropped, as in a shell pipeline.
            buffer.clear()
            self.close_stdin(job)
            return
        if job.spec.stdin_open:
            self._loop.unwatch(job.stdin_fd)
            self._release_stdin_waiters(job)
        else:
            self.close_stdin(job)

    def close_stdin(self, job: Job) -> None:
        if job.stdin_fd >= 0:
            self._loop.unwatch(job.stdin_fd)
            os.close(job.stdin_fd)
            job.stdin_fd = -1
        self._release_stdin_waiters(job)

    def _release_stdin_waiters(self, job: Job) -> None:
        waiters, job.stdin_waiters = job.stdin_waiters, []
        for waiter in waiters:
            waiter()
