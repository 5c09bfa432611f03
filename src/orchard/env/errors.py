"""Every error of the environment service, and its HTTP mapping, in one table.

    OrchardError
    ├── InvalidRequest            422  the request itself is wrong; nothing was done
    │   ├── MethodNotAllowed      405  the path exists, not for this method
    │   ├── SettingsError              (at start) a setting of the service is impossible
    │   ├── CwdNotFound           400  the working directory of a command does not exist
    │   ├── UserNotFound          400  the user of a command does not exist in the image
    │   ├── PathInvalid           400  a path is empty, escapes, or names something unusable
    │   │   └── ArchiveInvalid    400  a tar archive is damaged, or an entry of it would lead outside
    │   ├── TargetNotAllowed      400  a tunnel's target is none that the operator allows
    │   ├── PortNotAllowed        400  the agent may not listen on this port inside the sandbox
    │   ├── PatchToolMissing      400  neither git nor patch exists in the image
    │   ├── ImageInvalid          422  an image is damaged, hostile or for another machine
    │   └── BuildFailed           422  a step of an image's recipe did not succeed
    ├── Unauthorized              401  no key, or an unknown one
    │   └── Forbidden             403  the key may not do this
    ├── NotFound                  404
    │   ├── SandboxNotFound       404  never seen (or not yours)
    │   ├── SandboxDeleted        404  it was deleted on request
    │   ├── SandboxFailed         404  it ended by itself: the reason says how
    │   ├── JobNotFound           404
    │   ├── ImageNotFound         404
    │   └── FileMissing           404
    ├── SandboxTimeout            408  a wait for a sandbox or job ended first
    ├── Conflict                  409  the id is taken by something else
    │   ├── SandboxNotReady       409
    │   ├── PortInUse             409  something listens on this port inside the sandbox
    │   ├── LifetimeExceeded      409  a command longer than what is left of the sandbox
    │   └── JobNotRunning         409
    ├── TooLarge                  413
    ├── QuotaExceeded             429
    ├── PullDenied                403  the registry wants (other) credentials for the image
    ├── DiskFull                  507  the sandbox's disk limit, or the machine's disk
    ├── Overloaded                503  try again after `retry_after_s`
    ├── InfrastructureError       503  the service failed, not the command
    │   ├── AgentUnreachable      503
    │   ├── AgentFaulty           503  the agent of a sandbox answers what no agent should
    │   ├── ConnectionFailed      503  (client side) no answer from the service
    │   ├── RegistryUnreachable   503  a registry does not answer, or broke off
    │   ├── RegistryRateLimited   503  a registry asks to come back after `retry_after_s`
    │   └── RuntimeRefused        503  the runtime cannot do this on this machine
    ├── InternalError             500  a fault of ours
    ├── CommandFailed                  (client side) `check=True` and a non-zero exit
    └── CommandTimeout                 (client side) `check=True` and a time-out

`retryable` says that the same request may succeed later. `infra` says that the failure is one of
infrastructure: a caller that computes rewards must treat the attempt as invalid, never as a reward of 0.
"""

from __future__ import annotations

from typing import Any, ClassVar


class OrchardError(Exception):
    """Base of all errors. `detail` says what was wrong and what to do about it.

    Attributes:
        code: stable machine-readable name, the `code` of the JSON body.
        http_status: the status of the HTTP answer that carries it.
        retryable: the same request may succeed later.
        infra: a failure of infrastructure, not of the caller's command.
        retry_after_s: seconds after which to retry, where known.
        reason: why a sandbox ended (`ttl`, `heartbeat`, `oom`, …), where it did.
        extra: further fields of the JSON body (such as the `death` record).
    """

    code: ClassVar[str] = "error"
    http_status: ClassVar[int] = 500
    retryable: bool = False
    infra: bool = False

    def __init__(
        self,
        detail: str,
        *,
        reason: str | None = None,
        retry_after_s: float | None = None,
        request_id: str | None = None,
        **extra: Any,
    ) -> None:
        super().__init__(detail)
        self.detail = detail
        self.reason = reason
        self.retry_after_s = retry_after_s
        self.request_id = request_id
        self.extra = extra

    def body(self, request_id: str | None = None) -> dict[str, Any]:
        """The JSON body: `{detail, code, retryable, infra, request_id, …}`."""
        body: dict[str, Any] = {
            "detail": self.detail,
            "code": self.code,
            "retryable": self.retryable,
            "infra": self.infra,
            "request_id": request_id or self.request_id,
        }
        if self.reason is not None:
            body["reason"] = self.reason
        if self.retry_after_s is not None:
            body["retry_after_s"] = self.retry_after_s
        body.update(self.extra)
        return body


class InvalidRequest(OrchardError, ValueError):
    code = "invalid_request"
    http_status = 422


class MethodNotAllowed(InvalidRequest):
    code = "method_not_allowed"
    http_status = 405


class SettingsError(InvalidRequest):
    """A setting of the service is impossible; told at start, before anything runs."""

    code = "invalid_settings"


class CwdNotFound(InvalidRequest):
    code = "cwd_not_found"
    http_status = 400


class UserNotFound(InvalidRequest):
    code = "user_not_found"
    http_status = 400


class PathInvalid(InvalidRequest):
    code = "path_invalid"
    http_status = 400


class ArchiveInvalid(PathInvalid):
    """A tar archive is damaged, or one of its entries would lead outside or cannot be kept; it is named."""

    code = "archive_invalid"


class TargetNotAllowed(InvalidRequest):
    """A tunnel names a target that the operator does not allow; the detail lists those that are."""

    code = "target_not_allowed"
    http_status = 400


class PortNotAllowed(InvalidRequest):
    code = "port_not_allowed"
    http_status = 400


class PatchToolMissing(InvalidRequest):
    code = "patch_tool_missing"
    http_status = 400


class ImageInvalid(InvalidRequest):
    code = "image_invalid"


class BuildFailed(InvalidRequest):
    """A step of a recipe failed. `extra` holds `step`, `exit_code` and `output` (its end)."""

    code = "build_failed"


class Unauthorized(OrchardError, PermissionError):
    code = "unauthorized"
    http_status = 401


class Forbidden(Unauthorized):
    code = "forbidden"
    http_status = 403


class NotFound(OrchardError, LookupError):
    code = "not_found"
    http_status = 404


class SandboxNotFound(NotFound):
    code = "sandbox_not_found"


class SandboxDeleted(SandboxNotFound):
    code = "sandbox_deleted"


class SandboxFailed(SandboxNotFound):
    """The sandbox ended by itself, or never started; `reason` names why, `death` holds the record."""

    code = "sandbox_dead"
    infra = True


class JobNotFound(NotFound):
    code = "job_not_found"


class ImageNotFound(NotFound):
    code = "image_not_found"


class FileMissing(NotFound, FileNotFoundError):
    code = "file_not_found"


class SandboxTimeout(OrchardError, TimeoutError):
    """A wait ended before the sandbox was ready or the job finished; neither was changed."""

    code = "wait_timeout"
    http_status = 408
    retryable = True


class Conflict(OrchardError):
    code = "conflict"
    http_status = 409


class SandboxNotReady(Conflict):
    code = "sandbox_not_ready"
    retryable = True


class PortInUse(Conflict):
    """Something listens on the port inside the sandbox already, another tunnel maybe."""

    code = "port_in_use"


class LifetimeExceeded(Conflict):
    code = "lifetime_exceeded"


class JobNotRunning(Conflict):
    code = "job_not_running"


class TooLarge(OrchardError):
    code = "too_large"
    http_status = 413


class QuotaExceeded(OrchardError):
    code = "quota_exceeded"
    http_status = 429
    retryable = True


class PullDenied(OrchardError):
    """A registry refused an image to the credentials at hand. Not `Unauthorized`: the caller's own key is fine."""

    code = "pull_denied"
    http_status = 403


class DiskFull(OrchardError):
    code = "disk_full"
    http_status = 507


class Overloaded(OrchardError):
    code = "overloaded"
    http_status = 503
    retryable = True
    infra = True


class InfrastructureError(OrchardError):
    code = "infrastructure_error"
    http_status = 503
    retryable = True
    infra = True


class AgentUnreachable(InfrastructureError):
    code = "agent_unreachable"


class AgentFaulty(InfrastructureError):
    """The agent of a sandbox answers what no agent should: the sandbox is not to be trusted any more."""

    code = "agent_faulty"
    retryable = False


class ConnectionFailed(InfrastructureError, ConnectionError):
    code = "connection_failed"


class RegistryUnreachable(InfrastructureError):
    code = "registry_unreachable"


class RegistryRateLimited(InfrastructureError):
    code = "registry_rate_limited"


class RuntimeRefused(InfrastructureError):
    """The runtime cannot do what was asked on this machine; retrying will not help."""

    code = "runtime_refused"
    retryable = False


class InternalError(OrchardError):
    code = "internal_error"
    http_status = 500
    infra = True


class CommandFailed(OrchardError):
    """Raised by the client for `check=True` when a command did not exit with 0; `job` is the result."""

    code = "command_failed"

    def __init__(self, detail: str, *, job: Any = None, **extra: Any) -> None:
        super().__init__(detail, **extra)
        self.job = job


class CommandTimeout(CommandFailed, TimeoutError):
    """Raised by the client for `check=True` when a command ran into its timeout; `job` is the result."""

    code = "command_timeout"


def _subclasses(cls: type[OrchardError]) -> list[type[OrchardError]]:
    found = [cls]
    for sub in cls.__subclasses__():
        found.extend(_subclasses(sub))
    return found


#: code → class: the one table, used by the service to answer and by the client to raise.
BY_CODE: dict[str, type[OrchardError]] = {cls.code: cls for cls in _subclasses(OrchardError)}

_BY_STATUS: dict[int, type[OrchardError]] = {
    400: InvalidRequest, 401: Unauthorized, 403: Forbidden, 404: NotFound, 405: MethodNotAllowed, 408: SandboxTimeout,
    409: Conflict, 413: TooLarge, 422: InvalidRequest, 429: QuotaExceeded, 503: Overloaded, 507: DiskFull,
}  # fmt: skip

_KNOWN = {"detail", "code", "retryable", "infra", "request_id", "reason", "retry_after_s"}


def from_body(status: int, body: dict[str, Any]) -> OrchardError:
    """The error that a JSON body and HTTP status stand for; unknown codes map by status."""
    cls = BY_CODE.get(
        str(body.get("code")),
        _BY_STATUS.get(status, InfrastructureError if status >= 500 else InvalidRequest),
    )
    # Nothing is believed to be of its type: what answers may be no service of ours.
    pause_s: Any = body.get("retry_after_s")
    error = cls(
        str(body.get("detail", f"HTTP {status}")),
        reason=None if body.get("reason") is None else str(body["reason"]),
        retry_after_s=float(pause_s) if type(pause_s) in (int, float) and 0 <= pause_s < 1e9 else None,
        request_id=None if body.get("request_id") is None else str(body["request_id"]),
    )
    error.extra = {k: v for k, v in body.items() if k not in _KNOWN}
    # The server knows best: an instance may differ from its class (a refused quota that will never fit).
    if isinstance(body.get("retryable"), bool):
        error.retryable = body["retryable"]
    if isinstance(body.get("infra"), bool):
        error.infra = body["infra"]
    return error
