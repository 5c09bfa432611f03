"""Events out of bytes, however they are cut."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from orchard.env.client.sse import EventParser

TEXT = b': hello\n\nid: 1\nevent: a\ndata: {"n": 1}\n\n: keepalive\n\nid: 2\ndata: first\ndata: second\n\ndata: cut off'


@given(st.lists(st.integers(0, len(TEXT)), max_size=10))
def test_events_arrive_whole_wherever_the_bytes_are_cut(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(TEXT)]
    parser = EventParser()
    found = [data for start, end in pairwise(edges) for data in parser.feed(TEXT[start:end])]
    assert found == [("a", b'{"n": 1}'), ("message", b"first\nsecond")]
