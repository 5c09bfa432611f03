"""How much is measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scale:
    """Repetitions: one after the other, creations, commands, idle sandboxes, lifecycles, terminals; and MiB of what
    flows."""

    sequential: int
    creates: int
    execs: int
    idle: int
    lifecycles: int
    ptys: int
    mib: int


FULL = Scale(sequential=300, creates=500, execs=4000, idle=500, lifecycles=1000, ptys=500, mib=1024)
#: To see that everything works; its numbers mean little.
QUICK = Scale(sequential=20, creates=40, execs=200, idle=40, lifecycles=40, ptys=40, mib=64)
