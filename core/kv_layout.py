"""KVLayout: what the bytes of one KV block mean.

Two workers may exchange blocks only when their layouts are equal, or when whole blocks of one make whole
blocks of the other; `fingerprint` is part of each block's hash, `differences` names what is not equal.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, replace
from functools import cached_property

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "float8_e4m3fn": 1}


@dataclass(frozen=True)
class KVLayout:
    """Shape, type and origin of a block.

    A block's payload is `[num_layers, 2 (K, V), num_kv_heads, block_size, head_dim]` of `dtype`, row-major,
    little-endian: heads are contiguous slices of a layer (tensor parallelism), layers are contiguous slices
    of the payload (pipeline stages). `scales` names how quantized values are scaled (`none` for floating
    point). `model` is the digest of the checkpoint's semantics.
    """

    model: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str = "float32"
    scales: str = "none"

    def __hash__(self) -> int:
        """Of the name, which is known already: layouts are looked up for each worker at each placement."""
        return hash(self.fingerprint)

    @cached_property
    def fingerprint(self) -> str:
        """A short stable name of this layout."""
        text = "|".join(f"{key}={value}" for key, value in sorted(asdict(self).items()))
        return hashlib.blake2b(text.encode(), digest_size=8, person=b"baton-layout").hexdigest()

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        return (self.num_layers, 2, self.num_kv_heads, self.block_size, self.head_dim)

    @property
    def block_bytes(self) -> int:
        """Payload bytes of one block."""
        return self.bytes_per_token * self.block_size

    @property
    def bytes_per_token(self) -> int:
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def can_become(self, other: KVLayout) -> bool:
        """Whether blocks can be handed over as `other`'s: only their size differs, by whole blocks."""
        if self == other:
            return True
        small, large = sorted((self.block_size, other.block_size))
        return large % small == 0 and replace(self, block_size=other.block_size) == other

    def differences(self, other: KVLayout) -> list[str]:
        """Each field that differs as `name: ours vs theirs`; empty when blocks may be exchanged."""
        mine, theirs = asdict(self), asdict(other)
        return [f"{key}: {mine[key]} vs {theirs[key]}" for key in mine if mine[key] != theirs[key]]
