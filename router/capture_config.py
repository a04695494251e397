"""CaptureConfig: the section `router.capture`. Owns its defaults; values only."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

# what is taken out before anything is written: addresses, keys and tokens, long numbers
DEFAULT_REDACTIONS = (
    r"[\w.+-]+@[\w-]+\.[\w.-]+",
    r"\b(?:sk|pk|ghp|xox[abp])[-_][\w-]{8,}",
    r"\b[A-Fa-f0-9]{32,}\b",
    r"\+?\d(?:[ .()/-]?\d){7,}",
)


@dataclass(frozen=True, slots=True)
class CaptureConfig:
    """What was asked and answered by calls that went wrong, for whoever has to find out why. Off unless a
    `directory` is named, which only its owner may enter.

    Kept are calls that failed by our fault, and those slower than `ttft_slo_s` or `e2e_slo_s` (None: no
    objective); of these a share of `sample_ratio`, at most `max_files` in the directory. Matches of `redact`
    are replaced, and of each text the first `max_chars` are kept.
    """

    directory: Path | None = None
    sample_ratio: float = 1.0
    ttft_slo_s: float | None = None
    e2e_slo_s: float | None = None
    max_files: int = 1000
    max_chars: int = 20_000
    redact: tuple[str, ...] = DEFAULT_REDACTIONS

    def __post_init__(self) -> None:
        if not 0.0 <= self.sample_ratio <= 1.0:
            raise ValueError("sample_ratio must lie between 0 and 1")
        if min(self.max_files, self.max_chars) < 1:
            raise ValueError("max_files and max_chars must be at least 1")
        for pattern in self.redact:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"redact: {pattern!r} is no regular expression: {error}") from error
