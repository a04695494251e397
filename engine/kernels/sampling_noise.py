"""The noise of `engine.sampling.noise` inside a kernel: the same 32-bit hash, bit for bit.

Owns the device functions. `log_exponential` is the definition, in float64; `log_exponential_fast` is a
float32 estimate within `FAST_ERROR`, good enough to tell which few tokens can win at all. The twin is
`engine.sampling.noise.log_exponential`.
"""

from __future__ import annotations

import triton.language as tl

from engine.kernels.jit import inlined
from engine.kernels.sampling_table import KEY, POSITION

FAST_ERROR = 1e-4

_STEP = tl.constexpr(0x9E3779B9)
_SIGN = tl.constexpr(0x80000000)
_ALL = tl.constexpr(0xFFFFFFFF)
_UNIT = tl.constexpr(2.0**-32)


@inlined
def _mixed(x: tl.tensor, added: tl.tensor) -> tl.tensor:
    """The steps of mix, with `added` after the second multiplication."""
    x ^= x >> 17
    x *= 0xED5AD4BB
    x ^= x >> 11
    x = x * 0xAC4C1B51 + added
    x ^= x >> 15
    x *= 0x31848BAB
    return x ^ (x >> 14)


@inlined
def token_hash(ids: tl.tensor, words: tl.pointer_type) -> tl.tensor:
    """h of each token id for the row whose words are at `words`: uint32."""
    position = tl.load(words + POSITION).to(tl.uint32, bitcast=True)
    none = tl.full((), 0, tl.uint32)
    key_0 = _mixed((tl.load(words + KEY).to(tl.uint32, bitcast=True) + _STEP) ^ position, none)
    key_1 = _mixed((tl.load(words + KEY + 1).to(tl.uint32, bitcast=True) + _STEP) ^ position, none)
    return _mixed(ids.to(tl.uint32) ^ key_0, key_1)


@inlined
def log_exponential(h: tl.tensor) -> tl.tensor:
    """log E of the hash h: float32. 1 - u is exact in float64, so its logarithm is log1p(-u)."""
    rest = ((h ^ _SIGN ^ _ALL).to(tl.float64) + 0.5) * _UNIT
    return tl.log(-tl.log(rest)).to(tl.float32)


@inlined
def log_exponential_fast(h: tl.tensor) -> tl.tensor:
    """log E of the hash h, estimated in float32.

    u and 1 - u are each formed from integers, so that both ends keep their relative precision; where u is
    small, the logarithm is its series: 1 - u is rounded, and a device's logarithm need not be precise near 1.
    """
    u = ((h ^ _SIGN).to(tl.float32) + 0.5) * _UNIT
    rest = ((h ^ _SIGN ^ _ALL).to(tl.float32) + 0.5) * _UNIT
    series = u * (1.0 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5 + u * (1 / 6))))))
    return tl.log(tl.where(u < 1 / 16, series, -tl.log(rest)))
