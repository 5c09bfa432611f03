"""Server-sent events out of bytes as they come."""

from __future__ import annotations

from collections.abc import Iterator

from orchard.env.errors import TooLarge

#: Far more than any event of the service; what is longer is no event stream.
_EVENT_BYTES = 256 << 20


class EventParser:
    """Bytes in, whole events out. Comments, and events without data, are passed over."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, piece: bytes) -> Iterator[tuple[str, bytes]]:
        """Name and data of the events that are whole now. Raises `TooLarge` for one that does not end."""
        start = max(0, len(self._rest) - 1)
        self._rest += piece
        while (end := self._rest.find(b"\n\n", start)) >= 0:
            block = bytes(self._rest[:end])
            del self._rest[: end + 2]
            start = 0
            name, data = b"message", []
            for line in block.split(b"\n"):
                field, _, value = line.partition(b": ")
                if field == b"event":
                    name = value
                elif field == b"data":
                    data.append(value)
            if data:
                yield name.decode("utf-8", "replace"), b"\n".join(data)
        if len(self._rest) > _EVENT_BYTES:
            raise TooLarge(f"an event is longer than {_EVENT_BYTES} bytes; is this a service of Orchard?")
