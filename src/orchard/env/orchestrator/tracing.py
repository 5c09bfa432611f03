"""OpenTelemetry traces, when the service is told where to send them; otherwise nothing of this is imported.

    POST /sandboxes/{sandbox_id}/exec      the request, child of the caller's span (`traceparent`)
    └── command                            from its acceptance to its end
        └── command.run                    as the agent in the sandbox timed it
    POST /sandboxes
    ├── sandbox.queue                      waiting for its turn
    └── sandbox.start                      the runtime makes it, until its agent answers

Spans are sent in the background; where the receiver cannot be reached they are lost, and nothing waits. They carry
ids, owners and outcomes, never commands, paths of files, bodies or keys.
"""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.types import Scope

from orchard.env.errors import SettingsError
from orchard.env.orchestrator.auth import Principal
from orchard.env.orchestrator.logging import request_id

if TYPE_CHECKING:
    from contextvars import Token

    from opentelemetry.context import Context
    from opentelemetry.trace import Span

_CLOSE_S = 5.0


@dataclass(frozen=True, slots=True)
class RequestSpan:
    """The span of a request under way, and what was current before it."""

    span: Span
    token: Token[Context]


class Tracing:
    """Makes spans and sends them to an OTLP receiver over HTTP.

    endpoint: its base URL, to which /v1/traces is added. Raises `SettingsError` when the packages are missing.
    """

    def __init__(self, endpoint: str) -> None:
        try:
            from opentelemetry import context, trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import OTELResourceDetector, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise SettingsError(
                f"traces need {error.name}: pip install 'orchard-agents[otel]', or leave otel_endpoint"
                " (OTEL_EXPORTER_OTLP_ENDPOINT) unset"
            ) from None
        # What OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES say comes first.
        resource = Resource.create({"service.name": "orchard"}).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces")
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("orchard")
        self._propagator = TraceContextTextMapPropagator()
        self._context = context
        self._trace = trace

    # --------------------------------------------------------------------------------------- requests

    def begin_request(self, scope: Scope, headers: dict[bytes, bytes]) -> RequestSpan:
        """The span of a request, current from now on; `end_request` ends it."""
        carrier = {
            name: headers[name.encode()].decode("latin-1")
            for name in ("traceparent", "tracestate")
            if name.encode() in headers
        }
        span = self._tracer.start_span(
            scope["method"],
            self._propagator.extract(carrier),
            kind=self._trace.SpanKind.SERVER,
            attributes={"http.request.method": scope["method"], "orchard.request_id": request_id.get() or ""},
        )
        return RequestSpan(span, self._context.attach(self._trace.set_span_in_context(span)))

    def end_request(
        self, request: RequestSpan, scope: Scope, route: str, principal: Principal | None, status: int
    ) -> None:
        """It was answered with `status`, 0 if its caller had gone."""
        self._context.detach(request.token)
        span = request.span
        span.update_name(f"{scope['method']} {route}")
        span.set_attribute("http.route", route)
        if principal is not None:
            span.set_attribute("orchard.owner", principal.owner)
        sandbox_id = scope.get("path_params", {}).get("sandbox_id")
        if sandbox_id is not None:
            span.set_attribute("orchard.sandbox_id", sandbox_id)
        if status:
            span.set_attribute("http.response.status_code", status)
        if status >= 500 or not status:
            span.set_status(self._trace.StatusCode.ERROR)
        span.end()

    # ------------------------------------------------------------------------- what goes on behind them

    def current(self) -> Context:
        """Where spans of what the current request caused belong."""
        return self._context.get_current()

    def record(self, name: str, parent: Context | None, began_at: float, ended_at: float, error: str | None = None,
               **attributes: str | int | float | bool | None) -> Context:  # fmt: skip
        """A span that is over (Unix seconds), as the parent for further ones. Attributes get the prefix `orchard.`;
        error: makes it a failed one."""
        span = self._tracer.start_span(
            name,
            parent if parent is not None else self._context.Context(),
            start_time=int(began_at * 1e9),
            attributes={f"orchard.{key}": value for key, value in attributes.items() if value is not None},
        )
        if error is not None:
            span.set_status(self._trace.StatusCode.ERROR, error)
        span.end(int(max(began_at, ended_at) * 1e9))
        return self._trace.set_span_in_context(span, parent)

    def record_command(self, parent: Context | None, head: dict[str, Any]) -> None:
        """A command that has finished: `head` are the fields of its job."""
        ended_at = head["completed_at"] or time.time()
        command = self.record(
            "command",
            parent,
            head["created_at"],
            ended_at,
            head["error_code"],
            sandbox_id=head["sandbox_id"],
            job_id=head["job_id"],
            status=head["status"],
            exit_code=head["exit_code"],
            timed_out=head["timed_out"],
        )
        if head["started_at"] is not None:
            self.record("command.run", command, head["started_at"], ended_at, job_id=head["job_id"])

    async def close(self) -> None:
        """Send what is left, for a few seconds at most."""
        # A daemon: a receiver that never answers must not keep the process from ending.
        sending = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        sending.start()
        await asyncio.to_thread(sending.join, _CLOSE_S)
