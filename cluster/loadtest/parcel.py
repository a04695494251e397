"""A report as lines of a log, for where the log is all that comes back.

Owns the form: numbered pieces of the compressed JSON and its SHA-256, so that a lost or cut line is noticed.
Pure.
"""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Iterator

from cluster.loadtest.report import LoadReport, from_json, to_json

_MARK = "#baton-report"
_PIECE = 4000


class Torn(Exception):
    """The report did not come whole."""


def wrapped(report: LoadReport) -> Iterator[str]:
    """The lines, without line ends."""
    data = zlib.compress(to_json(report), 9)
    text = base64.b64encode(data).decode()
    pieces = [text[start : start + _PIECE] for start in range(0, len(text), _PIECE)]
    for number, piece in enumerate(pieces):
        yield f"{_MARK} {number} {piece}"
    yield f"{_MARK} end {len(pieces)} {hashlib.sha256(data).hexdigest()}"


class Unwrapper:
    """Takes a log's text as it comes and gives back what is not the report."""

    def __init__(self) -> None:
        self._rest = ""
        self._pieces: dict[int, str] = {}
        self._end: tuple[int, str] | None = None

    def feed(self, text: str) -> list[str]:
        """The whole lines that are for people."""
        *lines, self._rest = (self._rest + text).split("\n")
        return [line for line in lines if not self._take(line)]

    def report(self) -> LoadReport | None:
        """None if the log held none. Raises Torn, or InvalidConfig for one of another version."""
        self.feed("\n")
        if self._end is None:
            if self._pieces:
                raise Torn(f"the log ends after {len(self._pieces)} pieces of the report")
            return None
        count, digest = self._end
        if missing := [number for number in range(count) if number not in self._pieces]:
            raise Torn(f"{len(missing)} of {count} pieces of the report are missing")
        data = base64.b64decode("".join(self._pieces[number] for number in range(count)))
        if hashlib.sha256(data).hexdigest() != digest:
            raise Torn("the report was changed on its way")
        return from_json(zlib.decompress(data))

    def _take(self, line: str) -> bool:
        match line.strip().split(" "):
            case [mark, "end", count, digest] if mark == _MARK and count.isdecimal():
                self._end = (int(count), digest)
            case [mark, number, piece] if mark == _MARK and number.isdecimal():
                self._pieces[int(number)] = piece
            case _:
                return False
        return True
