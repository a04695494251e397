"""Taper: how much of a prompt that is handed over one step computes.

The blocks of a step travel while the next one computes; those of the last step travel while nothing does,
and the second token waits for them. So the last step of a long prompt is a small one. Pure; no sequences, no
time.
"""

from __future__ import annotations

_LAST_SHARE = 8
"""The last step is this part of a whole one: just long enough to hide the push of the step before it. 64
tokens of a small model on two cores take 40 ms, the push 10 to 30; they cost one more pass over the weights.
"""


def num_tapered_tokens(num_left: int, token_budget: int) -> int:
    """How many of a prompt's `num_left` tokens its next step computes, `token_budget` at most; what would be
    its last step leaves a small part to one of its own, unless it is no more than half a step itself.
    """
    if num_left > token_budget:
        return token_budget
    return num_left - token_budget // _LAST_SHARE if num_left > token_budget // 2 else num_left
