"""What is asked of two cores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

TOOL = "orchard (REST)"


@dataclass(frozen=True, slots=True)
class Target:
    """`metric`'s `field` of our REST figures must be at most, or (`least`) at least, `bound`."""

    metric: str
    field: str
    bound: float
    least: bool = False
    tool: str = TOOL

    def met(self, results: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> bool | None:
        """None if it was not measured."""
        value = results.get(self.tool, {}).get(self.metric, {}).get(self.field)
        if value is None:
            return None
        return bool(value >= self.bound if self.least else value <= self.bound)

    def __str__(self) -> str:
        return f"{'≥' if self.least else '≤'} {self.bound:g}"


TARGETS = (
    Target("create_first_exec", "p50_ms", 8),
    Target("creates_c8", "per_s", 250, least=True),
    Target("exec_c1", "p50_ms", 2.5),
    Target("exec_c1", "p99_ms", 10),
    Target("exec_c64", "per_s", 1200, least=True),
    Target("idle_memory", "mib_each", 3),
    Target("lifecycle", "wall_s", 12),
    Target("lifecycle", "success_rate", 1, least=True),
    Target("raw_stream", "mb_per_s", 300, least=True),
    Target("sdk_stream", "mb_per_s", 50, least=True, tool="orchard (SDK)"),
    Target("file_down", "mb_per_s", 400, least=True),
    Target("file_up", "mb_per_s", 150, least=True),
    Target("agent_over_spawn", "p50_ms", 0.5, tool="agent (no HTTP)"),
    Target("agent_memory", "pss_mib", 6, tool="agent (no HTTP)"),
)
