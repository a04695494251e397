"""In which order prompts are read: a key for each, the smallest first.

Pure: how fast prompts are read and what time it is are arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from prefill_worker.prompt import Prompt

QueueOrder = Callable[[Prompt, float, float], float]
"""(prompt, now, tokens read per second) → a key; prompts with smaller keys are computed first."""

_ASSUMED_TOKENS_PER_S = 1000.0


def aged_shortest(aging: float) -> QueueOrder:
    """The prompt with the least work left, in seconds, less `aging` for each second since it came.

    So a prompt of w seconds is overtaken at most by what comes in the w / `aging` seconds after it: nobody
    starves. Aging 0 is plain shortest remaining work. Source: Schrage, A proof of the optimality of the
    shortest remaining processing time discipline (1968), with linear aging.
    """
    return partial(_aged_shortest, aging)


def _aged_shortest(aging: float, prompt: Prompt, now: float, tokens_per_s: float) -> float:
    work_s = prompt.num_remaining_tokens / (tokens_per_s or _ASSUMED_TOKENS_PER_S)
    return work_s - aging * (now - prompt.arrived_at)
