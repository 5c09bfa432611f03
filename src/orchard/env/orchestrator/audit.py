"""The audit log: one JSON line for each request that changes something and for each key that was refused.

A line is written before the next request is looked at, straight to the file: it survives the death of the service.
What cannot be written (a full disk) is counted and told in the log; the request itself goes on.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import stat
import time
from pathlib import Path
from typing import Any

from starlette.types import Scope

from orchard.env.errors import SettingsError
from orchard.env.orchestrator.auth import Principal
from orchard.env.orchestrator.logging import request_id
from orchard.env.orchestrator.metrics import Metrics

_log = logging.getLogger(__name__)
_READING = frozenset({"GET", "HEAD", "OPTIONS"})
_PATH_CHARACTERS = 2048
#: Where routes put the ids of the sandboxes they made or deleted, when the path does not say.
SANDBOXES = "orchard.sandboxes"


class AuditLog:
    """Lines of one file, appended. Made, it is open: raises `SettingsError` when that is impossible."""

    def __init__(self, file: Path, metrics: Metrics) -> None:
        self._file = file
        self._metrics = metrics
        self._torn = False
        self._failing = False
        self._descriptor = _open(file)

    def request(self, scope: Scope, principal: Principal | None, status: int) -> None:
        """A request that was answered with `status` (0: the caller went away first). Reads leave no line, unless
        their key was refused. A WebSocket, which is a terminal, has a line when it is opened."""
        method = scope.get("method", "WEBSOCKET")
        refused = principal is None and status in (401, 403)
        if not refused and (principal is None or method in _READING):
            return
        client = scope.get("client")
        made = scope.get(SANDBOXES)
        line: dict[str, Any] = {
            "time": round(time.time(), 6),
            "request_id": request_id.get(),
            "owner": principal.owner if principal else None,
            "role": principal.role.value if principal else None,
            "method": method,
            # Never the query: it may hold a key.
            "path": scope["path"][:_PATH_CHARACTERS],
            "sandbox_id": scope.get("path_params", {}).get("sandbox_id"),
            "status": status or None,
            "client": client[0] if client else None,
        }
        if made is not None:
            line["sandbox_id"] = made[0] if len(made) == 1 else None
            if len(made) > 1:
                line["sandbox_ids"] = made
        self._write(json.dumps(line).encode("ascii") + b"\n")

    def _write(self, line: bytes) -> None:
        # What is left of a line that was cut short must not swallow this one.
        data = memoryview(b"\n" + line if self._torn else line)
        try:
            written = os.write(self._descriptor, data)
            if written < len(data):
                self._torn = True
                written += os.write(self._descriptor, data[written:])
            if written < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._metrics.audit_lost.inc()
            if not self._failing:
                _log.error("the audit log %s cannot be written, lines are lost: %s", self._file, error)
            self._failing = True
            return
        self._torn = False
        if self._failing:
            self._failing = False
            _log.warning("the audit log %s is written again", self._file)

    def reopen(self) -> None:
        """Go on in a new file of the same name, when the old one was moved away. Keeps the old one on failure."""
        try:
            descriptor = _open(self._file)
        except SettingsError as error:
            _log.error("%s; the old file is written on", error.detail)
            return
        old, self._descriptor = self._descriptor, descriptor
        self._torn = False
        os.close(old)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _open(file: Path) -> int:
    try:
        # Not blocking: a pipe that nobody reads must not hold the service.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        descriptor = os.open(file, flags, 0o600)
    except OSError as error:
        raise SettingsError(f"cannot write the audit log {file}: {error}") from None
    try:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.fchmod(descriptor, 0o600)
    except OSError as error:
        os.close(descriptor)
        raise SettingsError(f"cannot make the audit log {file} private: {error}") from None
    return descriptor
