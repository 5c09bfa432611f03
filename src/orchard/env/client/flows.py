"""What flows over connections: bodies as streams, messages of a socket; and the errors of connections."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager

import aiohttp

from orchard.env.errors import ConnectionFailed


class Lost(Exception):
    """No usable answer. `unsent`: the request surely never reached the service."""

    def __init__(self, detail: str, *, unsent: bool = False, final: bool = False) -> None:
        super().__init__(detail)
        self.unsent = unsent
        self.final = final


class Outgoing:
    """A body that is made while it is sent: `make` gives its pieces anew for every attempt, unless `once`.

    whole: it can be sent again. error: what making it raised, which then is the error of the request.
    """

    def __init__(
        self, make: Callable[[], AsyncIterator[bytes]], media_type: str, *, once: bool = False
    ) -> None:
        self.media_type = media_type
        self.error: Exception | None = None
        self.whole = True
        self._make = make
        self._once = once

    async def __aiter__(self) -> AsyncIterator[bytes]:
        self.whole = not self._once
        try:
            async for piece in self._make():
                yield piece
        except Exception as error:
            self.error = error
            raise


@contextmanager
def losses() -> Iterator[None]:
    """Raises errors of the connection as `Lost`; a wrong URL is none."""
    try:
        yield
    except aiohttp.InvalidURL:
        raise
    except aiohttp.ClientSSLError as error:
        raise Lost(f"TLS failed: {error}", unsent=True, final=True) from error
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        raise Lost(str(error) or "connecting timed out", unsent=True) from error
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        reason = str(error) or type(error).__name__
        raise Lost(f"the connection was lost before the answer ({reason})") from error


async def pieces(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The body of an answer as it comes. Raises `Lost` when it breaks off before its end."""
    while True:
        with losses():
            piece = await response.content.readany()
        if not piece:
            return
        yield piece


class Socket:
    """A WebSocket with text messages. All methods raise `ConnectionFailed` when it is broken."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket

    async def send(self, text: str) -> None:
        try:
            await self._socket.send_str(text)
        except (aiohttp.ClientError, OSError) as error:
            raise ConnectionFailed(f"the connection was lost: {error}", sent=True) from error

    async def receive(self) -> str:
        """The next message. `ConnectionFailed` also when the service has closed it."""
        message = await self._socket.receive()
        if message.type is aiohttp.WSMsgType.TEXT:
            return str(message.data)
        raise ConnectionFailed(f"the connection was closed (code {self._socket.close_code})", sent=True)

    async def close(self) -> None:
        await self._socket.close()
