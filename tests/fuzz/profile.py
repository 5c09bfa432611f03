"""How much is generated: little and always the same in CI, more and new when FUZZ_EXAMPLES says how much."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

_LONG = int(os.environ.get("FUZZ_EXAMPLES", "0"))
_CHECKS = [
    HealthCheck.function_scoped_fixture,
    HealthCheck.too_slow,
    HealthCheck.data_too_large,
    HealthCheck.filter_too_much,
    HealthCheck.large_base_example,
]

#: Any value that JSON can hold, and what Python's can.
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def examples(count: int, *, shrink: bool = True) -> settings:
    """`count` examples in CI, the same in every run; FUZZ_EXAMPLES of them, other ones each time, where that is set.

    shrink: look for the smallest example that fails; not where each takes long or changes what the next one meets.
    """
    phases = [Phase.explicit, Phase.generate, *([Phase.shrink] if shrink else [])]
    return settings(
        max_examples=_LONG or count,
        derandomize=not _LONG,
        database=None,
        deadline=None,
        phases=phases,
        suppress_health_check=_CHECKS,
    )
