"""SampleText: the text of one sample, put together from its tokens.

Owns when a piece of text may be shown: characters are whole, and nothing that may turn out to be a stop
string leaves early. Streamed and unstreamed answers go through it, so they are equal. Does not own wire
shapes. One per sample; used on the event loop.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from core.request import FinishReason, TokenDelta, TokenLogprob
from router.detokenizer import Detokenizer
from router.stops import StopMatch, StopMatcher, StopStrings
from router.token_bytes import TokenBytes


@dataclass(frozen=True, slots=True)
class TextSettings:
    """What the client wants to see of the tokens. `stop_strings`: what all samples' matchers share."""

    stops: tuple[str, ...] = ()
    is_stop_included: bool = False
    is_special_skipped: bool = True
    min_tokens: int = 0
    stop_strings: StopStrings = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_strings", StopStrings(self.stops))


@dataclass(frozen=True, slots=True)
class TextLogprob:
    """The log-probability of a visible token, and how many characters of the answer precede it."""

    logprob: TokenLogprob
    offset: int


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text of one sample. `token_ids` are the tokens read for it, visible or not, the ending one
    included.
    """

    sample_index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TextLogprob, ...] = ()
    finish_reason: FinishReason | None = None


class SampleText:
    """Turns a sample's TokenDeltas into TextDeltas; once it has a finish reason it takes no more tokens.

    Not part of the text: special tokens that are skipped, and the token that ended the sample by STOP. A
    token's logprob is shown with the first of its characters; tokens behind the cut of a stop string are not
    shown.
    """

    def __init__(self, token_bytes: TokenBytes, settings: TextSettings, sample_index: int = 0) -> None:
        self.finish_reason: FinishReason | None = None
        self.num_tokens = 0
        self._bytes = token_bytes
        self._settings = settings
        self._sample_index = sample_index
        self._detokenizer = Detokenizer()
        self._matcher = StopMatcher(settings.stop_strings)
        self._held = ""
        self._num_released = 0
        self._waiting: deque[TextLogprob] = deque()

    def feed(self, delta: TokenDelta) -> TextDelta:
        """Read the tokens of `delta` until the sample ends; what lies behind its end is dropped."""
        text = ""
        num_read = 0
        match: StopMatch | None = None
        for index, token_id in enumerate(delta.token_ids):
            if self.finish_reason is not None or match is not None:
                break
            num_read = index + 1
            self.num_tokens += 1
            is_last = num_read == len(delta.token_ids)
            if delta.finish_reason is FinishReason.STOP and is_last and not self._settings.is_stop_included:
                break
            logprob = delta.logprobs[index] if delta.logprobs else None
            match = self._append(token_id, logprob)
        if self.finish_reason is None and match is None and delta.finish_reason is not None:
            match = self._add(self._detokenizer.flush())
        if match is not None:
            text = self._end(FinishReason.STOP, match)
        elif self.finish_reason is None and delta.finish_reason is not None:
            text = self._end(delta.finish_reason, None)
        elif self.finish_reason is None:
            text = self._release(len(self._held) - self._matcher.num_held)
        else:
            return TextDelta(self._sample_index)
        return TextDelta(
            self._sample_index, text, delta.token_ids[:num_read], self._shown(), self.finish_reason
        )

    def _append(self, token_id: int, logprob: TokenLogprob | None) -> StopMatch | None:
        if self._settings.is_special_skipped and token_id in self._bytes.special_ids:
            return None
        if logprob is not None:
            self._waiting.append(TextLogprob(logprob, self._num_released + len(self._held)))
        return self._add(self._detokenizer.feed(self._bytes.of(token_id)))

    def _add(self, piece: str) -> StopMatch | None:
        self._held += piece
        return self._matcher.feed(piece, self.num_tokens >= self._settings.min_tokens)

    def _end(self, reason: FinishReason, match: StopMatch | None) -> str:
        self.finish_reason = reason
        if match is None:
            return self._release(len(self._held))
        cut = match.end if self._settings.is_stop_included else match.start
        self._held = self._held[: cut - self._num_released]
        self._waiting = deque(entry for entry in self._waiting if entry.offset < cut)
        return self._release(len(self._held))

    def _release(self, num_chars: int) -> str:
        text, self._held = self._held[:num_chars], self._held[num_chars:]
        self._num_released += num_chars
        return text

    def _shown(self) -> tuple[TextLogprob, ...]:
        """Entries whose first character is out; at the end, all that are left."""
        shown = []
        while self._waiting and (self.finish_reason or self._waiting[0].offset < self._num_released):
            shown.append(self._waiting.popleft())
        return tuple(shown)
