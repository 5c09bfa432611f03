"""The edge: request ids, version header, keys, errors and measurements around every request. Plain ASGI, for speed."""

from __future__ import annotations

import ipaddress
import itertools
import logging
import os
import re
import time
from typing import Any
from urllib.parse import parse_qsl

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orchard.env.contract import API_VERSION, REQUEST_ID_HEADER, VERSION_HEADER
from orchard.env.errors import Forbidden, InternalError, OrchardError, Unauthorized
from orchard.env.orchestrator.audit import AuditLog
from orchard.env.orchestrator.auth import KeyRing, Principal
from orchard.env.orchestrator.logging import request_id
from orchard.env.orchestrator.metrics import Metrics
from orchard.env.orchestrator.responses import error_response, from_http, from_validation
from orchard.env.orchestrator.routes.base import PRINCIPAL
from orchard.env.orchestrator.routes.service import PUBLIC_PATHS
from orchard.env.orchestrator.tracing import Tracing

_log = logging.getLogger(__name__)
KEY_SUBPROTOCOL = "api_key."
_SWITCHED = 101
_VERSION = (VERSION_HEADER.lower().encode(), API_VERSION.encode())
_REQUEST_ID = REQUEST_ID_HEADER.lower().encode()
_SAFE_ID = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}\Z")


class Edge:
    """audit: where changes and refused keys are written down; tracing: where spans go; None for nowhere."""

    def __init__(
        self,
        app: ASGIApp,
        keys: KeyRing,
        metrics: Metrics,
        audit: AuditLog | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self._app = app
        self._keys = keys
        self._metrics = metrics
        self._audit = audit
        self._tracing = tracing
        self._prefix = os.urandom(6).hex().encode()
        self._numbers = itertools.count(1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        headers: dict[bytes, bytes] = dict(scope["headers"])
        own_id = headers.get(_REQUEST_ID, b"")
        if not _SAFE_ID.match(own_id):
            own_id = b"%s-%x" % (self._prefix, next(self._numbers))
        request_id.set(own_id.decode("ascii"))
        span = None
        if self._tracing is not None and scope["path"] not in PUBLIC_PATHS:
            span = self._tracing.begin_request(scope, headers)
        status = 0
        seconds: float | None = None

        async def send_marked(message: Message) -> None:
            nonlocal status, seconds
            if message["type"] == "http.response.start":
                status = message["status"]
                seconds = time.perf_counter() - began
                message["headers"].extend((_VERSION, (_REQUEST_ID, own_id)))
            await send(message)

        try:
            if scope["path"] not in PUBLIC_PATHS:
                scope[PRINCIPAL] = self._principal(headers)
            await self._app(scope, receive, send_marked)
        except (OrchardError, HTTPException, RequestValidationError) as error:
            if status:
                raise  # half an answer is out: only breaking the connection tells that it is not whole
            await error_response(_typed(scope, error))(scope, receive, send_marked)
        except Exception:
            _log.exception(
                "a request failed in an unforeseen way",
                extra={"method": scope["method"], "path": scope["path"]},
            )
            if status:
                raise
            fault = InternalError("the service failed in an unforeseen way; its log has the request id")
            await error_response(fault)(scope, receive, send_marked)
        finally:
            route: Any = scope.get("route")
            if seconds is None:
                seconds = time.perf_counter() - began
            template = getattr(route, "path", "-")
            self._metrics.request(scope["method"], template, status, seconds)
            if span is not None and self._tracing is not None:
                self._tracing.end_request(span, scope, template, scope.get(PRINCIPAL), status)
            if self._audit is not None:
                self._audit.request(scope, scope.get(PRINCIPAL), status)
            if _log.isEnabledFor(logging.DEBUG):
                # Without the query: it may hold a key.
                fields = {
                    "method": scope["method"],
                    "path": scope["path"],
                    "status": status,
                    "seconds": round(seconds, 6),
                }
                _log.debug("answered", extra=fields)

    def principal_of_socket(self, scope: Scope) -> Principal:
        """Who opens a WebSocket: by the header, or where a client cannot set one, by the query (`api_key=`) or a
        subprotocol `api_key.KEY`. Raises `Unauthorized` or `Forbidden`."""
        try:
            principal = self._socket_key(scope)
        except Unauthorized as error:
            if self._audit is not None:
                self._audit.request(scope, None, error.http_status)
            raise
        if self._audit is not None:
            self._audit.request(scope, principal, _SWITCHED)
        return principal

    def _socket_key(self, scope: Scope) -> Principal:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        if self._keys.open:
            _check_browser(headers)
        key = headers.get(b"x-api-key")
        if key is None:
            given = dict(parse_qsl(scope["query_string"].decode("latin-1"))).get("api_key")
            offered = [name for name in scope["subprotocols"] if name.startswith(KEY_SUBPROTOCOL)]
            text = given or (offered[0].removeprefix(KEY_SUBPROTOCOL) if offered else None)
            key = None if text is None else text.encode("utf-8", "surrogatepass")
        return self._keys.principal(key)

    def _principal(self, headers: dict[bytes, bytes]) -> Principal:
        if self._keys.open:
            _check_browser(headers)
        return self._keys.principal(headers.get(b"x-api-key"))


def _typed(scope: Scope, error: OrchardError | HTTPException | RequestValidationError) -> OrchardError:
    if isinstance(error, HTTPException):
        return from_http(scope["method"], scope["path"], error)
    return from_validation(error) if isinstance(error, RequestValidationError) else error


def _check_browser(headers: dict[bytes, bytes]) -> None:
    """Without keys, anything on this machine may call, but no web page that its browser shows: neither across
    origins nor by a host name that its author points to this machine. Raises `Forbidden`."""
    host = headers.get(b"host", b"localhost").decode("latin-1")
    name = host.rpartition(":")[0] if ":" in host and not host.endswith("]") else host
    origin = headers.get(b"origin")
    if _is_local(name.strip("[]")) and (
        origin is None or origin.partition(b"://")[2].decode("latin-1") == host
    ):
        return
    raise Forbidden(
        "a service without keys answers only programs on its own machine, by a loopback address: call it as"
        " http://127.0.0.1, or start it with --api-key"
    )


def _is_local(name: str) -> bool:
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
