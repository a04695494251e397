"""A cheap name for the bytes of a checkpoint's weights.

Two folders with equal configurations can still hold different weights (a fine-tune of the same base); KV made
with one must never be attended to with the other. Hashing gigabytes at each start is too slow, so sizes and
evenly spread samples are hashed: it tells checkpoints apart, it does not detect a flipped bit. Used at start,
from any thread.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

_NUM_SAMPLES = 64
_SAMPLE_BYTES = 4096


def weights_fingerprint(path: Path) -> str:
    """16 hex digits over the size, the head and 64 spread samples of each weight file of the folder."""
    digest = hashlib.sha256()
    for file in sorted(path.glob("model*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name}:{size};".encode())
        step = max(_SAMPLE_BYTES, size // _NUM_SAMPLES)
        with file.open("rb") as stream:
            for offset in range(0, size, step):
                stream.seek(offset)
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]
