"""Structured logs: one JSON object a line on stderr, with the ids of what it is about and no secrets."""

from __future__ import annotations

import json
import logging
import sys
from contextvars import ContextVar
from typing import TextIO

#: The request under way in this task; set by the middleware.
request_id: ContextVar[str | None] = ContextVar("orchard_request_id", default=None)

_FIELDS = (
    "sandbox_id",
    "job_id",
    "request_id",
    "owner",
    "runtime",
    "reason",
    "status",
    "method",
    "path",
    "seconds",
)


class JsonFormatter(logging.Formatter):
    """A record as one line of JSON: time (Unix seconds), level, logger, message, and known fields of `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": round(record.created, 6),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name in _FIELDS:
            value = record.__dict__.get(name)
            if value is not None:
                line[name] = value
        if "request_id" not in line and (current := request_id.get()) is not None:
            line["request_id"] = current
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=True, default=str)


def configure(level: str, stream: TextIO | None = None) -> None:
    """Send everything under `orchard` and `uvicorn` to `stream` (stderr) as JSON. For `main` functions only."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter())
    # OpenTelemetry warns of every single span that it drops.
    others = (("uvicorn", "WARNING"), ("asyncio", "WARNING"), ("opentelemetry", "ERROR"))
    for name, lowest in (("orchard", level.upper()), *others):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.propagate = False
        logger.setLevel(lowest)
    # It logs request paths with their query, and a query may hold a key.
    logging.getLogger("uvicorn.access").disabled = True
