"""The system call filter, decided by a small interpreter of classic BPF, for every architecture we claim."""

import errno
import struct

import pytest

from orchard.env.runtimes.local import seccomp

_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_ALLOW = 0x7FFF0000


def decide(program: bytes, arch: int, nr: int, args: tuple[int, ...] = ()) -> int:
    """0 if allowed, else the errno."""
    data = struct.pack("<iIQ6Q", nr, arch, 0, *(args + (0,) * (6 - len(args))))
    code = [struct.unpack_from("<HBBI", program, at) for at in range(0, len(program), 8)]
    at, acc = 0, 0
    while True:
        op, yes, no, k = code[at]
        at += 1
        if op == 0x20:
            (acc,) = struct.unpack_from("<I", data, k)
        elif op == 0x05:
            at += k
        elif op == 0x15:
            at += yes if acc == k else no
        elif op == 0x35:
            at += yes if acc >= k else no
        elif op == 0x45:
            at += yes if acc & k else no
        elif op == 0x54:
            acc &= k
        elif op == 0x06:
            return 0 if k == _ALLOW else k & 0xFFFF
        else:
            raise AssertionError(f"unknown instruction {op:#x}")


@pytest.fixture(params=["x86_64", "aarch64"])
def machine(request: pytest.FixtureRequest) -> str:
    return request.param


def number(table: dict[str, tuple[int | None, int | None]], name: str, machine: str) -> int | None:
    return table[name][0 if machine == "x86_64" else 1]


def verdict(machine: str, nr: int, *args: int) -> int:
    return decide(seccomp.build(machine), _ARCH[machine], nr, args)


def test_every_refused_call_is_refused(machine: str) -> None:
    for table, expected in ((seccomp._DENIED, errno.EPERM), (seccomp._UNKNOWN, errno.ENOSYS)):
        for name in table:
            nr = number(table, name, machine)
            if nr is not None:
                assert verdict(machine, nr) == expected, name


def test_every_other_known_call_is_allowed_without_arguments_that_matter(machine: str) -> None:
    listed = {number(table, name, machine) for table in (seccomp._DENIED, seccomp._UNKNOWN) for name in table}
    special = {number(seccomp._CALLS, name, machine) for name in seccomp._CALLS}
    for nr in range(seccomp._LAST_KNOWN + 1):
        if nr not in listed and nr not in special:
            assert verdict(machine, nr) == 0, nr


def test_calls_newer_than_the_table_and_other_abis_do_not_exist(machine: str) -> None:
    assert verdict(machine, seccomp._LAST_KNOWN + 1) == errno.ENOSYS
    assert verdict(machine, 0x40000000 | 1) == errno.ENOSYS
    assert decide(seccomp.build(machine), 0x40000003, 1) == errno.ENOSYS


@pytest.mark.parametrize(
    ("name", "args", "expected"),
    [
        ("clone", (0x10000011,), errno.EPERM),
        ("clone", (0x00020011,), errno.EPERM),
        ("clone", (0x003D0F00,), 0),
        ("unshare", (0x80,), errno.EPERM),
        ("unshare", (0x40000000,), errno.EPERM),
        ("unshare", (0x400,), 0),
        ("socket", (1, 1, 0), 0),
        ("socket", (2, 1, 0), 0),
        ("socket", (10, 0x80802, 0), 0),
        ("socket", (2, 3, 1), errno.EPERM),
        ("socket", (10, 0x80003, 58), errno.EPERM),
        ("socket", (17, 3, 0), errno.EAFNOSUPPORT),
        ("socket", (40, 1, 0), errno.EAFNOSUPPORT),
        ("socket", (38, 5, 0), errno.EAFNOSUPPORT),
        ("socket", (16, 3, 0), 0),
        ("socket", (16, 3, 12), errno.EPROTONOSUPPORT),
        ("ioctl", (0, 0x5412), errno.EPERM),
        ("ioctl", (0, 0x5401), 0),
        ("personality", (0xFFFFFFFF,), 0),
        ("personality", (0x0400000,), errno.EPERM),
        ("prlimit64", (1, 7), errno.EPERM),
        ("prlimit64", (0, 7), 0),
        ("sched_setaffinity", (1,), errno.EPERM),
        ("sched_setaffinity", (42,), 0),
        ("setpriority", (0, 1, 19), errno.EPERM),
        ("setpriority", (1, 1, 19), errno.EPERM),
        ("setpriority", (2, 0, 19), errno.EPERM),
        ("setpriority", (0, 0, 19), 0),
        ("ioprio_set", (1, 1), errno.EPERM),
        ("ioprio_set", (3, 0), errno.EPERM),
        ("ioprio_set", (1, 0), 0),
    ],
)  # fmt: skip
def test_calls_decided_by_their_arguments(
    machine: str, name: str, args: tuple[int, ...], expected: int
) -> None:
    nr = number(seccomp._CALLS, name, machine)
    assert nr is not None
    assert verdict(machine, nr, *args) == expected


def test_an_unknown_machine_is_refused() -> None:
    with pytest.raises(KeyError, match="riscv64"):
        seccomp.build("riscv64")


def test_without_words_the_limit_of_file_locks_is_like_any_other(machine: str) -> None:
    nr = seccomp._CALLS["prlimit64"][machine != "x86_64"]
    assert verdict(machine, nr, 0, 10, 0x7000) == 0


def test_a_mark_is_set_only_by_who_knows_the_words(machine: str) -> None:
    first, second = 0x0123456789ABCDEF, 0xFEDCBA9876543210
    program = seccomp.build(machine, (first, second))
    column = machine != "x86_64"
    prlimit, setrlimit = seccomp._CALLS["prlimit64"][column], seccomp._SETRLIMIT[column]

    def ask(nr: int, *args: int) -> int:
        return decide(program, _ARCH[machine], nr, args)

    assert ask(prlimit, 0, 10, 0x7000, 0, first, second) == 0
    for bit in (0, 31, 32, 63):
        assert ask(prlimit, 0, 10, 0x7000, 0, first ^ 1 << bit, second) == errno.EPERM
        assert ask(prlimit, 0, 10, 0x7000, 0, first, second ^ 1 << bit) == errno.EPERM
    for address in (0x7000, 0x7000_0000_0000):
        assert ask(prlimit, 5, 10, address) == errno.EPERM
    assert ask(setrlimit, 10, 0x7000) == errno.EPERM
    # To look at it, and to set any other, is everybody's; the agent's are nobody's.
    assert ask(prlimit, 0, 10, 0, 0x7000) == 0
    assert ask(prlimit, 0, 7, 0x7000) == 0
    assert ask(setrlimit, 7, 0x7000) == 0
    assert ask(prlimit, 1, 7, 0x7000) == errno.EPERM
