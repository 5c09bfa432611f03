"""The server name of a TLS ClientHello (RFC 8446 §4.1.2, RFC 6066 §3), from the first bytes of a connection."""

from __future__ import annotations

_HANDSHAKE, _CLIENT_HELLO = 22, 1
_SERVER_NAME, _HOST_NAME = 0, 0
_MAX_HELLO = 64 << 10


class Incomplete(Exception):
    """More bytes are needed."""


class Malformed(Exception):
    """It is no ClientHello, or one that could be read in two ways."""


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, count: int) -> bytes:
        if self._at + count > len(self._data):
            raise Malformed("it ends too early")
        self._at += count
        return self._data[self._at - count : self._at]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    def vector(self, size: int) -> _Reader:
        return _Reader(self.take(self.number(size)))

    def rest(self) -> bytes:
        return self.take(len(self._data) - self._at)

    def done(self) -> bool:
        return self._at == len(self._data)


def server_name(data: bytes) -> str | None:
    """The name, None when it has none. Raises `Incomplete` or `Malformed`."""
    hello = _Reader(_handshake(data))
    hello.take(2 + 32)  # version, random
    hello.vector(1)  # session id
    hello.vector(2)  # cipher suites
    hello.vector(1)  # compression methods
    if hello.done():
        return None
    extensions = hello.vector(2)
    if not hello.done():
        raise Malformed("it has bytes after its end")
    found: list[str] = []
    while not extensions.done():
        kind = extensions.number(2)
        body = extensions.vector(2)
        if kind == _SERVER_NAME:
            found.append(_host_name(body))
    if len(found) > 1:
        raise Malformed("it names several hosts")
    return found[0] if found else None


def _host_name(body: _Reader) -> str:
    names = body.vector(2)
    if names.number(1) != _HOST_NAME:
        raise Malformed("it names something that is no host")
    name = names.vector(2)
    if not names.done() or not body.done():
        raise Malformed("it names several hosts")
    try:
        return name.rest().decode("ascii")
    except UnicodeDecodeError:
        raise Malformed("the name is not ASCII") from None


def _handshake(data: bytes) -> bytes:
    """The ClientHello, put together from its records."""
    message, at = b"", 0
    while True:
        if len(message) >= 4:
            length = int.from_bytes(message[1:4], "big")
            if message[0] != _CLIENT_HELLO or length > _MAX_HELLO:
                raise Malformed("it does not begin with a ClientHello")
            if len(message) >= 4 + length:
                return message[4 : 4 + length]
        if at + 5 > len(data):
            raise Incomplete
        kind, major, size = data[at], data[at + 1], int.from_bytes(data[at + 3 : at + 5], "big")
        if kind != _HANDSHAKE or major != 3 or not size:
            raise Malformed("it is interrupted")
        if at + 5 + size > len(data):
            raise Incomplete
        message += data[at + 5 : at + 5 + size]
        at += 5 + size
