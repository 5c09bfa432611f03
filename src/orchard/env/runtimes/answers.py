"""What agents answer, checked before it is believed.

An agent lives where the code of its sandbox runs. Should that code ever get hold of it, it can spoil its own sandbox
and nothing else: what it answers is of the types that the protocol has (`orchard.env.agent.wire`), its errors are
those that an agent can have, or the call fails with `AgentFaulty`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from orchard.env.agent.wire import whole_job
from orchard.env.errors import BY_CODE, AgentFaulty, InfrastructureError, OrchardError

Fields = dict[str, Any]
#: Of the values in a field.
_Kinds = tuple[type, ...]
_TEXT, _FLAG, _COUNT, _TIME = (str,), (bool,), (int,), (int, float)
_NONE = type(None)
#: A number is finite and below this: any count or time that is kept, or the time of a file in nanoseconds.
_KEPT_LIMIT, _LIMIT = 1 << 53, 1 << 80
_TEXT_LIMIT = 64 << 10
_NUMBERS = frozenset((int, float))
#: What an error of an agent may be; any other (an agent cannot refuse a key) is a fault of the sandbox.
_CODES = frozenset({
    "conflict", "cwd_not_found", "disk_full", "file_not_found", "infrastructure_error", "invalid_request",
    "job_not_found", "job_not_running", "not_found", "overloaded", "path_invalid", "port_in_use", "port_not_allowed",
    "too_large", "user_not_found", "wait_timeout",
})  # fmt: skip

_JOB: Mapping[str, _Kinds] = {
    "job_id": _TEXT, "status": _TEXT, "exit_code": (int, _NONE), "signal": (str, _NONE), "created_at": _TIME,
    "started_at": (*_TIME, _NONE), "completed_at": (*_TIME, _NONE), "duration_s": (*_TIME, _NONE),
    "queue_s": (*_TIME, _NONE), "timed_out": _FLAG, "oom_killed": _FLAG, "session_reset": _FLAG,
    "error": (str, _NONE), "error_code": (str, _NONE), "stdout_bytes": _COUNT, "stderr_bytes": _COUNT,
    "stdout_size": _COUNT, "stderr_size": _COUNT, "stdout_truncated": _FLAG, "stderr_truncated": _FLAG,
    "pid": (int, _NONE), "background": _FLAG, "command": (str, list),
}  # fmt: skip
_STATUSES = frozenset({"queued", "running", "succeeded", "failed"})
_LISTED_JOB = ("job_id", "command", "status", "created_at")
_OUTPUT: Mapping[str, _Kinds] = {
    "finished": _FLAG, "stdout_offset": _COUNT, "stdout_size": _COUNT, "stdout_total": _COUNT,
    "stderr_offset": _COUNT, "stderr_size": _COUNT, "stderr_total": _COUNT,
}  # fmt: skip
_STAT: Mapping[str, _Kinds] = {
    "type": _TEXT, "size": _COUNT, "modified": _TIME, "modified_ns": _COUNT, "mode": _COUNT, "target": (str, _NONE),
}  # fmt: skip
_TYPES = frozenset({"file", "directory", "symlink", "other"})
_SESSION: Mapping[str, _Kinds] = {"name": _TEXT, "created_at": _TIME, "used_at": _TIME, "busy": _FLAG}
_CHANGE: Mapping[str, _Kinds] = {
    "type": _TEXT, "path": _TEXT, "directory": _FLAG, "source": (str, _NONE), "message": (str, _NONE),
}  # fmt: skip
_CHANGES = frozenset({"gap", "created", "modified", "written", "attributes", "removed", "moved"})


class _Wrong(Exception):
    """Names what is wrong."""


def checked(op: str, header: Fields, payload: bytes, asked: Fields) -> Fields:
    """The header of the answer to `op` with the fields `asked`, with what it leaves out put in.

    Raises the error that it tells of, or `AgentFaulty`.
    """
    error = header.get("error")
    if error is not None:
        raise _typed(error)
    check = _CHECKS.get(op)
    if check is not None:
        try:
            check(header, payload, asked)
        except _Wrong as wrong:
            raise AgentFaulty(
                f"the agent's answer to {op!r} breaks the protocol ({wrong}); use another sandbox"
            ) from None
    return header


def _typed(error: Any) -> OrchardError:
    if not isinstance(error, dict) or not isinstance(error.get("detail"), str):
        return AgentFaulty("the agent refused without saying why; use another sandbox")
    code, detail = error.get("code"), error["detail"][:_TEXT_LIMIT]
    if not isinstance(code, str) or code not in _CODES:
        return InfrastructureError(f"the agent failed: {detail}")
    return BY_CODE[code](detail)


def _fields(
    found: Any, kinds: Mapping[str, _Kinds], required: tuple[str, ...] = (), limit: int = _LIMIT
) -> None:
    """`found` has fields of these kinds, and the required ones."""
    if type(found) is not dict:
        raise _Wrong("an object is missing")
    for name in required:
        if name not in found:
            raise _Wrong(f"{name} is missing")
    for name, value in found.items():
        wanted = kinds.get(name)
        if wanted is None:
            continue
        kind = type(value)
        # The comparison is false for NaN too.
        if kind not in wanted or (kind in _NUMBERS and not -limit < value < limit):
            raise _Wrong(f"{name} is wrong")


def _several(found: Any, kinds: Mapping[str, _Kinds], required: tuple[str, ...]) -> None:
    if type(found) is not list:
        raise _Wrong("a list is missing")
    for each in found:
        _fields(each, kinds, required)


def _job_fields(job: Any, required: tuple[str, ...]) -> Fields:
    _fields(job, _JOB, required, _KEPT_LIMIT)
    if job["status"] not in _STATUSES:
        raise _Wrong("status is unknown")
    return whole_job(job)


def _job(header: Fields, payload: bytes, asked: Fields) -> None:
    job = header["job"] = _job_fields(header.get("job"), ("status", "created_at"))
    if asked.get("wait") and job["status"] not in ("succeeded", "failed"):
        raise _Wrong("the command has not finished")
    if (
        job["stdout_size"] < 0
        or job["stderr_size"] < 0
        or job["stdout_size"] + job["stderr_size"] > len(payload)
    ):
        raise _Wrong("its output is missing")


def _cancelled(header: Fields, payload: bytes, asked: Fields) -> None:
    _job(header, payload, {"wait": True})


def _jobs(header: Fields, _payload: bytes, _asked: Fields) -> None:
    jobs = header.get("jobs")
    if type(jobs) is not list:
        raise _Wrong("jobs is missing")
    header["jobs"] = [_job_fields(job, _LISTED_JOB) for job in jobs]
    for job in jobs:
        if isinstance(job["command"], list) and not all(isinstance(word, str) for word in job["command"]):
            raise _Wrong("command is wrong")


def _output(header: Fields, payload: bytes, asked: Fields) -> None:
    """Bytes are never before what was asked for, and as many as announced."""
    _fields(header, _OUTPUT, ("finished",))
    announced = 0
    for name in ("stdout", "stderr"):
        since = asked.get(f"{name}_offset")
        if since is None:
            continue
        _fields(header, _OUTPUT, (f"{name}_offset", f"{name}_size", f"{name}_total"))
        if header[f"{name}_size"] < 0:
            raise _Wrong("a size is negative")
        if header[f"{name}_size"] and header[f"{name}_offset"] < since:
            raise _Wrong("bytes come twice")
        announced += header[f"{name}_size"]
    if announced != len(payload):
        raise _Wrong("bytes are missing")


def _read(header: Fields, _payload: bytes, _asked: Fields) -> None:
    _fields(header, {"size": _COUNT, "mode": _COUNT, "eof": _FLAG}, ("size", "eof", "identity"))
    if header["size"] < 0:
        raise _Wrong("size is negative")


def _entry(found: Fields) -> None:
    if found["type"] not in _TYPES:
        raise _Wrong("type is unknown")


def _stat(header: Fields, _payload: bytes, _asked: Fields) -> None:
    _fields(header, _STAT, ("type", "size", "modified", "modified_ns"))
    _entry(header)
    for name in [name for name in header if name not in _STAT]:
        del header[name]


def _list(header: Fields, _payload: bytes, _asked: Fields) -> None:
    """A name is one step of a path: whoever goes on with it stays below the directory."""
    _fields(header, {"path": _TEXT, "more": (str, _NONE)}, ("path",))
    _several(header.get("files"), {**_STAT, "name": _TEXT}, ("name", "type", "size", "modified"))
    for each in header["files"]:
        _entry(each)
        name = each["name"]
        if name in ("", ".", "..") or "/" in name or "\0" in name:
            raise _Wrong("a name is wrong")


def _sessions(header: Fields, _payload: bytes, _asked: Fields) -> None:
    _several(header.get("sessions"), _SESSION, tuple(_SESSION))


def _watch_changes(header: Fields, _payload: bytes, _asked: Fields) -> None:
    _fields(header, {"ended": _FLAG}, ("ended",))
    _several(header.get("changes"), _CHANGE, ("type", "path"))
    if any(each["type"] not in _CHANGES for each in header["changes"]):
        raise _Wrong("a type is unknown")


def _log(header: Fields, _payload: bytes, _asked: Fields) -> None:
    lines = header.get("lines")
    if type(lines) is not list or not all(type(line) is str for line in lines):
        raise _Wrong("lines are missing")


def _plain(**kinds: _Kinds) -> Callable[[Fields, bytes, Fields], None]:
    """An answer that has all of these fields."""
    return lambda header, _payload, _asked: _fields(header, kinds, tuple(kinds))


_CHECKS: dict[str, Callable[[Fields, bytes, Fields], None]] = {
    "exec": _job, "job": _job, "cancel": _cancelled, "jobs": _jobs, "output": _output, "read": _read, "stat": _stat,
    "list": _list, "sessions": _sessions, "watch": _plain(watch=_COUNT), "watch_changes": _watch_changes,
    "remove": _plain(more=_FLAG), "log": _log, "processes": _plain(processes=_COUNT),
    "statvfs": _plain(total_bytes=_COUNT, free_bytes=_COUNT),
}  # fmt: skip
