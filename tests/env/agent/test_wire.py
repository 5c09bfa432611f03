"""Frames: any cutting of the byte stream gives the same frames; anything malformed is refused."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchard.env.agent.wire import FrameReader, WireError, frame

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
headers = st.dictionaries(st.text(max_size=10), json_values, max_size=5)


@given(st.lists(st.tuples(headers, st.binary(max_size=200)), max_size=5), st.data())
def test_frames_survive_any_cutting(frames: list[tuple[dict, bytes]], data: st.DataObject) -> None:
    stream = b"".join(frame(header, payload) for header, payload in frames)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=10)))
    reader = FrameReader()
    found = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += reader.feed(stream[start:end])
    assert found == frames


@given(st.binary(max_size=300))
def test_arbitrary_bytes_never_break_the_reader(data: bytes) -> None:
    try:
        for header, payload in FrameReader(max_header=1000, max_payload=1000).feed(data):
            assert isinstance(header, dict)
            assert isinstance(payload, bytes)
    except WireError:
        pass


@pytest.mark.parametrize(
    "data",
    [
        struct.pack(">II", 2, 0) + b"[]",
        struct.pack(">II", 3, 0) + b"{,}",
        struct.pack(">II", 2, 0) + b"\xff\xff",
        struct.pack(">II", 0xFFFFFFFF, 0),
        struct.pack(">II", 2, 0xFFFFFFFF) + b"{}",
        struct.pack(">II", 100_000, 0) + b"[" * 100_000,
    ],
    ids=["not an object", "not json", "not utf-8", "huge header", "huge payload", "deep nesting"],
)
def test_malformed_frames_are_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        FrameReader().feed(data)
