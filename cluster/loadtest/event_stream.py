"""EventReader: server-sent events out of bytes, strictly.

Owns the framing (WHATWG HTML, section 9.2) and the refusal of what is not in it. What events mean belongs to
`answer`. No I/O.
"""

from __future__ import annotations

from dataclasses import dataclass

_MAX_LINE_BYTES = 16 << 20


class BrokenStream(Exception):
    """The answer was not the complete stream that was asked for; says in which way."""


@dataclass(frozen=True, slots=True)
class Event:
    """`kind` is the value of `event:`, empty if there was none."""

    kind: str
    data: bytes


class EventReader:
    """Feed it pieces of a body as they come; they need not end where events do."""

    def __init__(self) -> None:
        self._rest = b""
        self._kind = ""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[Event]:
        """The events that `piece` completes. Raises BrokenStream for a line that belongs to no event."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if len(self._rest) > _MAX_LINE_BYTES:
            raise BrokenStream(f"a line of more than {_MAX_LINE_BYTES} bytes")
        found = (self._take(line.removesuffix(b"\r")) for line in lines)
        return [event for event in found if event is not None]

    def end(self) -> None:
        """The body is over. Raises BrokenStream if an event was begun and not ended."""
        if self._rest.strip() or self._data:
            raise BrokenStream("the body ends in the middle of an event")

    def _take(self, line: bytes) -> Event | None:
        if not line:
            return self._dispatch()
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        match field:
            case b"data":
                self._data.append(value)
            case b"event":
                self._kind = value.decode("utf-8", "replace")
            case b"" | b"id" | b"retry":  # a comment keeps the connection open; the others are for browsers
                pass
            case _:
                raise BrokenStream(f"not a line of an event stream: {line[:100]!r}")
        return None

    def _dispatch(self) -> Event | None:
        if not self._data:
            self._kind = ""
            return None
        event = Event(self._kind, b"\n".join(self._data))
        self._kind, self._data = "", []
        return event
