"""Rotary position embedding: the tables and their application.

Owns the arithmetic of the kinds in `rope_config.py`. Source: Su et al., RoFormer (arXiv 2104.09864); linear
scaling: Chen et al., Position Interpolation (arXiv 2306.15595); `llama3`: Llama 3.1's published frequency
rescaling. Everything is fp32, computed as transformers does it. Called on the step thread; the tables are
immutable.
"""

from __future__ import annotations

import math

import torch

from engine.model.rope_config import RopeConfig


class Rope:
    """Cosine and sine of each position up to `num_positions`; `[num_positions, head_dim / 2]` each."""

    def __init__(
        self, config: RopeConfig, head_dim: int, num_positions: int, device: torch.device | str = "cpu"
    ) -> None:
        frequencies = inverse_frequencies(config, head_dim)
        angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies
        # Made on the CPU wherever they are used, so that all devices rotate by the same numbers.
        self._cos = angles.cos().to(device)
        self._sin = angles.sin().to(device)

    def at(self, positions: torch.Tensor) -> RopeRows:
        """The rows for `positions [num_tokens]`, gathered once per step for all layers."""
        return RopeRows(self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1))


class RopeRows:
    """The rotation of one step's tokens."""

    def __init__(self, cos: torch.Tensor, sin: torch.Tensor) -> None:
        self.cos = cos  # [num_tokens, 1, head_dim / 2]
        self.sin = sin

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """Rotate `x [num_tokens, num_heads, head_dim]`; dimension i is paired with i + head_dim / 2."""
        half = x.shape[-1] // 2
        first, second = x[..., :half], x[..., half:]
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        torch.mul(first, self.cos, out=out[..., :half]).addcmul_(second, self.sin, value=-1.0)
        torch.mul(second, self.cos, out=out[..., half:]).addcmul_(first, self.sin)
        return out


def inverse_frequencies(config: RopeConfig, head_dim: int) -> torch.Tensor:
    """Radians per position of each pair of dimensions: fp32 `[head_dim / 2]`."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (config.theta**exponents)
    if config.kind == "linear":
        return frequencies / config.factor
    if config.kind == "llama3":
        return _llama3(config, frequencies)
    assert config.kind == "default", config.kind
    return frequencies


def _llama3(config: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    """Long waves are slowed by `factor`, short ones kept, those between blended by frequency."""
    original = config.original_max_positions
    wavelengths = 2 * math.pi / frequencies
    span = config.high_freq_factor - config.low_freq_factor
    blend = (original / wavelengths - config.low_freq_factor) / span
    slowed = frequencies / config.factor
    blended = (1 - blend) * slowed + blend * frequencies
    is_long = wavelengths > original / config.low_freq_factor
    is_short = wavelengths < original / config.high_freq_factor
    return torch.where(is_long, slowed, torch.where(is_short, frequencies, blended))
