"""The raw client reads answers however the network cuts them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from benchmarks.wire import Address, BenchError

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 13\r\n\r\n" + b'{"ready":  1}'


class Server:
    """Answers each request with `answer`, in pieces of `piece` bytes."""

    def __init__(self, answer: bytes, piece: int) -> None:
        self.answer = answer
        self.piece = piece
        self.requests: list[bytes] = []
        self.url = ""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            self.requests.append(head + await reader.readexactly(length))
            for start in range(0, len(self.answer), self.piece):
                writer.write(self.answer[start : start + self.piece])
                await writer.drain()
                await asyncio.sleep(0)
            if b"content-length" not in self.answer.lower():
                writer.close()


@pytest.fixture(params=[1, 7, 1000])
async def server(request: pytest.FixtureRequest) -> AsyncIterator[Server]:
    server = Server(ANSWER, request.param)
    listening = await asyncio.start_server(server.handle, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    yield server
    listening.close()


async def test_answers_arrive_whole_one_after_the_other(server: Server) -> None:
    connection = await Address(server.url, "key").connect()
    for _ in range(3):
        assert await connection.json("POST", "/x", {"a": 1}) == {"ready": 1}
    connection.close()
    assert server.requests[0].startswith(b"POST /x HTTP/1.1\r\n")
    assert b"\r\nx-api-key: key\r\n" in server.requests[0]
    assert server.requests[2].endswith(b'\r\n\r\n{"a": 1}')


async def test_an_error_is_no_result(server: Server) -> None:
    server.answer = ANSWER.replace(b"200 OK", b"503 No")
    connection = await Address(server.url, "key").connect()
    with pytest.raises(BenchError, match="HTTP 503"):
        await connection.json("GET", "/x")
    connection.close()


async def test_an_answer_of_unknown_length_is_refused(server: Server) -> None:
    server.answer = b"HTTP/1.1 200 OK\r\n\r\n"
    connection = await Address(server.url, "key").connect()
    with pytest.raises(BenchError):
        await connection.request("GET", "/x")
