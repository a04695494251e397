"""What a running system says about its answers, beside what the client measured itself.

Owns reading the `baton` object of a stream's usage and the rule that its parts add up. Used from the test's
thread.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.e2e import wire
from tests.e2e.client import COMPLETIONS, Client

# what lies outside: the connection, the ingress, the head and the first event on their way
MAX_OUTSIDE_MS = 25.0
MAX_OUTSIDE_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class Explained:
    """`told` is the only prompt's explanation; `ttft_ms` what the client measured up to the head, which comes
    with the first token.
    """

    told: dict[str, Any]
    ttft_ms: float

    @property
    def parts(self) -> dict[str, float]:
        """Without their sum."""
        return {name: ms for name, ms in self.told["ttft_ms"].items() if name != "total"}

    @property
    def outside_ms(self) -> float:
        """Of the client's time, what the system does not account for."""
        return self.ttft_ms - self.told["ttft_ms"]["total"]

    def check(self) -> None:
        """The parts add up, and to no more than the client has waited."""
        total = self.told["ttft_ms"]["total"]
        assert abs(sum(self.parts.values()) - total) <= 0.001 * len(self.parts), self.told
        assert all(ms >= 0.0 for ms in self.parts.values()), self.told
        assert self.outside_ms >= 0.0, f"the client waited {self.ttft_ms} ms: {self.told}"

    @property
    def is_close(self) -> bool:
        """Whether the sum is what the client measured, but for the way there and back."""
        return self.outside_ms <= MAX_OUTSIDE_MS + MAX_OUTSIDE_SHARE * self.ttft_ms


def ask(client: Client, prompt: str | Sequence[int], **body: Any) -> Explained:
    """A streamed completion, read to its end."""
    request = {"prompt": prompt, "temperature": 0, "ignore_eos": True, "max_tokens": 8, **body}
    request |= {"stream": True, "stream_options": {"include_usage": True}}
    start = time.monotonic()
    with client.open(COMPLETIONS, request) as connection:
        head = connection.read_head()
        ttft_ms = (time.monotonic() - start) * 1e3
        assert head.status == 200, head
        for _ in connection.pieces(head):
            pass
    events = wire.parse_events(head.body)
    (told,) = events[-1]["usage"]["baton"]["prompts"]
    return Explained(told, ttft_ms)
