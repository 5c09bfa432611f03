"""What is read back from where it was kept: damaged, it is told or passed over, and never half believed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from orchard.env.errors import AgentUnreachable
from orchard.env.orchestrator.stores.base import JobRecord, SandboxRecord
from orchard.env.orchestrator.stores.redis import _job_of, _sandbox_of
from orchard.env.runtimes.local.connections import _token
from tests.fuzz.profile import examples

values = st.binary(max_size=200) | st.sampled_from(
    [b'{"ended_at":null}\n{}', b'{"ended_at":"x"}', b"[]", b"[" * 5000, b'{"n":1}', b"", b"null\n"]
)


@examples(300)
@given(values)
@example(b'{"ended_at":1.5}\ndata')
@example(b'{"ended_at":NaN}\ndata')
def test_a_sandbox_in_redis(value: bytes) -> None:
    found = _sandbox_of("box", value)
    if found is not None:
        assert isinstance(found, SandboxRecord)
        assert found.ended_at is None or found.ended_at + 0 == found.ended_at


@examples(300)
@given(st.text(max_size=20), values, st.binary(max_size=20))
@example("me\0j", b'{"sandbox_id":"b","digest":"d","finished_at":null,"n":5}\nhead', b"")
def test_a_job_in_redis(name: str, value: bytes, output: bytes) -> None:
    found = _job_of(name, value, output)
    if found is not None:
        number, job = found
        assert isinstance(number, int) and isinstance(job, JobRecord)
        assert (job.sandbox_id, job.digest) == (str(job.sandbox_id), str(job.digest))


def test_what_was_written_is_read() -> None:
    found = _job_of("me\0j", b'{"sandbox_id":"b","digest":"d","finished_at":2.5,"n":5}\nhead\nmore', b"out")
    assert found == (5, JobRecord("me", "j", "b", "d", 2.5, b"head\nmore", b"out"))


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"5", b"null", b'{"ref":1}', b"\xff", b"[" * 100_000])
def test_a_damaged_note_of_a_sandbox_is_told(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "box").mkdir()
    (tmp_path / "box/sandbox.json").write_bytes(text)
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(AgentUnreachable, match="damaged"):
            _token(folder, "box")
    finally:
        os.close(folder)
