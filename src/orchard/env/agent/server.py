"""The agent itself: authentication and the operations of the wire protocol."""

from __future__ import annotations

import os
import socket
import time

# hmac would bring all of OpenSSL into every sandbox; this is the function it uses.
from _operator import _compare_digest

from orchard.env.agent import accounts
from orchard.env.agent.connection import Connection
from orchard.env.agent.entries import Entries
from orchard.env.agent.files import Files
from orchard.env.agent.job import AgentError, Defaults, Job, JobSpec
from orchard.env.agent.jobs import REFUSALS, JobTable
from orchard.env.agent.loop import READ, Loop
from orchard.env.agent.output import Spool
from orchard.env.agent.paths import Places, make_directories
from orchard.env.agent.tunnels import Tunnels
from orchard.env.agent.watches import Watches
from orchard.env.agent.wire import CHUNK_BYTES, WIRE_VERSION

TYPE_CHECKING = False  # importing typing would cost every sandbox most of a megabyte
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from orchard.env.agent.containment import Containment

_LOG_BYTES = 64 << 10


class Agent:
    """Serves one sandbox until it is killed. `token`: what `hello` must bring; user code cannot read it. `log_fd`: a
    file opened for reading and appending. `folder_fd`: a directory of the machine for the spool."""

    def __init__(
        self,
        listener: socket.socket,
        token: str,
        containment: Containment,
        null_fd: int,
        log_fd: int,
        folder_fd: int,
    ) -> None:
        self._listener = listener
        self._token = token.encode()
        self.loop = Loop(on_child=self._reap, on_error=self._report)
        self._log_fd = log_fd
        self.defaults = Defaults()
        self.containment = containment
        self.places = Places()
        self.files = Files(self.places)
        self.jobs = JobTable(self.loop, containment, self.defaults, null_fd, Spool(folder_fd), self.log)
        self.connections: set[Connection] = set()
        self._tunnels: Tunnels | None = None
        self._boot_id = os.urandom(8).hex()
        self._operations: dict[str, Callable[..., None]] = {
            "exec": self._exec, "job": self._job, "output": self._output, "jobs": self._list_jobs, "cancel": self._cancel,
            "signal": self._signal, "stdin": self._stdin, "resize": self._resize, "sessions": self._sessions,
            "end_session": self._end_session, "forget": self._forget, "read": self._read,
            "write": self._write, "abort": self._abort, "list": self._list, "log": self._log_op,
            "ping": self._ping, "statvfs": self._statvfs, "processes": self._processes,
            "tunnels": self._open_tunnels, "untunnel": self._close_tunnel, **Entries(self.places).operations(),
            **Watches(self.loop, self.places).operations(),
        }  # fmt: skip

    def run(self) -> None:
        self._listener.setblocking(False)
        self.loop.watch(self._listener.fileno(), READ, self._accept)
        self.loop.run()

    def close(self) -> None:
        """Close what it opened for itself; only where an agent does not simply die with its sandbox."""
        self.loop.close()
        self.jobs.surroundings.close()
        self._listener.close()

    def log(self, message: str) -> None:
        """One line into the log file, which outlives the agent; it starts anew when it is full."""
        line = f"{time.time():.3f} {message}\n".encode("utf-8", "replace")
        if os.fstat(self._log_fd).st_size + len(line) > _LOG_BYTES:
            os.ftruncate(self._log_fd, 0)
        os.write(self._log_fd, line[:_LOG_BYTES])

    def _report(self, error: BaseException) -> None:
        self.log(f"internal error: {type(error).__name__}: {error}")

    def _reap(self) -> None:
        self.jobs.reap()

    def _accept(self, _events: int) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            self._connect(sock)

    def _connect(self, sock: socket.socket) -> Connection:
        sock.setblocking(False)
        connection = Connection(self, sock)
        self.connections.add(connection)
        connection.start()
        return connection

    def attach(self, sock: socket.socket) -> Connection:
        """Serve a connection that needs no token: the agent was born with it, so its other end is the service's."""
        connection = self._connect(sock)
        connection.trust()
        return connection

    def token_matches(self, token: Any) -> bool:
        return isinstance(token, str) and _compare_digest(token.encode("utf-8", "replace"), self._token)

    def hello(self) -> dict[str, Any]:
        return {
            "version": WIRE_VERSION,
            "pid": os.getpid(),
            "boot_id": self._boot_id,
            "jobs": len(self.jobs.jobs),
        }

    def dispatch(
        self,
        header: dict[str, Any],
        payload: bytes,
        answer: Callable[..., None],
        fail: Callable[[AgentError], None],
    ) -> None:
        operation = self._operations.get(header.get("op", ""))
        if operation is None:
            raise AgentError("invalid_request", f"unknown operation {header.get('op')!r}")
        operation(header, payload, answer, fail)

    # --------------------------------------------------------------------------------------------- commands

    def configure(self, defaults: dict[str, Any] | None) -> None:
        """Set what commands start from."""
        if defaults is None:
            return
        self.defaults.env.update(defaults.get("env") or {})
        if defaults.get("user"):
            self.defaults.user = defaults["user"]
        if defaults.get("working_dir"):
            self.defaults.working_dir = self.places.base = defaults["working_dir"]
            self._make_working_dir(defaults["working_dir"])
        self.loop.after(0, self.jobs.warm_up)

    def _make_working_dir(self, path: str) -> None:
        """As container engines do: a working directory that the image lacks is made, for the sandbox's user."""
        if os.path.isdir(path):
            return
        try:
            account = self.jobs.surroundings.default_account()
            fd = make_directories(path.encode("utf-8", "surrogateescape"))
            try:
                os.fchown(fd, account.uid, account.gid)
            finally:
                os.close(fd)
        except (OSError, ValueError, accounts.UnknownUser) as error:
            # Commands will be told that it is missing.
            self.log(f"the working directory {path!r} could not be made: {error}")

    def _exec(self, header: dict[str, Any], payload: bytes, answer: Callable[..., None], fail: Any) -> None:
        spec = JobSpec(header, payload)
        job, attached = self.jobs.submit(spec)

        def done(job: Job) -> None:
            if job.error_code in REFUSALS:
                # It never ran: the caller gets the error itself, as when it is refused at once.
                self.jobs.forget(job.spec.job_id)
                fail(AgentError(job.error_code, job.error or ""))
            else:
                self._answer_job(job, answer, attached)

        if header.get("wait"):
            job.when_done(done)
        else:
            self._answer_job(job, answer, attached)

    def _answer_job(self, job: Job, answer: Callable[..., None], attached: bool = False) -> None:
        def made() -> tuple[dict[str, Any], bytes]:
            record, body = job.record()
            return {"job": record, "attached": attached} if attached else {"job": record}, body

        answer(made)

    def _job(
        self,
        header: dict[str, Any],
        _payload: bytes,
        answer: Callable[..., None],
        fail: Callable[[AgentError], None],
    ) -> None:
        job = self.jobs.get(header["job_id"])
        if not header.get("wait") or job.finished:
            self._answer_job(job, answer)
            return

        def done(job: Job) -> None:
            if timer is not None:
                timer.cancel()
            self._answer_job(job, answer)

        def expired() -> None:
            job.forget_callback(done)
            fail(AgentError("wait_timeout", f"job {job.spec.job_id} is still {job.status}"))

        timeout_s = header.get("timeout_s")
        timer = None if timeout_s is None else self.loop.after(timeout_s, expired)
        job.when_done(done)

    def _output(
        self, header: dict[str, Any], _payload: bytes, answer: Callable[..., None], _fail: Any
    ) -> None:
        """What a command has written since; waits for more where there is nothing yet."""
        job = self.jobs.get(header["job_id"])
        limit = min(int(header.get("limit", CHUNK_BYTES)), CHUNK_BYTES)
        wanted = [
            (name, output, int(header[f"{name}_offset"]))
            for name, output in (("stdout", job.stdout), ("stderr", job.stderr))
            if header.get(f"{name}_offset") is not None
        ]

        def made() -> tuple[dict[str, Any], bytes]:
            told: dict[str, Any] = {"finished": job.finished}
            payload = b""
            for name, output, offset in wanted:
                start, data = output.read(offset, limit // len(wanted))
                told[f"{name}_offset"], told[f"{name}_size"], told[f"{name}_total"] = (
                    start,
                    len(data),
                    output.total,
                )
                payload = payload + data if payload else data
            return told, payload

        def look() -> None:
            if timer is not None:
                timer.cancel()
            answer(made)

        def expired() -> None:
            if look in job.watchers:
                job.watchers.remove(look)
            answer(made)

        timer = None
        if job.finished or any(output.total > offset for _, output, offset in wanted):
            answer(made)
        else:
            timer = self.loop.after(float(header.get("timeout_s", 15.0)), expired)
            job.watchers.append(look)

    def _list_jobs(
        self, _header: dict[str, Any], _payload: bytes, answer: Callable[..., None], _fail: Any
    ) -> None:
        answer({"jobs": [job.listing() for job in self.jobs.jobs.values() if not job.spec.internal]})

    def _cancel(
        self, header: dict[str, Any], _payload: bytes, answer: Callable[..., None], _fail: Any
    ) -> None:
        job = self.jobs.get(header["job_id"])
        self.jobs.cancel(job, header.get("reason") or "cancelled")
        job.when_done(lambda job: self._answer_job(job, answer))

    def _signal(
        self, header: dict[str, Any], _payload: bytes, answer: Callable[..., None], _fail: Any
    ) -> None:
        self.jobs.send_signal(self.jobs.get(header["job_id"]), int(header["signal"]))
        answer({})

    def _stdin(self, header: dict[str, Any], payload: bytes, answer: Callable[..., None], _fail: Any) -> None:
        self.jobs.write_stdin(
            self.jobs.get(header["job_id"]), payload, bool(header.get("eof")), lambda: answer({})
        )

    def _resize(
        self, header: dict[str, Any], _payload: bytes, answer: Callable[..., None], _fail: Any
    ) -> None:
        self.jobs.resize(self.jobs.get(header["job_id"]), int(header["rows"]), int(header["cols"]))
        answer({})

    def _sessions(
        self, _header: dict[str, Any], _payload: bytes, answer: Callable[..., None], _fail: Any
    ) -> None:
        answer({"sessions": self.jobs.sessions.listing()})

    def _end_session(
        self, header: dict[str, Any], _payload: bytes, answer: Callable[..., None], _fail: Any
    ) -> None:
        answer({"existed": self.jobs.sessions.remove(header["name"])})

    def _forget(
        self, header: dict[str, Any], _payload: bytes, answer: Callable[..., None], _fail: Any
    ) -> None:
        for job_id in header["job_ids"]:
            self.jobs.forget(job_id)
        answer({})

    # ------------------------------------------------------------------------------------------------ files

    def _read(self, header: dict[str, Any], _payload: bytes, answer: Callable[..., None], _fail: Any) -> None:
        info, data = self.files.read(
            header["path"], int(header.get("offset", 0)), int(header.get("limit", CHUNK_BYTES)),
            header.get("root"), header.get("identity"),
        )  # fmt: skip
        answer(info, data)

    def _write(self, header: dict[str, Any], payload: bytes, answer: Callable[..., None], _fail: Any) -> None:
        mode = header.get("mode")
        answer(self.files.write(
            header["path"], header["upload"], int(header.get("offset", 0)), payload, bool(header.get("last", True)),
            None if mode is None else int(mode) & 0o7777, header.get("root"), header.get("modified_ns"),
        ))  # fmt: skip

    def _abort(
        self, header: dict[str, Any], _payload: bytes, answer: Callable[..., None], _fail: Any
    ) -> None:
        self.files.abort(header["upload"])
        answer({})

    def _list(self, header: dict[str, Any], _payload: bytes, answer: Callable[..., None], _fail: Any) -> None:
        answer(self.files.list(
            header["path"], header.get("root"), bool(header.get("raw")), header.get("after") or "", header.get("limit")
        ))  # fmt: skip

    # ---------------------------------------------------------------------------------------------- looking

    def _ping(
        self, _header: dict[str, Any], _payload: bytes, answer: Callable[..., None], _fail: Any
    ) -> None:
        answer({"now": time.time()})

    def _log_op(
        self, _header: dict[str, Any], _payload: bytes, answer: Callable[..., None], _fail: Any
    ) -> None:
        answer({"lines": os.pread(self._log_fd, _LOG_BYTES, 0).decode("utf-8", "replace").splitlines()})

    def _processes(
        self, _header: dict[str, Any], _payload: bytes, answer: Callable[..., None], _fail: Any
    ) -> None:
        """How many there are but the agent, where no control group counts them."""
        answer({"processes": sum(name.isdigit() for name in os.listdir("/proc")) - 1})

    def _statvfs(
        self, _header: dict[str, Any], _payload: bytes, answer: Callable[..., None], _fail: Any
    ) -> None:
        info = os.statvfs("/")
        answer({"total_bytes": info.f_blocks * info.f_frsize, "free_bytes": info.f_bavail * info.f_frsize})

    # ---------------------------------------------------------------------------------------------- tunnels

    @property
    def tunnels(self) -> Tunnels:
        """Made when the first one is asked for: most sandboxes have none."""
        if self._tunnels is None:
            self._tunnels = Tunnels(self.loop, self.log)
        return self._tunnels

    def _open_tunnels(
        self, header: dict[str, Any], _payload: bytes, answer: Callable[..., None], _fail: Any
    ) -> None:
        ports = [int(port) for port in header["ports"]]
        if header.get("exactly"):
            for port in self.tunnels.ports() - set(ports):
                self.tunnels.close(port)
        answer({"ports": self.tunnels.listen(ports)})

    def _close_tunnel(
        self, header: dict[str, Any], _payload: bytes, answer: Callable[..., None], _fail: Any
    ) -> None:
        answer({"existed": self.tunnels.close(int(header["port"]))})
