"""How many KV blocks fit a GPU: arithmetic over what was measured. Owns the rule. Pure; any thread."""

from __future__ import annotations

from dataclasses import dataclass

from core.errors import InvalidConfig


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of a GPU, seen when the weights are loaded and there is no pool yet.

    `free` is what nobody has taken. `weights` are this worker's, shared ones counted. `step` is what its
    largest step takes beside weights and pool, recorded steps included.
    """

    total: int
    free: int
    weights: int
    step: int


def num_fitting_blocks(memory: DeviceMemory, utilization: float, block_bytes: int) -> int:
    """Blocks of `block_bytes` for a worker that may take `utilization` of the memory, but only what is free.

    Raises InvalidConfig, with all the sizes, if that is none.
    """
    share = int(memory.total * utilization) - memory.weights
    room = min(share, memory.free) - memory.step
    num_blocks = room // block_bytes
    if num_blocks < 1:
        raise InvalidConfig(
            f"no KV block of {block_bytes} bytes fits the GPU: this worker may take {utilization:.0%} of "
            f"{_gib(memory.total)} GiB, its weights take {_gib(memory.weights)} GiB, its largest step "
            f"{_gib(memory.step)} GiB, and {_gib(memory.free)} GiB are free",
            key="engine.gpu_memory_utilization",
        )
    return num_blocks


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f}"
