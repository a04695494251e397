"""EngineConfig: the section `engine` of the configuration. Owns its defaults; values only.

How many tokens and sequences a step may have is the workers' business, and so not here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.model.names import BUNDLED_MODEL

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Which model a worker serves, and with what memory and threads.

    `model` is the bundled model's name, a checkpoint folder, or the name of a repository on the Hugging Face
    hub. KV blocks of `block_size` tokens: `num_kv_blocks` of them, or if that is 0 as many as fit: on a CPU
    `kv_cache_bytes`; on a GPU what `gpu_memory_utilization` of its memory leaves beside the weights and the
    largest step (workers that share a GPU each need a share of their own). `max_context` caps prompt and
    output of a sequence; 0 means what the model was made for, and a longer one than that is refused.
    `threads` for arithmetic; 0 means one per usable core, shared with the other workers of this host that
    compute at the same time. `decode_stretch`: while one of those reads prompts, steps that only decode begin
    that many times as far apart as they take alone, and leave it the cores in between; 1: they never wait.

    `cpu_kernels`: `native` operators, compiled at the first start, keep weights in the checkpoint's own
    precision and are several times as fast as `torch`; `auto` takes them where there is a compiler and a
    processor for them. `triton` runs the kernels of a GPU in Triton's interpreter, to check that path: it is
    thousands of times slower, needs TRITON_INTERPRET=1 in the environment and serves one worker per process.

    `share_packed_weights`: the native operators' weights are packed once into the cache folder
    (`$BATON_CACHE`), and the workers of a host map that file; otherwise each has a copy of its own.

    `dtype` is that of weights, activations and KV; 16 bits on the path of a GPU only, the CPU's operators
    compute in fp32. Logits are fp32 everywhere. `cuda_graphs`: decode steps are recorded at start and
    replayed. `overlap`: a decode worker starts a step before it has read the result of the one before, so
    that planning and handing over tokens cost the device no time; `auto` does so on the path of a GPU. On a
    CPU there is no time to hide: host and device are the same cores.
    """

    model: str = BUNDLED_MODEL
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    block_size: int = 16
    num_kv_blocks: int = 0
    kv_cache_bytes: int = _GIB
    gpu_memory_utilization: float = 0.9
    cuda_graphs: bool = True
    overlap: Literal["auto", "on", "off"] = "auto"
    max_context: int = 0
    threads: int = 0
    decode_stretch: float = 1.6
    enable_prefix_cache: bool = True
    cpu_kernels: Literal["auto", "native", "torch", "triton"] = "auto"
    share_packed_weights: bool = True

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError("block_size must be at least 1")
        if self.num_kv_blocks == 0 and self.kv_cache_bytes < 1:
            raise ValueError("num_kv_blocks or kv_cache_bytes must be above 0")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ValueError("gpu_memory_utilization must be above 0 and at most 1")
        if not self.decode_stretch >= 1.0:
            raise ValueError("decode_stretch must be at least 1")
        for name in ("num_kv_blocks", "max_context", "threads"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative")

    @property
    def is_overlapped(self) -> bool:
        """Whether a decode worker runs one step ahead of what it knows."""
        return self.uses_triton if self.overlap == "auto" else self.overlap == "on"

    @property
    def uses_triton(self) -> bool:
        """Whether the path is that of a GPU, on one or interpreted."""
        return self.device == "cuda" or self.cpu_kernels == "triton"
