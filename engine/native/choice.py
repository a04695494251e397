"""Whether the engine runs on native operators: decided once at start. Owns the rule. Used on any thread."""

from __future__ import annotations

import logging

from core.errors import InvalidConfig
from engine.config import EngineConfig
from engine.model.config import ModelConfig
from engine.native.build import NativeUnavailable
from engine.native.operators import HEAD_DIM_MULTIPLE, NativeOps, load_ops

_log = logging.getLogger(__name__)


def choose_ops(config: EngineConfig, model: ModelConfig) -> NativeOps | None:
    """The native operators, or None for torch's.

    Raises InvalidConfig when `config` insists on native ones and they cannot be had, and for a precision that
    no operators of a CPU compute in.
    """
    if config.uses_triton:
        return None
    if config.dtype != "float32":
        raise InvalidConfig(
            f"dtype {config.dtype} needs device cuda: the CPU's operators ({config.cpu_kernels}) keep KV and "
            "activations in float32",
            key="engine.dtype",
        )
    if config.cpu_kernels == "torch":
        return None
    try:
        if model.head_dim % HEAD_DIM_MULTIPLE:
            raise NativeUnavailable(
                f"the model's head size {model.head_dim} is no multiple of {HEAD_DIM_MULTIPLE}"
            )
        return load_ops()
    except NativeUnavailable as error:
        if config.cpu_kernels == "native":
            raise InvalidConfig(
                f"there are no native CPU operators: {error}", key="engine.cpu_kernels"
            ) from error
        _log.warning("the CPU runs on torch's operators, which are slower than the native ones: %s", error)
        return None
