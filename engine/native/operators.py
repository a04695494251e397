"""The operators of `ops.cpp` on tensors.

Owns the C interface: checks shapes and types, passes pointers. Each operator has a twin of the same
signature in `reference.py`. The calls release the interpreter and may come from any thread; they use as many
threads as torch has in the calling one.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from engine.cores import Division
from engine.native.build import NativeUnavailable, build_library
from engine.native.packing import PackedWeight
from engine.native.plan import AttentionPlan

ISA_VARIABLE = "BATON_CPU_ISA"
"""`avx2` or `avx512` in the environment overrides the best one that the processor has."""

HEAD_DIM_MULTIPLE = 16
"""What attention asks of `head_dim`."""

_WIDTHS = {"avx2": 256, "avx512": 512}

_INT, _LONG, _FLOAT, _POINTER = ctypes.c_int, ctypes.c_long, ctypes.c_float, ctypes.c_void_p
_SIGNATURES = {
    "baton_linear": "iiiPlPPPilll",
    "baton_attention": "iiPlPPPPlPlPlllll",
    "baton_rotate_store": "iiPPPPPPPlllll",
    "baton_layers": "iP",
    "baton_rms_norm": "iiPPfPll",
    "baton_swiglu": "iiPPll",
    "baton_divide": "lllP",
}
_TYPES = {"i": _INT, "l": _LONG, "f": _FLOAT, "P": _POINTER}


class MatrixFields(ctypes.Structure):
    """`Matrix` of `ops.cpp`."""

    _fields_ = (
        *((name, _POINTER) for name in ("data", "bias")),
        *((name, ctypes.c_int64) for name in ("kind", "num_out", "num_in")),
    )


class LayerFields(ctypes.Structure):
    """`Layer` of `ops.cpp`."""

    _fields_ = (
        *((name, _POINTER) for name in ("input_norm", "q_norm", "k_norm", "post_norm")),
        *((name, MatrixFields) for name in ("qkv", "output", "gate_up", "down")),
    )


_PASS_POINTERS = (
    *("layers", "hidden", "cos", "sin", "pool", "tables", "items", "groups", "blocks", "offsets"),
    *("normed", "heads", "mixed", "gate_up", "gated"),
)
_PASS_COUNTS = (
    *("num_layers", "num_tokens", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "num_blocks"),
    *("block_size", "max_blocks", "num_items", "num_groups", "threads"),
)


class PassFields(ctypes.Structure):
    """`Pass` of `ops.cpp`."""

    _fields_ = (
        *((name, _POINTER) for name in _PASS_POINTERS),
        *((name, ctypes.c_int64) for name in _PASS_COUNTS),
        ("eps", ctypes.c_double),
    )


class NativeOps:
    """The operators for one instruction set, `avx2` or `avx512`."""

    def __init__(self, path: Path, isa: str) -> None:
        library = ctypes.CDLL(str(path))
        self.isa = isa
        self._wide = int(isa == "avx512")
        functions = {name: _function(library, name, types) for name, types in _SIGNATURES.items()}
        self._linear = functions["baton_linear"]
        self._attention = functions["baton_attention"]
        self._rotate_store = functions["baton_rotate_store"]
        self._layers = functions["baton_layers"]
        self._rms_norm = functions["baton_rms_norm"]
        self._swiglu = functions["baton_swiglu"]
        self._divide = functions["baton_divide"]

    @contextmanager
    def divided(self, division: Division) -> Iterator[None]:
        """While the body runs, this thread's operators use as many cores as the division leaves them at each
        moment; else as many threads as torch has.
        """
        self._divide(division.num_cores, division.rank, len(division.addresses), division.addresses)
        try:
            yield
        finally:
            self._divide(0, 0, 0, None)

    def linear(
        self,
        x: torch.Tensor,
        weight: PackedWeight,
        bias: torch.Tensor | None = None,
        added_to: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`x [num_rows, num_in]` times the weight, plus `bias`, fp32; or added to `added_to` in place."""
        x = _rows(x)
        num_rows = x.shape[0]
        assert x.shape[1] == weight.num_in
        out = torch.empty(num_rows, weight.num_out) if added_to is None else added_to
        assert out.shape == (num_rows, weight.num_out)
        assert _are_plain(out, *(() if bias is None else (bias,)))
        self._linear(
            self._wide,
            torch.get_num_threads(),
            int(weight.kind),
            x.data_ptr(),
            x.stride(0),
            weight.data.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            int(added_to is not None),
            num_rows,
            weight.num_out,
            weight.num_in,
        )
        return out

    def attention(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: AttentionPlan
    ) -> torch.Tensor:
        """Causal attention of `q [num_tokens, num_heads, head_dim]` over one layer's blocks.

        `keys` and `values` are `[num_blocks, num_kv_heads, block_size, head_dim]` and hold the new tokens
        already. Slots beyond a sequence are not read into the result. Returns a contiguous `q`-shaped tensor.
        """
        num_tokens, num_heads, head_dim = q.shape
        _, num_kv_heads, block_size, _ = keys.shape
        assert q.dtype == torch.float32
        assert q.stride()[1:] == (head_dim, 1)
        assert head_dim % HEAD_DIM_MULTIPLE == 0
        assert _are_plain(keys, values)
        out = torch.empty(num_tokens, num_heads, head_dim)
        self._attention(
            self._wide,
            torch.get_num_threads(),
            q.data_ptr(),
            q.stride(0),
            out.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            plan.tables.ctypes.data,
            plan.tables.shape[1],
            plan.items.ctypes.data,
            len(plan.items),
            plan.groups.ctypes.data,
            len(plan.groups),
            num_heads,
            num_kv_heads,
            head_dim,
            block_size,
        )
        return out

    def rotate_store(
        self,
        heads: torch.Tensor,
        num_heads: int,
        cos: torch.Tensor,
        sin: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        plan: AttentionPlan,
    ) -> None:
        """Rotate q and k of `heads [num_tokens, num_heads + 2 num_kv_heads, head_dim]` in place, store k, v.

        `cos` and `sin` are `[num_tokens, head_dim / 2]`, the pool as in `attention`.
        """
        num_tokens, _, head_dim = heads.shape
        _, num_kv_heads, block_size, _ = keys.shape
        assert _are_plain(heads, cos, sin, keys, values)
        assert heads.shape[1] == num_heads + 2 * num_kv_heads
        assert cos.numel() == sin.numel() == num_tokens * head_dim // 2
        self._rotate_store(
            self._wide,
            torch.get_num_threads(),
            heads.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            plan.token_blocks.ctypes.data,
            plan.token_offsets.ctypes.data,
            num_tokens,
            num_heads,
            num_kv_heads,
            head_dim,
            block_size,
        )

    def layers(self, fields: PassFields, tensors: tuple[torch.Tensor, ...]) -> None:
        """All layers over a step's tokens; `tensors` are those that `fields` points to, to be checked."""
        assert _are_plain(*tensors)
        self._layers(self._wide, ctypes.addressof(fields))

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """`x [num_rows, size]` normalised by its root mean square, times `weight [size]`."""
        assert _are_plain(x, weight)
        out = torch.empty_like(x)
        self._rms_norm(
            self._wide,
            torch.get_num_threads(),
            x.data_ptr(),
            weight.data_ptr(),
            eps,
            out.data_ptr(),
            x.shape[0],
            x.shape[1],
        )
        return out

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        """`silu(gate) * up` of `[num_rows, 2 size]`, gate first; `[num_rows, size]`."""
        assert _are_plain(gate_up)
        num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty(num_rows, size)
        self._swiglu(self._wide, torch.get_num_threads(), gate_up.data_ptr(), out.data_ptr(), num_rows, size)
        return out


def load_ops() -> NativeOps:
    """The operators for the best instruction set here, or the one that the environment names.

    Raises NativeUnavailable.
    """
    path = build_library()
    best = _best_width(path)
    asked = os.environ.get(ISA_VARIABLE, "")
    if asked and asked not in _WIDTHS:
        raise NativeUnavailable(f"{ISA_VARIABLE} is {asked!r}; it may be {' or '.join(_WIDTHS)}")
    if best < _WIDTHS[asked or "avx2"]:
        raise NativeUnavailable(f"this processor lacks {'AVX-512' if asked == 'avx512' else 'AVX2'}")
    return NativeOps(path, asked or ("avx512" if best == 512 else "avx2"))


def _best_width(path: Path) -> int:
    try:
        return int(ctypes.CDLL(str(path)).baton_best_isa())
    except OSError as error:
        raise NativeUnavailable(f"{path} cannot be loaded: {error}") from error


def _function(library: ctypes.CDLL, name: str, types: str) -> Any:
    function = getattr(library, name)
    function.argtypes = [_TYPES[letter] for letter in types]
    function.restype = None
    return function


def _rows(x: torch.Tensor) -> torch.Tensor:
    assert x.dtype == torch.float32
    return x if x.stride(-1) == 1 else x.contiguous()


def _are_plain(*tensors: torch.Tensor) -> bool:
    return all(tensor.is_contiguous() and tensor.dtype == torch.float32 for tensor in tensors)
