"""Every parser of bytes or text that others make, alone: it gives what it promises or its own error, in any cutting.

What only makes sense with a peer is fuzzed with one: the agent (test_agent.py), an orchestrator before a hostile agent
(test_hostile_agent.py), the REST API (test_openapi.py), terminals
(test_terminal_frames.py). What a client is told is in test_client.py.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from orchard.env import egress, tars
from orchard.env.agent import accounts
from orchard.env.agent.inotify import parsed
from orchard.env.agent.links import Cutter, TunnelError
from orchard.env.agent.wire import FrameReader, WireError
from orchard.env.client.sse import EventParser
from orchard.env.contract import decode_base64, parse_bytes, parse_cpu, valid_id
from orchard.env.errors import (
    ArchiveInvalid,
    InfrastructureError,
    InvalidRequest,
    OrchardError,
    SettingsError,
)
from orchard.env.images.reference import parse as parse_reference
from orchard.env.orchestrator.auth import read_keys_file
from orchard.env.orchestrator.catalog import _decode_cursor, parse_labels
from orchard.env.orchestrator.jobs import signal_number
from orchard.env.orchestrator.patches import encode_patch
from orchard.env.orchestrator.routes.files import _parse_patch
from orchard.env.orchestrator.routes.streams import _after
from orchard.env.orchestrator.settings import ServiceSettings
from orchard.env.runtimes.local.gateway import dns, nflog
from orchard.env.runtimes.local.gateway.inspection import Inspection, Refused
from orchard.env.runtimes.local.gateway.policies import Policy
from tests.fuzz.profile import JSON, examples

LINE = st.lists(
    st.sampled_from(["root", "x", "0", "-1", "99999999999", "", "٣", "/", "a" * 300, "\udcff"]), max_size=9
).map(":".join)


def in_pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({min(cut, len(data)) for cut in cuts})
    return [data[start:end] for start, end in zip([0, *places], [*places, len(data)], strict=True)]


# ------------------------------------------------------------------------------------------- frames and streams


def _wire(pieces: list[bytes]) -> Any:
    reader = FrameReader(max_header=1000, max_payload=1000)
    return [found for piece in pieces for found in reader.feed(piece)]


def _tunnel(pieces: list[bytes]) -> Any:
    cutter = Cutter()
    return [found for piece in pieces for found in cutter.feed(piece)]


def _events(pieces: list[bytes]) -> Any:
    parser = EventParser()
    return [found for piece in pieces for found in parser.feed(piece)]


def _tar(pieces: list[bytes]) -> Any:
    reader = tars.Reader()
    found: list[Any] = []
    for piece in pieces:
        for part in reader.feed(piece):
            if isinstance(part, bytes) and found and isinstance(found[-1], bytes):
                found[-1] += part
            else:
                found.append(part)
    reader.finish()
    return found


def _inspected(pieces: list[bytes]) -> Any:
    inspection = Inspection("host.example")
    return b"".join([*(inspection.client_said(piece) for piece in pieces), inspection.client_ended()])


STREAMS: dict[
    str, tuple[Callable[[list[bytes]], Any], tuple[type[Exception], ...], st.SearchStrategy[bytes]]
] = {
    "agent frames": (
        _wire,
        (WireError,),
        st.lists(
            st.builds(
                lambda head, tail: struct.pack(">II", len(head), len(tail)) + head + tail,
                JSON.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=20),
                st.binary(max_size=20),
            ),
            max_size=4,
        ).map(b"".join),
    ),
    "tunnel frames": (
        _tunnel,
        (TunnelError,),
        st.lists(st.binary(min_size=9, max_size=9), max_size=4).map(b"".join),
    ),
    "server-sent events": (
        _events,
        (),
        st.lists(
            st.sampled_from([b"event: ", b"data: ", b"id: ", b"\n", b"\n\n", b":", b"\r\n", b"\xff", b"{}"]),
            max_size=15,
        ).map(b"".join),
    ),
    "tar archives": (
        _tar,
        (ArchiveInvalid,),
        st.builds(
            lambda entry, at, change: (
                tars.header(entry)[:at] + change + tars.header(entry)[at + len(change) :] + tars.END
            ),
            st.builds(
                tars.Entry,
                st.sampled_from(["a", "a/b", "x" * 300, "../x"]),
                st.sampled_from(["file", "directory", "symlink"]),
                modified_ns=st.sampled_from([None, 1, -5]),
                target=st.just("a"),
            ),
            st.integers(0, 1500),
            st.binary(max_size=12),
        ),
    ),
    "TLS and HTTP of a sandbox": (
        _inspected,
        (Refused,),
        st.lists(
            st.sampled_from(
                [
                    b"\x16\x03\x01",
                    b"\x00\x05",
                    b"\x01\x00",
                    b"GET / HTTP/1.1\r\n",
                    b"Host: host.example\r\n",
                    b"\r\n",
                    b"Content-Length: 5\r\n",
                    b"Transfer-Encoding: chunked\r\n",
                    b"\xff",
                    b"host.example",
                ]
            ),
            max_size=12,
        ).map(b"".join),
    ),
}


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_means_the_same_in_any_pieces(name: str) -> None:
    read, errors, shaped = STREAMS[name]

    def outcome(pieces: list[bytes]) -> Any:
        try:
            return read(pieces)
        except errors as error:
            return type(error)

    @examples(150)
    @given(data=st.binary(max_size=120) | shaped, cuts=st.lists(st.integers(0, 1500), max_size=6))
    def attempt(data: bytes, cuts: list[int]) -> None:
        assert outcome(in_pieces(data, cuts)) == outcome([data])

    attempt()


def test_a_frame_reader_holds_no_more_than_one_frame() -> None:
    """What is announced is refused before it is waited for."""
    for lengths in ((1001, 0), (0, 1001), (2**32 - 1, 2**32 - 1)):
        with pytest.raises(WireError):
            FrameReader(max_header=1000, max_payload=1000).feed(struct.pack(">II", *lengths))


# --------------------------------------------------------------------------------------------------- text and JSON

TEXTS: dict[str, tuple[Callable[[str], Any], type[Exception] | tuple[type[Exception], ...]]] = {
    "ids": (valid_id, ValueError),
    "cpu": (parse_cpu, ValueError),
    "sizes": (parse_bytes, ValueError),
    "base64": (decode_base64, ValueError),
    "labels": (lambda text: parse_labels([text]), InvalidRequest),
    "cursors": (_decode_cursor, InvalidRequest),
    "Last-Event-ID of a command": (_after, InvalidRequest),
    "signals": (signal_number, InvalidRequest),
    "allowed hosts": (egress.parse_entry, ValueError),
    "host names": (egress.canonical_name, ()),
    "resolvers": (egress.parse_resolver, ValueError),
    "image names": (parse_reference, (InvalidRequest, OrchardError)),
}
SHAPED = st.text(st.sampled_from("0123456789-.:/=*[]abAZ~٣²é \n\0\u017f"), max_size=30)


@pytest.mark.parametrize("name", TEXTS)
def test_text_is_understood_or_refused_with_its_error(name: str) -> None:
    parse, errors = TEXTS[name]

    @examples(200)
    @given(text=SHAPED | st.text(max_size=40))
    @example(text="9" * 5000)
    @example(text="xn--a.example")
    @example(text="bmFuIGE")
    def attempt(text: str) -> None:
        try:
            parse(text)
        except errors as error:
            assert str(error)

    attempt()


@examples(200)
@given(
    body=JSON.map(lambda value: json.dumps(value).encode())
    | st.binary(max_size=60)
    | st.just(b"[" * 200_000)
    | st.dictionaries(st.sampled_from(["patch", "strip", "cwd", "timeout_seconds"]), JSON).map(
        lambda value: json.dumps(value).encode()
    )
)
def test_a_patch_body_is_understood_or_refused(body: bytes) -> None:
    try:
        request, patch = _parse_patch(body)
    except InvalidRequest as error:
        assert error.detail
    else:
        assert request.patch and patch


@examples(100)
@given(text=st.text(st.characters(), max_size=30))
def test_a_patch_of_any_text_has_bytes(text: str) -> None:
    assert (
        encode_patch(text).decode("utf-8", "surrogatepass" if max(text, default="") >= "\ud800" else "strict")
        is not None
    )


@examples(150)
@given(
    data=JSON.map(lambda value: json.dumps(value).encode())
    | st.binary(max_size=80)
    | st.lists(
        st.dictionaries(st.sampled_from(["owner", "role", "hash", "max_sandboxes", "tunnel_targets"]), JSON),
        max_size=2,
    ).map(lambda value: json.dumps(value).encode())
)
def test_a_keys_file_is_understood_or_named_as_wrong(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    file = tmp_path_factory.getbasetemp() / "fuzzed-keys.yaml"
    file.write_bytes(data)
    try:
        read_keys_file(file)
    except SettingsError as error:
        assert str(file) in error.detail


@examples(150)
@given(
    data=st.dictionaries(
        st.sampled_from(["port", "pull", "api_keys", "max_sandboxes", "ttl_s", "x"]), JSON
    ).map(json.dumps)
    | st.text(max_size=40)
)
def test_a_settings_file_is_understood_or_named_as_wrong(
    tmp_path_factory: pytest.TempPathFactory, data: str
) -> None:
    file = tmp_path_factory.getbasetemp() / "fuzzed-settings.yaml"
    file.write_bytes(data.encode("utf-8", "replace"))
    try:
        ServiceSettings.load(file)
    except SettingsError as error:
        assert error.detail


# --------------------------------------------------------------------------------------- what sandboxes can make


@examples(150)
@given(passwd=st.lists(LINE, max_size=5), group=st.lists(LINE, max_size=5), user=LINE | st.text(max_size=10))
def test_accounts_of_a_hostile_image_are_found_or_unknown(
    passwd: list[str], group: list[str], user: str
) -> None:
    files = {b"/etc/passwd": passwd, b"/etc/group": group}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accounts, "_lines", lambda path: [line.split(":") for line in files[path]])
        try:
            found = accounts.lookup(user)
        except accounts.UnknownUser:
            return
    assert all(0 <= number <= 65535 for number in (found.uid, found.gid, *found.groups))


@examples(150)
@given(
    names=st.lists(
        st.tuples(
            st.integers(-1, 2**31 - 1), st.binary(max_size=20).map(lambda name: name.replace(b"\0", b"x"))
        ),
        max_size=5,
    )
)
def test_names_of_changed_files_are_any_bytes(names: list[tuple[int, bytes]]) -> None:
    data = b"".join(struct.pack("<iIII", wd, 0x100, 0, len(name) + 4) + name + bytes(4) for wd, name in names)
    assert [(wd, name) for wd, _, _, name in parsed(data)] == names


@examples(200)
@given(
    query=st.binary(max_size=80)
    | st.builds(
        lambda flags, counts, rest: struct.pack(">HHHHHH", 1, flags, *counts) + rest,
        st.integers(0, 65535),
        st.tuples(*[st.integers(0, 2)] * 4),
        st.lists(
            st.sampled_from([b"\x04host\x07example\x00", b"\xc0\x0c", b"\x00\x01\x00\x01", b"\xff"]),
            max_size=5,
        ).map(b"".join),
    )
)
def test_a_dns_query_is_answered_or_dropped(query: bytes) -> None:
    reply, _refusal = dns.answer(Policy(["host.example"]), query)
    assert reply is None or reply[:2] == query[:2]


@examples(150)
@given(
    data=st.binary(max_size=120)
    | st.builds(
        lambda size, rest: struct.pack("=IH", size, 0x400) + rest,
        st.integers(0, 200),
        st.binary(max_size=100),
    )
)
def test_packets_that_the_kernel_tells_of_are_told_or_passed_over(data: bytes) -> None:
    assert all(packet.source and packet.destination for packet in nflog.packets(data))


def test_a_state_file_of_no_database_is_set_aside(tmp_path: Path) -> None:
    """tests/env/orchestrator/test_sqlite_store.py has the rows; here is any beginning of the file."""
    import asyncio

    from orchard.env.orchestrator.stores.sqlite import SqliteStore

    async def opened(file: Path) -> None:
        store = SqliteStore(file)
        await store.open()
        await store.close()

    whole = tmp_path / "whole"
    asyncio.run(opened(whole))
    data = whole.read_bytes()
    for number, broken in enumerate(
        (b"garbage", b"\0" * 4096, data[:100], data[: len(data) // 2], b"SQLite format 3\0" + b"\xff" * 84)
    ):
        file = tmp_path / f"broken{number}"
        file.write_bytes(broken)
        try:
            asyncio.run(opened(file))
        except InfrastructureError as error:
            assert "cannot open the state" in error.detail
