"""The trace that the calling program is in, if it uses OpenTelemetry, as headers of a request."""

from __future__ import annotations

import sys


def trace_headers() -> dict[str, str]:
    """`traceparent` and `tracestate` (W3C) of the active span; none without one. Imports nothing: a program that
    has an active span has imported OpenTelemetry."""
    # Another thread may be importing it just now: then the function is not there yet.
    current_span = getattr(sys.modules.get("opentelemetry.trace"), "get_current_span", None)
    if current_span is None:
        return {}
    context = current_span().get_span_context()
    if not context.is_valid:
        return {}
    parent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"
    state = context.trace_state.to_header()
    return {"traceparent": parent, **({"tracestate": state} if state else {})}
