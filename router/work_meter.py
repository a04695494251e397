"""WorkMeter: what is asked of this router, counted for whoever decides how many workers there are.

Owns sums that only grow, from which rates follow over any time, and what is inside at present. Nothing here
says anything about one request. Lives on the event loop.
"""

from __future__ import annotations

from collections.abc import Mapping

from core.telemetry import TTFTPart

# an answer whose length nobody knows yet
_ASSUMED_OUTPUT_TOKENS = 256
_ROUTER_PARTS = (TTFTPart.ADMIT, TTFTPart.PLACE, TTFTPart.RETRY)


class WorkMeter:
    """One per router."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = dict.fromkeys(
            (
                *("arrived", "arrived_tokens", "expected_tokens", "read_tokens", "cached_tokens"),
                *("ended", "output_tokens", "gaps", "gaps_s"),
                *("firsts", "router_wait_s", "queue_wait_s", "transfers", "transfer_wait_s"),
            ),
            0.0,
        )
        self._num_open = 0
        self._num_waiting = 0
        self._num_waiting_tokens = 0

    def open(self, num_prompt_tokens: int, max_tokens: int) -> OpenWork:
        """A prompt has been let in, or waits to be; `close` it at its end."""
        self._num_open += 1
        self._sums["arrived"] += 1
        self._sums["arrived_tokens"] += num_prompt_tokens
        self._sums["expected_tokens"] += min(max_tokens, _ASSUMED_OUTPUT_TOKENS)
        return OpenWork(self, num_prompt_tokens)

    def stats(self) -> dict[str, float]:
        """Sums since the start, and what is inside now."""
        return {
            **self._sums,
            "open": float(self._num_open),
            "waiting": float(self._num_waiting),
            "waiting_tokens": float(self._num_waiting_tokens),
        }

    def add(self, **amounts: float) -> None:
        for name, amount in amounts.items():
            self._sums[name] += amount

    def wait(self, num: int, num_tokens: int) -> None:
        """So many more, or fewer, have no worker."""
        self._num_waiting += num
        self._num_waiting_tokens += num * num_tokens

    def leave(self) -> None:
        self._num_open -= 1


class OpenWork:
    """One prompt and its samples, from its arrival to its end."""

    def __init__(self, meter: WorkMeter, num_prompt_tokens: int) -> None:
        self._meter = meter
        self._num_prompt_tokens = num_prompt_tokens
        self._is_waiting = True
        self._is_closed = False
        meter.wait(1, num_prompt_tokens)

    def placed(self) -> None:
        """It has workers."""
        self._set_waiting(False)

    def lost(self) -> None:
        """It has none any more."""
        self._set_waiting(not self._is_closed)

    def first_token(self, num_cached_tokens: int, parts: Mapping[TTFTPart, float]) -> None:
        """`parts` are where the time to it went, in seconds."""
        self._meter.add(
            read_tokens=self._num_prompt_tokens,
            cached_tokens=min(num_cached_tokens, self._num_prompt_tokens),
            firsts=1,
            router_wait_s=sum(parts.get(part, 0.0) for part in _ROUTER_PARTS),
            queue_wait_s=parts.get(TTFTPart.QUEUE, 0.0),
        )

    def next_tokens(self, num_tokens: int, seconds: float) -> None:
        self._meter.add(gaps=num_tokens, gaps_s=seconds)

    def close(self, num_output_tokens: int, transfer_wait_s: float | None) -> None:
        """It has ended, whole or not. Once only."""
        self._set_waiting(False)
        self._is_closed = True
        self._meter.leave()
        if num_output_tokens:
            self._meter.add(ended=1, output_tokens=num_output_tokens)
        if transfer_wait_s is not None:
            self._meter.add(transfers=1, transfer_wait_s=transfer_wait_s)

    def _set_waiting(self, is_waiting: bool) -> None:
        if is_waiting is not self._is_waiting:
            self._is_waiting = is_waiting
            self._meter.wait(1 if is_waiting else -1, self._num_prompt_tokens)
