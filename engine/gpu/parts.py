"""What a runner on Triton kernels is made of, and how many KV blocks it has.

Owns the choice of its parts. Used at start, on the loading thread.
"""

from __future__ import annotations

from functools import partial

from engine.config import EngineConfig
from engine.cuda_graphs import CallRecorder, DecodeGraphs, GraphRecorder
from engine.gpu.executor import TritonExecutor
from engine.gpu.sampler import DeviceSampler
from engine.kernels.attention import TritonPagedAttention
from engine.kv.pool import KVPool
from engine.loaded_model import LoadedModel
from engine.step import StepLimits


def triton_parts(
    loaded: LoadedModel, config: EngineConfig, pool: KVPool, limits: StepLimits
) -> tuple[TritonExecutor, DeviceSampler]:
    """Executor and sampler over `pool`."""
    model, device = loaded.transformer, loaded.device
    attention = TritonPagedAttention(pool.tensor, loaded.config.num_heads)
    graphs = None
    if config.cuda_graphs and limits.is_decoding:
        graphs = partial(
            DecodeGraphs,
            model,
            attention,
            max_sequences=min(limits.max_sequences, limits.max_tokens),
            max_context=loaded.max_context,
            recorder=GraphRecorder(device) if device.type == "cuda" else CallRecorder(),
            device=device,
        )
    return TritonExecutor(model, attention, limits, device, graphs), DeviceSampler(device)
