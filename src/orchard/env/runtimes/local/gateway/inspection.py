"""What a client says on a connection to a name, looked at before it is passed on: it must mean that name and no other.

TLS must name it in its first message, HTTP in every request; both are recognised whatever the port. Other protocols name
no host: for them the name that was looked up is all there is. Nothing is changed on the way.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import httptools

from orchard.env.egress import canonical_name
from orchard.env.runtimes.local.gateway.tls import Incomplete, Malformed, server_name

_MAX_HELD_BYTES = 128 << 10
#: How every line begins that some server would take for a request: a word, and a space in the widest sense. The rest of
#: the line may hold any byte; only a line feed ends it, as servers read a lone carriage return as a space.
_SPACE = rb"[\t\x0b-\r\x1c-\x20\x85\xa0]"
_MAY_BE_REQUEST = re.compile(_SPACE + rb"*(?:[!-~]+(?:" + _SPACE + rb"|\Z)|\Z)")
_REQUEST = re.compile(rb"HTTP/[0-9][^\r\n]*[\r\n]", re.IGNORECASE)
_HTTP2_PREFACE = b"PRI * HTTP/2"
#: Says on whose behalf a connection is, to servers that believe it; what follows would go unseen.
_PROXY_PREFACES = (b"PROXY ", b"\0\r\nQUIT\n")
_SWITCHING = b"HTTP/1.1 101"
#: Fatal alert `unrecognized_name`.
_TLS_ALERT = b"\x15\x03\x01\x00\x02\x02\x70"


class Refused(Exception):
    """What was said leads elsewhere. goodbye: what the client may be told, in its own protocol."""

    def __init__(self, reason: str, goodbye: bytes = b"") -> None:
        super().__init__(reason)
        self.reason = reason
        self.goodbye = goodbye


class Inspection:
    """One connection to `name`. What may be passed on is returned; `Refused` ends the connection."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._held = b""
        self._look: Callable[[bytes], bytes] = self._first
        self._http: _Requests | None = None
        self._server_said = b""

    def client_said(self, data: bytes) -> bytes:
        """The bytes for the server."""
        return self._look(data)

    def client_ended(self) -> bytes:
        """The client says no more: what was held back of it and may go."""
        held, self._held = self._held, b""
        if self._look == self._hello and held:
            raise Refused("the TLS handshake is incomplete")
        if self._look == self._first:
            return b""
        if self._look == self._upgrading and held:
            raise Refused("it ended while its protocol was changed")
        return held

    def server_said(self, data: bytes) -> bytes:
        """What of the client was held back until the server had answered, if it may go now."""
        if self._look != self._upgrading:
            return b""
        self._server_said += data[: len(_SWITCHING) - len(self._server_said)]
        if len(self._server_said) < len(_SWITCHING) and _SWITCHING.startswith(self._server_said):
            return b""
        if self._server_said != _SWITCHING:
            self._look = self._nothing_more
            return b""
        held, self._held = self._held, b""
        self._look = _unseen
        return held

    # -- what it is

    def _first(self, data: bytes) -> bytes:
        """Undecided: what is said goes on, as nobody can act on it before it is decided; `_held` is a copy."""
        self._held += data
        said = self._held.lstrip(b"\r\n")
        if said[:1] == b"\x16" and said[1:2] in (b"", b"\x03"):
            self._held, self._look = said, self._hello
            return self._hello(b"")
        if said.startswith(_PROXY_PREFACES):
            raise Refused("the PROXY protocol is not passed on")
        if said[:1] >= b"\x80" and said[2:3] == b"\x01":
            raise Refused("a TLS handshake of the old kind names no host", _TLS_ALERT)
        if len(said) < 3 or any(preface.startswith(said) for preface in _PROXY_PREFACES):
            return data
        line, *more = said.split(b"\n", maxsplit=1)
        may_be_request = _MAY_BE_REQUEST.match(line)
        is_request = may_be_request and _REQUEST.search(said[: len(line) + 1])
        if may_be_request and not is_request and not more:
            self._hold()
            return data
        self._held = b""
        if not is_request:
            self._look = _unseen
            return data
        if line.startswith(_HTTP2_PREFACE):
            raise Refused("HTTP/2 without TLS is not passed on")
        self._http = _Requests(self._name)
        self._look = self._requests
        return self._requests(said)[max(0, len(said) - len(data)) :]

    def _hold(self) -> bytes:
        if len(self._held) > _MAX_HELD_BYTES:
            raise Refused("its first line or handshake is too long")
        return b""

    def _pass_unseen(self) -> bytes:
        held, self._held = self._held, b""
        self._look = _unseen
        return held

    # -- TLS

    def _hello(self, data: bytes) -> bytes:
        self._held += data
        try:
            name = server_name(self._held)
        except Incomplete:
            return self._hold()
        except Malformed as error:
            raise Refused(f"the TLS handshake cannot be understood: {error}", _TLS_ALERT) from None
        if name is None:
            raise Refused("the TLS handshake names no host (SNI)", _TLS_ALERT)
        if canonical_name(name) != self._name:
            raise Refused(f"the TLS handshake names {name:.100}", _TLS_ALERT)
        return self._pass_unseen()

    # -- HTTP/1

    def _requests(self, data: bytes) -> bytes:
        assert self._http is not None
        rest = self._http.feed(data)
        if rest is None:
            return data
        # From here on it is another protocol, if the server agrees.
        self._held, self._look = rest, self._upgrading
        return data[: len(data) - len(rest)]

    def _upgrading(self, data: bytes) -> bytes:
        self._held += data
        return self._hold()

    def _nothing_more(self, data: bytes) -> bytes:
        raise Refused("more was said after the server had refused to change the protocol")


def _unseen(data: bytes) -> bytes:
    return data


class _Requests:
    """The requests of one connection, parsed strictly: what two programs could read differently is refused."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._parser = httptools.HttpRequestParser(self)
        self._problem = ""
        self._count = 0
        self._head_bytes = 0
        self._in_head = False
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []

    def feed(self, data: bytes) -> bytes | None:
        """None when all of it may go; after a request to change the protocol, what came after it. Raises `Refused`."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._check()
            return data[upgrade.args[0] :]
        except httptools.HttpParserError as error:
            self._check()
            raise Refused(
                f"not HTTP as it should be ({error!s:.80})", _forbidden("malformed request")
            ) from None
        self._check()
        self._head_bytes = self._head_bytes + len(data) if self._in_head else 0
        if self._head_bytes > _MAX_HELD_BYTES:
            raise Refused("the head of a request is too long")
        return None

    def _check(self) -> None:
        if self._problem:
            raise Refused(self._problem, _forbidden(self._problem))

    # Called by the parser. What they raise would lose its kind on the way.

    def on_message_begin(self) -> None:
        self._in_head = True
        self._count += 1
        self._url = b""
        self._headers = []

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.strip().lower(), value.strip()))

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._problem = self._problem or self._wrong()

    def _wrong(self) -> str:
        """What is wrong with the request whose head is complete; empty when nothing is."""
        values = {name: [v for n, v in self._headers if n == name] for name, _ in self._headers}
        hosts = values.get(b"host", [])
        if self._parser.get_method() == b"CONNECT":
            return "CONNECT would lead on to somewhere else"
        if len(hosts) != 1:
            return f"the request has {len(hosts)} Host headers, not one"
        if _host(hosts[0]) != self._name:
            return f"the request names the host {hosts[0][:100].decode('latin-1')}"
        if not self._url.startswith(b"/") and self._url != b"*":
            found = re.match(rb"https?://([^/?#@]+)(?:[/?#]|\Z)", self._url, re.IGNORECASE)
            if found is None or _host(found[1]) != self._name:
                return f"the request is for {self._url[:100].decode('latin-1')}"
        coding = values.get(b"transfer-encoding", [])
        twice = len(coding) > 1 or b"content-length" in values or self._parser.get_http_version() != "1.1"
        if coding and (twice or coding[0].lower() != b"chunked"):
            return "the length of the request can be read in two ways"
        return self._wrong_upgrade(values)

    def _wrong_upgrade(self, values: dict[bytes, list[bytes]]) -> str:
        wanted = b",".join(values.get(b"upgrade", [])).lower()
        if b"h2c" in wanted:
            return "HTTP/2 without TLS is not passed on"
        return "the protocol is changed on a used connection" if wanted and self._count > 1 else ""


def _host(value: bytes) -> str | None:
    host = re.sub(rb":[0-9]{1,5}\Z", b"", value)
    try:
        return canonical_name(host.decode("ascii"))
    except UnicodeDecodeError:
        return None


def _forbidden(reason: str) -> bytes:
    body = f"refused by the sandbox's allow_egress: {reason}\n".encode("latin-1", "replace")
    head = b"HTTP/1.1 403 Forbidden\r\nContent-Type: text/plain\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    return head % len(body) + body
