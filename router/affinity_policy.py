"""The prefix policy: to the worker that holds the longest prefix of the prompt, whatever its load.

For comparison with the cost policy. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.decision import Candidate, Draw
from router.load_policies import pick_least_loaded


def pick_longest_prefix(candidates: Sequence[Candidate], draw: Draw) -> Candidate:
    """The one with the most cached tokens, among equals the least loaded."""
    longest = max(worker.num_cached_tokens for worker in candidates)
    return pick_least_loaded([worker for worker in candidates if worker.num_cached_tokens == longest], draw)
