"""HTTP/1.1 of `baton serve --local`: uvicorn's, which declines every upgrade.

Owns what becomes of a request that offers another protocol (`Upgrade: h2c`, as Java's client does with its
first one): it is answered as if nothing had been offered (RFC 9110, 7.8). Uvicorn itself would take the body
behind such a head for another request. Lives on the server's event loop.
"""

from __future__ import annotations

from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_OFFER = (b"upgrade", b"http2-settings")


class PlainHTTP(HttpToolsProtocol):
    """To be given to uvicorn as `http`. Callbacks of the parser for a head with an offer do nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._reading = _Parser(self)
        self.parser = cast(httptools.HttpRequestParser, self._reading)

    def on_headers_complete(self) -> None:
        if not self._reading.is_offered_upgrade():
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self._reading.is_offered_upgrade():
            super().on_message_complete()

    def head_without_offer(self, method: bytes, version: str) -> bytes:
        """The head that was read last, as it would have been without the offer."""
        lines = [b"%s %s HTTP/%s" % (method, self.url, version.encode())]
        for name, value in self.headers:
            if name == b"connection":
                options = [option.strip() for option in value.split(b",")]
                value = b", ".join(option for option in options if option.lower() not in _OFFER)
            if value and name not in _OFFER:
                lines.append(name + b": " + value)
        return b"\r\n".join([*lines, b"", b""])


class _Parser:
    """The parser of one connection; it stops behind a head with an offer and begins anew without that."""

    def __init__(self, protocol: PlainHTTP) -> None:
        self._protocol = protocol
        self._parser = self._new()

    def feed_data(self, data: bytes) -> None:
        """Raises as httptools does."""
        while True:
            try:
                return self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                if not self.is_offered_upgrade():
                    raise
                head = self._protocol.head_without_offer(
                    self._parser.get_method(), self._parser.get_http_version()
                )
                data = head + data[offer.args[0] :]
                self._parser = self._new()

    def is_offered_upgrade(self) -> bool:
        """Whether the head that was read last offers another protocol. CONNECT asks for one by itself."""
        return self._parser.should_upgrade() and self._parser.get_method() != b"CONNECT"

    def _new(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self._protocol)
        # as uvicorn sets it: what comes behind a last request is not a fault of that one
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)
