"""The bounded output window."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchard.env.agent import output
from orchard.env.agent.output import OutputWindow, Spool

chunks = st.lists(st.binary(max_size=40), max_size=30)


@given(chunks, st.integers(0, 100))
def test_keeps_everything_that_fits_and_else_head_and_tail(pieces: list[bytes], cap: int) -> None:
    window = OutputWindow(cap)
    for piece in pieces:
        window.write(piece)
    whole = b"".join(pieces)
    assert window.total == len(whole)
    assert window.truncated == (len(whole) > cap)
    assert window.size == len(window.value())
    if len(whole) <= cap:
        assert window.value() == whole
    else:
        head, tail = cap - cap // 2, cap // 2
        assert window.value() == whole[:head] + whole[len(whole) - tail :]


def test_memory_stays_within_twice_the_cap() -> None:
    window = OutputWindow(1000)
    for _ in range(10_000):
        window.write(b"x" * 999)
    assert len(window._head) + len(window._tail) <= 2000
    assert window.total == 9_990_000


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    folder_fd = os.open(tmp_path, os.O_PATH | os.O_DIRECTORY)
    yield Spool(folder_fd)
    os.close(folder_fd)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
@given(pieces=chunks, cap=st.integers(0, 120), in_memory=st.integers(0, 30))
def test_a_spooled_window_keeps_the_same(spool: Spool, pieces: list[bytes], cap: int, in_memory: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output, "_MEMORY_BYTES", in_memory)
        spooled = OutputWindow(cap, spool)
        plain = OutputWindow(cap)
        for piece in pieces:
            spooled.write(piece)
            plain.write(piece)
        assert spooled.value() == plain.value()
        assert (spooled.total, spooled.size, spooled.truncated) == (plain.total, plain.size, plain.truncated)
        assert spooled.memory_bytes <= in_memory or cap <= in_memory
        spooled.release()


def test_a_full_spool_keeps_what_is_there_and_has_room_again_when_that_is_released(tmp_path: Path) -> None:
    folder_fd = os.open(tmp_path, os.O_PATH | os.O_DIRECTORY)
    spool = Spool(folder_fd, cap_bytes=1 << 20)
    first, second, third = (OutputWindow(1 << 20, spool) for _ in range(3))
    first.write(b"a" * 700_000)
    second.write(b"b" * 300_000)
    second.write(b"b" * 300_000)
    assert (first.value(), first.truncated) == (b"a" * 700_000, False)
    assert (second.value(), second.total, second.truncated) == (b"b" * 300_000, 600_000, True)
    first.release()
    second.release()
    third.write(b"c" * 1_000_000)
    assert (third.value(), third.truncated) == (b"c" * 1_000_000, False)
    os.close(folder_fd)


def test_regions_of_the_spool_do_not_mix_and_their_space_is_given_back(spool: Spool, tmp_path: Path) -> None:
    first, second = OutputWindow(1 << 20, spool), OutputWindow(1 << 20, spool)
    for _ in range(30):
        first.write(b"a" * 30_000)
        second.write(b"b" * 30_000)
    assert first.value() == b"a" * 900_000
    used = (tmp_path / "spool").stat().st_blocks
    first.release()
    assert (tmp_path / "spool").stat().st_blocks <= used // 2 + 64
    assert second.value() == b"b" * 900_000


def test_a_full_disk_loses_the_rest_and_says_so(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    window = OutputWindow(1 << 20, spool)
    window.write(b"x" * 300_000)

    def full(_offset: int, _data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(spool, "write", full)
    window.write(b"y" * 10)
    window.write(b"z" * 10)
    assert window.total == 300_020
    assert window.truncated
    assert window.value() == b"x" * 300_000
