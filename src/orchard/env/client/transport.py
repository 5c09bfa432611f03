"""HTTP to the service: connections, time limits, retries, and errors as types. With `flows`, the only user of
aiohttp.

A request is sent again only after a connection error or a 503, and only where a repeat does no harm (see
`Repeat`). A 502 or 504 that a gateway wrote is a connection error one hop further on: our service sends
neither.
"""

from __future__ import annotations

import asyncio
import json
import os
import warnings
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from enum import Enum
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

import aiohttp
from pydantic import BaseModel, ValidationError
from yarl import URL

from orchard.env.client.flows import Lost, Outgoing, Socket, losses, pieces
from orchard.env.client.process import connection_limit, make_immortal
from orchard.env.client.retry import Backoff, parse_retry_after
from orchard.env.client.settings import ClientSettings
from orchard.env.client.tracing import trace_headers
from orchard.env.contract import API_VERSION, KEY_HEADER, VERSION_HEADER, field_of
from orchard.env.errors import (
    ConnectionFailed,
    InfrastructureError,
    InvalidRequest,
    OrchardError,
    Overloaded,
    from_body,
)

#: Shorter than any server keeps an idle connection (ours: 120 s), so that none is reused as it closes.
_KEEPALIVE_S = 55.0
_GATEWAY_STATUS = (502, 504)
_SOCKET_HEARTBEAT_S = 20.0
_MAX_MESSAGE_BYTES = 8 << 20
#: As `silence_s`: the service may be silent for as long as it likes.
FOREVER = float("inf")

Answer = TypeVar("Answer", bound=BaseModel)
Taken = TypeVar("Taken")
Body = bytes | Outgoing
Query = Sequence[tuple[str, str]]


class Repeat(Enum):
    """Whether a request may be sent again."""

    #: A repeat changes nothing: reads, deletions, and whatever carries an id that the client chose.
    SAFE = "safe"
    #: The same, but after a lost connection the caller wants to ask first what became of it.
    UNLESS_LOST = "unless_lost"
    #: A repeat could do it twice (input, signals, patches): only when it surely never arrived.
    UNSENT_ONLY = "unsent_only"


class _Refused(Exception):
    """An answer that is an error: its status on the wire and what it means."""

    def __init__(self, status: int, error: OrchardError) -> None:
        super().__init__(status, error)
        self.status = status
        self.error = error


def path_of(*segments: str) -> str:
    """A URL path from raw segments: each is quoted."""
    return "".join("/" + quote(segment, safe="") for segment in segments)


def wait_query(slice_s: float, name: str = "timeout") -> Query:
    """The query of a server-side wait; the service takes no time of zero."""
    return [(name, f"{max(slice_s, 0.001):.3f}")]


def build(model: type[Answer], **fields: Any) -> Answer:
    """A request model from keyword arguments; None means not given. Raises `InvalidRequest`."""
    try:
        given = {name: value for name, value in fields.items() if value is not None}
        # The service is strict about JSON types; what leaves here has them, so callers need not be.
        return model.model_validate(given, strict=False)
    except ValidationError as error:
        raise InvalidRequest(_readable(error)) from None


def encode(request: BaseModel) -> bytes:
    """A request model as JSON. Raises `InvalidRequest` for text that is not Unicode."""
    try:
        return request.model_dump_json(exclude_none=True).encode()
    except ValueError as error:
        hint = "text must be valid Unicode; pass other bytes through a file"
        raise InvalidRequest(f"{hint}: {error}") from None


def _readable(error: ValidationError) -> str:
    parts = []
    for problem in error.errors(include_url=False, include_context=False):
        where = field_of(problem["loc"])
        message = problem["msg"].removeprefix("Value error, ")
        parts.append(f"{where}: {message}" if where else message)
    return "; ".join(dict.fromkeys(parts))


class Transport:
    """Requests to one service, from any number of tasks at once.

    Follows its user across event loops and forks: a session belongs to one process and one loop, and another
    is opened where the old one cannot be used.
    """

    def __init__(self, settings: ClientSettings) -> None:
        self.settings = settings
        self._bases = settings.base_urls
        #: The service that is asked: it changes when one does not answer.
        self._base = self._bases[0]
        self._session: aiohttp.ClientSession | None = None
        self._home: tuple[int, asyncio.AbstractEventLoop] | None = None
        self._answered = False
        self._warned = False
        self._closed = False
        self._leaving: set[asyncio.Future[None]] = set()

    async def call(
        self,
        method: str,
        path: str,
        answer: type[Answer],
        *,
        body: Body | None = None,
        query: Query = (),
        repeat: Repeat = Repeat.SAFE,
        silence_s: float | None = None,
    ) -> Answer:
        """One logical request, parsed. See `request`."""
        raw = await self.request(method, path, body=body, query=query, repeat=repeat, silence_s=silence_s)
        try:
            return answer.model_validate_json(raw)
        except ValidationError as error:
            raise InfrastructureError(
                f"{self._base}{path} gave an answer that this client does not understand"
                f" (is it an Orchard service of version {API_VERSION}?): {_readable(error)[:400]}"
            ) from None

    async def request(
        self,
        method: str,
        path: str,
        *,
        body: Body | None = None,
        query: Query = (),
        repeat: Repeat = Repeat.SAFE,
        silence_s: float | None = None,
    ) -> bytes:
        """One logical request, sent again after connection errors and 503 as far as `repeat` allows.

        silence_s: how long the service may say nothing (default: `request_timeout_s`).
        Raises the typed error of the answer, or `ConnectionFailed` (its `extra["sent"]` is false when the
        request surely never reached the service), or what the stream that is the body raises.
        """

        async def attempt() -> bytes:
            response = await self._open(method, path, body, query, silence_s)
            try:
                with losses():
                    return await response.read()
            finally:
                response.close()

        return await self._repeated(attempt, repeat, body)

    async def receive(
        self, path: str, query: Query, take: Callable[[AsyncIterator[bytes]], Awaitable[Taken]]
    ) -> Taken:
        """What `take` makes of the body of a GET; it is called anew with another body when the first breaks off."""

        async def attempt() -> Taken:
            response = await self._open("GET", path, None, query, None)
            try:
                return await take(pieces(response))
            finally:
                response.close()

        return await self._repeated(attempt, Repeat.SAFE, None)

    async def open_stream(
        self,
        path: str,
        query: Query,
        silence_s: float | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        again: bool = False,
    ) -> AsyncGenerator[bytes, None]:
        """The body of a GET, as it comes; one attempt, or with `again` as many as `request` makes until it begins.

        silence_s: how long the service may say nothing. Raises the typed error of the answer, or `ConnectionFailed`, also
        in the middle.
        """

        async def attempt() -> aiohttp.ClientResponse:
            return await self._open("GET", path, None, query, silence_s, headers)

        response = await self._repeated(attempt, Repeat.SAFE if again else None, None)
        base = self._base
        try:
            async for piece in pieces(response):
                yield piece
        except Lost as lost:
            detail = self._lost_detail(str(lost))
            self._turn_from(base)
            raise ConnectionFailed(detail, sent=True) from lost.__cause__
        finally:
            response.close()

    async def _repeated(
        self, attempt: Callable[[], Awaitable[Taken]], repeat: Repeat | None, body: Body | None
    ) -> Taken:
        backoff = Backoff(self.settings.retry)
        while True:
            error: OrchardError
            first_contact = False
            base = self._base
            try:
                return await attempt()
            except Lost as lost:
                first_contact = lost.unsent and not self._answered
                again = not lost.final and (lost.unsent or repeat is Repeat.SAFE)
                error = ConnectionFailed(self._lost_detail(str(lost)), sent=not lost.unsent)
                self._turn_from(base)
                error.retryable = not lost.final
                error.__cause__ = lost.__cause__
            except _Refused as refused:
                error = refused.error
                if refused.status == 503:
                    self._turn_from(base)
                # An overloaded service has refused before doing anything: always safe.
                harmless = repeat is not Repeat.UNSENT_ONLY or isinstance(error, Overloaded)
                again = refused.status == 503 and error.retryable and harmless
            again = again and repeat is not None and (not isinstance(body, Outgoing) or body.whole)
            pause_s = backoff.pause_s(error.retry_after_s, first_contact=first_contact) if again else None
            if pause_s is None:
                raise error from error.__cause__
            await asyncio.sleep(pause_s)

    def _turn_from(self, base: str) -> None:
        """The next service is asked from now on, unless somebody has seen to that already."""
        if self._base == base:
            self._base = self._bases[(self._bases.index(base) + 1) % len(self._bases)]

    @property
    def answered(self) -> bool:
        """Whether the service has ever answered."""
        return self._answered

    async def open_socket(self, path: str, query: Query) -> Socket:
        """A WebSocket. Raises `ConnectionFailed`, or the typed error of a refusal."""
        base = self._base
        url = URL(base + path + ("?" + urlencode(query) if query else ""), encoded=True)
        try:
            opened = await self._open_session().ws_connect(
                url, heartbeat=_SOCKET_HEARTBEAT_S, max_msg_size=_MAX_MESSAGE_BYTES, headers=trace_headers()
            )
        except Lost as lost:
            raise ConnectionFailed(self._lost_detail(str(lost)), sent=not lost.unsent) from lost
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            detail = self._lost_detail(str(error) or type(error).__name__)
            self._turn_from(base)
            raise ConnectionFailed(detail, sent=False) from error
        self._answered = True
        return Socket(opened)

    async def close(self) -> None:
        """Close the connections. Repeating is fine; a later request raises `ConnectionFailed`."""
        self._closed = True
        session, home = self._session, self._home
        self._session = self._home = None
        if session is not None and home == (os.getpid(), asyncio.get_running_loop()):
            await session.close()
        elif session is not None and home is not None:
            self._abandon(session, home)

    async def _open(
        self,
        method: str,
        path: str,
        body: Body | None,
        query: Query,
        silence_s: float | None,
        more_headers: Mapping[str, str] | None = None,
    ) -> aiohttp.ClientResponse:
        """The answer to one request, good and not yet read; to be closed. Raises `Lost` or `_Refused`."""
        url = URL(self._base + path + ("?" + urlencode(query) if query else ""), encoded=True)
        if silence_s is None:
            silence_s = self.settings.request_timeout_s
        timeout = aiohttp.ClientTimeout(
            total=None,
            sock_connect=self.settings.connect_timeout_s,
            sock_read=None if silence_s == FOREVER else silence_s,
        )
        outgoing = body if isinstance(body, Outgoing) else None
        headers = {**(more_headers or {}), **trace_headers()}
        if body is not None:
            headers["Content-Type"] = outgoing.media_type if outgoing else "application/json"
        try:
            with losses():
                response = await self._open_session().request(
                    method, url, data=body, headers=headers, timeout=timeout, allow_redirects=False
                )
        except aiohttp.InvalidURL as error:
            raise InvalidRequest(f"invalid base_url {self._base!r}: {error}") from None
        except Lost:
            if outgoing is not None and outgoing.error is not None:
                raise outgoing.error from None
            raise
        self._answered = True
        self._check_version(response.headers)
        if response.status < 300:
            return response
        try:
            with losses():
                raw = await response.read()
        finally:
            # Also what is still being sent: nobody wants the rest of it.
            response.close()
        raise self._error_of(response.status, response.headers, raw)

    def _error_of(self, status: int, headers: Mapping[str, str], raw: bytes) -> Exception:
        try:
            body = json.loads(raw)
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict) or "detail" not in body:
            if status in _GATEWAY_STATUS:
                return Lost(f"a gateway answered {status}: it lost its connection to the service")
            text = raw[:200].decode("utf-8", "replace").strip()
            hint = "" if status == 503 else f"; is {self._base} an Orchard service?"
            body = {"detail": f"HTTP {status} {text}{hint}"}
        error = from_body(status, body)
        header_s = parse_retry_after(headers.get("Retry-After"))
        if header_s is not None:
            error.retry_after_s = header_s
        return _Refused(status, error)

    def _check_version(self, headers: Mapping[str, str]) -> None:
        theirs = headers.get(VERSION_HEADER)
        if theirs is None or self._warned:
            return
        if theirs.split(".")[0] != API_VERSION.split(".")[0]:
            self._warned = True
            warnings.warn(
                f"the service at {self._base} speaks version {theirs} of the contract and this"
                f" client {API_VERSION}: install the release of orchard-agents that matches the service",
                stacklevel=4,
            )

    def _lost_detail(self, reason: str) -> str:
        if self._answered:
            return f"no answer from {self._base}: {reason}"
        return (
            f"no service answers at {self._base}: {reason}."
            " Start one with `orchard serve`, or set ORCHARD_BASE_URL"
        )

    def _open_session(self) -> aiohttp.ClientSession:
        if self._closed:
            raise Lost("this client was closed", unsent=True, final=True)
        home = (os.getpid(), asyncio.get_running_loop())
        if self._session is not None and self._home == home:
            return self._session
        if self._session is not None and self._home is not None:
            self._abandon(self._session, self._home)
        key = self.settings.api_key
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=connection_limit(), keepalive_timeout=_KEEPALIVE_S, ttl_dns_cache=300
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"Accept": "application/json", **({KEY_HEADER: key} if key else {})},
        )
        self._home = home
        return self._session

    def _abandon(self, session: aiohttp.ClientSession, home: tuple[int, asyncio.AbstractEventLoop]) -> None:
        """Let go of a session whose process or loop is not this one."""
        pid, loop = home
        if pid != os.getpid():
            make_immortal(session)
        elif loop.is_closed():
            # Nothing is left to wait for; this only marks it closed.
            self._keep(asyncio.ensure_future(session.close()))
        else:
            loop.call_soon_threadsafe(lambda: self._keep(loop.create_task(session.close())))

    def _keep(self, task: asyncio.Future[None]) -> None:
        # A loop holds its tasks weakly.
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)
