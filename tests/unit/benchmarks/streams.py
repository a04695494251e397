"""Streams with made-up arrival times, for the arithmetic of the benchmarks."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.streaming import Stream


def stream(due_at: float, times: Sequence[float], num_output_tokens: int | None = None) -> Stream:
    """It ended with its last event."""
    return Stream(
        due_at=due_at,
        times=tuple(times),
        ended_at=times[-1],
        num_prompt_tokens=10,
        num_output_tokens=len(times) if num_output_tokens is None else num_output_tokens,
        num_cached_tokens=0,
        text="x" * len(times),
    )
