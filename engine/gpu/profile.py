"""The largest step of a worker, run once before there is a pool, to see how much memory it takes.

Owns the plan of that step: every place taken, every sampling option on, contexts of full length. It reads and
writes a pool of one block, which all its tables name. Used at start, on the loading thread.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from core.ids import RequestId
from core.kv_layout import KVLayout
from core.request import Request, SamplingParams
from engine.memory import DeviceMemory
from engine.sequence import Sequence, new_sequence
from engine.step import ScheduledSequence, StepLimits, StepPlan

_DEMANDING = SamplingParams(
    max_tokens=2,
    seed=0,
    temperature=1.0,
    top_p=0.9,
    top_k=50,
    repetition_penalty=1.1,
    frequency_penalty=0.1,
    logprobs=20,
)


def measured_memory(
    device: torch.device,
    weight_bytes: int,
    layout: KVLayout,
    limits: StepLimits,
    max_context: int,
    run: Callable[[StepPlan], object],
) -> DeviceMemory:
    """Run the largest step and the largest decode step, which recorded steps keep memory for, with `run`.

    Only on a GPU: a CPU has no such account.
    """
    peak = 0
    for plan in (largest_step(layout, limits, max_context), largest_decode(layout, limits, max_context)):
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run(plan)
        torch.cuda.synchronize(device)
        peak += torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return DeviceMemory(total, free, weight_bytes, peak)


def largest_step(layout: KVLayout, limits: StepLimits, max_context: int) -> StepPlan:
    """As many decodes as run beside a prefill, and prefills with the rest of the tokens."""
    items = list(largest_decode(layout, limits, max_context).chunks)[:-1]
    num_left = limits.max_tokens - len(items)
    while num_left > 0:
        num_new = min(num_left, max_context - 1)
        items.append(_item(layout, num_new, num_new))
        num_left -= num_new
    return StepPlan(tuple(items))


def largest_decode(layout: KVLayout, limits: StepLimits, max_context: int) -> StepPlan:
    """A token of each of as many sequences as may run, all at the end of the context."""
    item = _item(layout, max_context - 1, 1)
    return StepPlan((item,) * min(limits.max_sequences, limits.max_tokens))


def _item(layout: KVLayout, num_tokens: int, num_new: int) -> ScheduledSequence:
    request = Request(RequestId("profile"), (0,) * num_tokens, _DEMANDING)
    sequence: Sequence = new_sequence(request, 0, (), num_tokens + 1)
    sequence.num_computed_tokens = num_tokens - num_new
    sequence.block_table = [0] * layout.num_blocks(num_tokens)
    return ScheduledSequence(sequence, num_new)
