"""The bounded output window."""

from hypothesis import given
from hypothesis import strategies as st

from orchard.env.agent.output import OutputWindow

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
