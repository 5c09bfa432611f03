"""One connection to the agent: frames in, frames out, and the token before anything else."""

from __future__ import annotations

import socket
from collections import deque

from orchard.env.agent.job import AgentError
from orchard.env.agent.loop import READ, WRITE
from orchard.env.agent.wire import FrameReader, WireError, frame

TYPE_CHECKING = False  # importing typing would cost every sandbox most of a megabyte
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from orchard.env.agent.server import Agent

    Made = Callable[[], tuple[dict[str, Any], bytes]]

#: One buffer for all receiving, made before the first fork: an agent's own would be 16 pages that it has to be given.
RECEIVED = memoryview(bytearray(1 << 16))
#: A connection whose peer stops reading is dropped at this much unsent output: the jobs stay.
_UNSENT_CAP = 512 << 20
#: With more than this unsent, further answers wait.
_ROOM_BYTES = 16 << 20


class Connection:
    """One peer. Until `hello` brought the token, nothing but `hello` is understood."""

    def __init__(self, agent: Agent, sock: socket.socket) -> None:
        self._agent = agent
        self._sock = sock
        self._fd = sock.fileno()
        self._reader = FrameReader(max_header=64 << 10, max_payload=0)
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._unmade: deque[tuple[Any, Made]] = deque()
        self._writing = False
        self.authenticated = False
        self.closed = False

    def trust(self) -> None:
        """From here on it is the service's: frames of any size are read and operations served."""
        self.authenticated = True
        self._reader = FrameReader()

    def start(self) -> None:
        self._agent.loop.watch(self._fd, READ, self._ready)

    def _ready(self, events: int) -> None:
        if events & WRITE & ~READ:
            self._flush()
        if events & READ and not self.closed:
            self._receive()

    def _receive(self) -> None:
        view = RECEIVED
        try:
            count = self._sock.recv_into(view)
        except BlockingIOError:
            return
        except OSError:
            count = 0
        if not count:
            self.close()
            return
        try:
            for header, payload in self._reader.feed(view[:count]):
                if not self.closed:
                    self._handle(header, payload)
        except WireError as error:
            self._agent.log(f"connection closed: {error}")
            self.close()

    def _handle(self, header: dict[str, Any], payload: bytes) -> None:
        request_id = header.get("id")
        hello = header.get("op") == "hello"
        if not self.authenticated:
            if not hello or not self._agent.token_matches(header.get("token")):
                self.send(
                    {
                        "id": request_id,
                        "error": {
                            "code": "unauthorized",
                            "detail": "the first frame must be hello with the sandbox's token",
                        },
                    }
                )
                self.close()
                return
            self.trust()

        def answer(result: dict[str, Any] | Made, body: bytes = b"") -> None:
            if callable(result):
                self._send_when_room(request_id, result)
            else:
                self.send({"id": request_id, "ok": True, **result}, body)

        def fail(error: AgentError) -> None:
            self.send(
                {"id": request_id, "error": {"code": error.code, "detail": error.detail, **error.extra}}
            )

        try:
            if hello:
                self._hello(request_id, header)
            else:
                self._agent.dispatch(header, payload, answer, fail)
        except AgentError as error:
            fail(error)
        except UnicodeEncodeError:
            fail(AgentError("invalid_request", "text holds characters that are not encodable as UTF-8"))
        except (KeyError, TypeError, ValueError) as error:
            fail(AgentError("invalid_request", f"{type(error).__name__}: {error}"))
        except OSError as error:
            fail(AgentError("infrastructure_error", f"the agent could not do it: {error}"))
        except Exception as error:
            # A request without an answer would be waited for for ever.
            self._agent.log(f"internal error in {header.get('op')!r:.80}: {type(error).__name__}: {error}")
            fail(AgentError("invalid_request", f"{type(error).__name__}: {error}"))

    def _hello(self, request_id: Any, header: dict[str, Any]) -> None:
        self._agent.configure(header.get("configure"))
        use = header.get("use")
        self.send({"id": request_id, "ok": True, "use": use, **self._agent.hello()})
        if use == "tunnels" and not self.closed:
            # From here on the socket is the tunnels', with frames of their own.
            self._agent.loop.unwatch(self._fd)
            self.closed = True
            self._agent.connections.discard(self)
            self._agent.tunnels.attach(self._sock)

    def send(self, header: dict[str, Any], payload: bytes = b"") -> None:
        if self.closed:
            return
        data = memoryview(frame(header, payload))
        if not self._unsent:
            try:
                sent = self._sock.send(data)
            except BlockingIOError:
                sent = 0
            except OSError:
                self.close()
                return
            if sent == len(data):
                return
            data = data[sent:]
        self._unsent.append(data)
        self._unsent_bytes += len(data)
        if self._unsent_bytes > _UNSENT_CAP:
            self._agent.log("connection closed: its peer does not read")
            self.close()
        elif not self._writing:
            self._writing = True
            self._agent.loop.watch(self._fd, READ | WRITE, self._ready)

    def _send_when_room(self, request_id: Any, made: Made) -> None:
        """Large answers are made only when their turn to be sent comes: many at once would not fit into memory."""
        if self._unsent_bytes > _ROOM_BYTES:
            self._unmade.append((request_id, made))
        elif not self.closed:
            result, body = made()
            self.send({"id": request_id, "ok": True, **result}, body)

    def _make_more(self) -> None:
        while self._unmade and self._unsent_bytes <= _ROOM_BYTES:
            self._send_when_room(*self._unmade.popleft())

    def _flush(self) -> None:
        try:
            while self._unsent:
                sent = self._sock.send(self._unsent[0])
                self._unsent_bytes -= sent
                if sent < len(self._unsent[0]):
                    self._unsent[0] = self._unsent[0][sent:]
                else:
                    self._unsent.popleft()
        except BlockingIOError:
            self._make_more()
            return
        except OSError:
            self.close()
            return
        if self._writing:
            self._writing = False
            self._agent.loop.watch(self._fd, READ, self._ready)
        self._make_more()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._agent.loop.unwatch(self._fd)
            self._sock.close()
            self._unsent.clear()
            self._unmade.clear()
            self._agent.connections.discard(self)
            if self.authenticated and not any(each.authenticated for each in self._agent.connections):
                # Whoever sent them is gone: half a file is never finished.
                self._agent.files.abort_all()
