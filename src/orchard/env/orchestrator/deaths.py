"""Death records: what is known of the end of a sandbox."""

from __future__ import annotations

from orchard.env.contract import Death, EndReason
from orchard.env.runtimes.base import Postmortem


def death_record(reason: EndReason, message: str, ended_at: float, postmortem: Postmortem | None) -> Death:
    """The record at the moment of death; more may be found out later."""
    death = Death(reason=reason, message=message, ended_at=ended_at)
    if postmortem is not None:
        complete(death, postmortem)
    return death


def complete(death: Death, postmortem: Postmortem) -> None:
    """Add what a look at the remains told; what is known already stays."""
    if death.exit_code is None:
        death.exit_code = postmortem.exit_code
    if death.peak_memory_bytes is None:
        death.peak_memory_bytes = postmortem.peak_memory_bytes
    if not death.agent_log:
        death.agent_log = list(postmortem.agent_log)
