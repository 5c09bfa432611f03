"""What a result says, and what `check` raises."""

from __future__ import annotations

import pytest

from orchard.env import errors
from orchard.env.client import JobResult


def result(**fields: object) -> JobResult:
    base = {
        "job_id": "j",
        "sandbox_id": "s",
        "command": ["make", "all"],
        "status": "failed",
        "created_at": 1.0,
    }
    return JobResult.model_validate({**base, **fields})


def test_success() -> None:
    job = result(status="succeeded", exit_code=0)
    assert job.ok
    assert job.check() is job


def test_a_failure_is_told_with_command_code_and_stderr() -> None:
    job = result(exit_code=2, stderr="no rule to make 'all'\n")
    with pytest.raises(
        errors.CommandFailed, match=r"'make all' exited with 2; stderr ends: .*no rule"
    ) as caught:
        job.check()
    assert caught.value.job is job
    assert not caught.value.infra


def test_a_signal_and_memory_are_named() -> None:
    with pytest.raises(errors.CommandFailed, match=r"signal KILL \(out of memory\)"):
        result(exit_code=137, signal="KILL", oom_killed=True).check()


def test_a_timeout_is_its_own_error_and_a_timeout_error() -> None:
    with pytest.raises(errors.CommandTimeout) as caught:
        result(exit_code=124, timed_out=True).check()
    assert isinstance(caught.value, TimeoutError)


def test_exit_code_124_alone_is_no_timeout() -> None:
    with pytest.raises(errors.CommandFailed) as caught:
        result(exit_code=124).check()
    assert not isinstance(caught.value, errors.CommandTimeout)


def test_infrastructure_is_raised_as_what_it_is() -> None:
    job = result(infra=True, error="the sandbox ended: oom", error_code="sandbox_dead")
    with pytest.raises(errors.SandboxFailed) as caught:
        job.raise_for_infrastructure()
    assert caught.value.infra
    assert caught.value.extra["job"] is job
    with pytest.raises(errors.InfrastructureError):
        result(infra=True, error="lost").check()


def test_a_running_job_is_no_failure_of_infrastructure() -> None:
    result(status="running").raise_for_infrastructure()
    with pytest.raises(errors.CommandFailed, match="has not ended"):
        result(status="running").check()
