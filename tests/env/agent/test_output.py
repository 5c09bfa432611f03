"""What is kept of the output of a command: for its record, and for streaming."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchard.env.agent import output
from orchard.env.agent.output import Output, Spool

chunks = st.lists(st.binary(max_size=40), max_size=30)
MIB = 1 << 20


@pytest.fixture
def folder_fd(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_PATH | os.O_DIRECTORY)
    yield fd
    os.close(fd)


@pytest.fixture
def spool(folder_fd: int) -> Spool:
    return Spool(folder_fd)


def read_all(stream: Output, offset: int, limit: int) -> tuple[list[tuple[int, int]], bytes]:
    """Gaps (from, to) and the bytes between them, read as a client would."""
    gaps, data = [], b""
    while offset < stream.total:
        start, piece = stream.read(offset, limit)
        if start > offset:
            gaps.append((offset, start))
        assert piece or start >= stream.total
        data += piece
        offset = start + len(piece)
    return gaps, data


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
@given(
    pieces=chunks, cap=st.integers(0, 120), ring=st.integers(0, 200), in_memory=st.integers(0, 60),
    limit=st.integers(1, 50), offset=st.integers(0, 400),
)  # fmt: skip
def test_the_record_keeps_head_and_tail_and_the_stream_the_newest_bytes(
    spool: Spool, pieces: list[bytes], cap: int, ring: int, in_memory: int, limit: int, offset: int
) -> None:
    whole = b"".join(pieces)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output, "_MEMORY_BYTES", in_memory)
        stream = Output(cap, spool, ring)
        for piece in pieces:
            stream.write(piece)
        assert stream.total == len(whole)
        assert stream.size == len(stream.value())
        assert stream.truncated == (len(whole) > cap)
        head, tail = cap - cap // 2, cap // 2
        expected = whole if len(whole) <= cap else whole[:head] + whole[len(whole) - tail :]
        assert stream.value() == expected
        assert stream.memory_bytes <= in_memory
        gaps, data = read_all(stream, offset, limit)
        kept = max(0, len(whole) - max(ring, cap, 1)) if len(whole) > in_memory else 0
        assert len(gaps) <= 1
        if kept <= max(offset, head):
            assert (gaps, data) == ([], whole[offset:])
        else:
            assert gaps == [(max(offset, head), kept)]
            assert data == whole[offset:head] + whole[kept:]
        stream.release()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=100)
@given(pieces=chunks, cap=st.integers(0, 120), ring=st.integers(0, 200))
def test_a_shrunk_stream_keeps_its_record(spool: Spool, pieces: list[bytes], cap: int, ring: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output, "_MEMORY_BYTES", 0)
        stream = Output(cap, spool, ring)
        for piece in pieces:
            stream.write(piece)
        before = stream.value()
        stream.shrink()
        assert stream.value() == before
        assert not stream.shrink()
        whole = b"".join(pieces)
        gaps, data = read_all(stream, 0, 1000)
        assert data == (whole if not gaps else whole[: gaps[0][0]] + whole[gaps[0][1] :])
        stream.release()


def test_regions_of_the_spool_do_not_mix_and_their_space_is_given_back(spool: Spool, tmp_path: Path) -> None:
    first, second = Output(MIB, spool, 2 * MIB), Output(MIB, spool, 2 * MIB)
    for _ in range(30):
        first.write(b"a" * 30_000)
        second.write(b"b" * 30_000)
    assert first.value() == b"a" * 900_000
    used = (tmp_path / "spool").stat().st_blocks
    first.release()
    assert (tmp_path / "spool").stat().st_blocks < used
    assert second.value() == b"b" * 900_000


def test_regions_are_used_again(spool: Spool, tmp_path: Path) -> None:
    for _ in range(20):
        stream = Output(MIB, spool, 2 * MIB)
        stream.write(b"a" * 3 * MIB)
        stream.release()
    assert (tmp_path / "spool").stat().st_size <= 4 * MIB


def test_a_full_spool_keeps_what_is_there_and_has_room_again_when_that_is_released(folder_fd: int) -> None:
    spool = Spool(folder_fd, cap_bytes=2 * MIB)
    first, second, third = (Output(0, spool, 2 * MIB) for _ in range(3))
    first.write(b"a" * 1_400_000)
    second.write(b"b" * 600_000)
    second.write(b"b" * 600_000)
    assert read_all(first, 0, MIB) == ([], b"a" * 1_400_000)
    assert read_all(second, 0, MIB) == ([(600_000, 1_200_000)], b"b" * 600_000)
    first.release()
    second.release()
    third.write(b"c" * 2_000_000)
    assert read_all(third, 0, MIB) == ([], b"c" * 2_000_000)


def test_a_full_spool_asks_for_room_first(folder_fd: int) -> None:
    spool = Spool(folder_fd, cap_bytes=2 * MIB)
    ended, running = Output(1000, spool, 2 * MIB), Output(1000, spool, 2 * MIB)
    spool.reclaim = ended.shrink
    ended.write(b"a" * 1_900_000)
    running.write(b"b" * 1_500_000)
    assert read_all(running, 0, MIB) == ([], b"b" * 1_500_000)
    assert ended.value() == b"a" * 1000


def test_a_full_disk_keeps_what_is_there(tmp_path: Path) -> None:
    """A folder in which no file can be made stands for a disk that takes nothing."""
    fd = os.open("/proc/self", os.O_PATH | os.O_DIRECTORY)
    stream = Output(MIB, Spool(fd), 2 * MIB)
    stream.write(b"a" * 200_000)
    stream.write(b"b" * 200_000)
    assert stream.value() == b"a" * 200_000
    assert (stream.total, stream.truncated) == (400_000, True)
    assert read_all(stream, 0, MIB) == ([(200_000, 400_000)], b"a" * 200_000)
    os.close(fd)
