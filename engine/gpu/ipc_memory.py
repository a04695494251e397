"""PoolIpcMemory: what the bridge needs of a device (its DeviceMemory, by shape), for the device of a KV pool.

Owns the copies between blocks and memory that two processes share, and their order on the device: each copy
waits for what other threads had asked of the device before, and is over when its call returns. How memory is
shared is the business of a `MemorySource`: CUDA's, or shared memory of the host where there is no GPU. Called
on the bridge's thread for the device, except `PoolCopy.write_to`: on the step thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from engine.gpu.ipc_digest import device_digest
from engine.kv.pool import KVPool


class SharedBytes(Protocol):
    """Memory of one allocation, `data` a uint8 tensor over it."""

    @property
    def data(self) -> torch.Tensor: ...

    @property
    def handle(self) -> bytes: ...

    def close(self) -> None:
        """Free or unmap it; no copy may be under way, and `data` is not used any more."""
        ...


class MemorySource(Protocol):
    """Where memory that can be shared comes from. Raises OSError when it cannot be had."""

    @property
    def device_id(self) -> str: ...

    def can_reach(self, device_id: str) -> bool: ...

    def allocate(self, num_bytes: int) -> SharedBytes: ...

    def open(self, handle: bytes, num_bytes: int) -> SharedBytes: ...


class PoolIpcMemory:
    """Blocks of `pool`, and shared memory of the same device."""

    def __init__(self, pool: KVPool, source: MemorySource) -> None:
        self._source = source
        self._work = DeviceWork(pool)

    @property
    def device_id(self) -> str:
        return self._source.device_id

    def can_reach(self, device_id: str) -> bool:
        return self._source.can_reach(device_id)

    def allocate(self, num_bytes: int) -> PoolRegion:
        return PoolRegion(self._work, self._source.allocate(num_bytes), num_bytes)

    def open(self, handle: bytes, num_bytes: int) -> PoolRegion:
        return PoolRegion(self._work, self._source.open(handle, num_bytes), num_bytes)


class DeviceWork:
    """Copies on a stream of their own, so that they run beside a step; on a CPU there is none."""

    def __init__(self, pool: KVPool) -> None:
        self.pool = pool
        self._stream: torch.cuda.Stream | None = None
        if pool.device.type == "cuda":
            self._stream = torch.cuda.Stream(pool.device)  # type: ignore[no-untyped-call]

    @contextmanager
    def alone(self) -> Iterator[None]:
        """What is asked for within begins after all that was asked of the device before, by whichever thread:
        the blocks' last writes, and their last readers. It has ended when this has.
        """
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.default_stream(self.pool.device))
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()


class PoolRegion:
    """A DeviceRegion."""

    def __init__(self, work: DeviceWork, memory: SharedBytes, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.handle = memory.handle
        self._work = work
        self._memory: SharedBytes | None = memory

    def read(self, offset: int, num_bytes: int) -> bytes:
        with self._work.alone():
            return self._part(offset, num_bytes).cpu().numpy().tobytes()

    def write(self, offset: int, data: bytes) -> None:
        with self._work.alone():
            self._part(offset, len(data)).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def put(self, offset: int, block_ids: Sequence[int], seed: int) -> int:
        with self._work.alone():
            gathered = gather(self._work.pool, block_ids)
            digest = device_digest(gathered, seed)
            self._part(offset, gathered.numel()).copy_(gathered)
        return digest

    def take(self, offset: int, num_bytes: int, seed: int) -> PoolCopy:
        with self._work.alone():
            private = self._part(offset, num_bytes).clone()
            digest = device_digest(private, seed)
        return PoolCopy(self._work.pool, private, digest)

    def close(self) -> None:
        if self._memory is not None:
            memory, self._memory = self._memory, None
            memory.close()

    def _part(self, offset: int, num_bytes: int) -> torch.Tensor:
        if self._memory is None:
            raise OSError("the memory is closed")
        if not 0 <= offset <= offset + num_bytes <= self.num_bytes:
            raise OSError(f"bytes {offset} … {offset + num_bytes} lie outside {self.num_bytes}")
        return self._memory.data[offset : offset + num_bytes]


class PoolCopy:
    """A DeviceCopy: `private` is `[num_bytes]`, uint8."""

    def __init__(self, pool: KVPool, private: torch.Tensor, digest: int) -> None:
        self.nbytes = private.numel()
        self.digest = digest
        self._pool = pool
        self._private = private

    def write_to(self, block_ids: Sequence[int]) -> None:
        """Asked of the stream of the calling thread; nobody waits for it."""
        scatter(self._pool, block_ids, self._private)
        if self._private.device.type == "cuda":
            # made on the copies' stream: not to be given to another use before this one has ended
            self._private.record_stream(torch.cuda.current_stream(self._pool.device))


def gather(pool: KVPool, block_ids: Sequence[int]) -> torch.Tensor:
    """The blocks, one payload after the other, as `KVPool.read_blocks` has them; `[num_bytes]`, uint8."""
    # [num_layers, 2, num_blocks, num_kv_heads, block_size, head_bytes]
    blocks = pool.tensor.view(torch.uint8).index_select(2, _index(pool, block_ids))
    return blocks.permute(2, 0, 1, 3, 4, 5).contiguous().reshape(-1)


def scatter(pool: KVPool, block_ids: Sequence[int], payload: torch.Tensor) -> None:
    """The inverse."""
    expected = len(block_ids) * pool.layout.block_bytes
    if payload.numel() != expected:
        raise ValueError(f"payload has {payload.numel()} bytes, {len(block_ids)} blocks have {expected}")
    target = pool.tensor.view(torch.uint8)
    shape = (len(block_ids), *target.shape[:2], *target.shape[3:])
    target.index_copy_(2, _index(pool, block_ids), payload.reshape(shape).permute(1, 2, 0, 3, 4, 5))


def _index(pool: KVPool, block_ids: Sequence[int]) -> torch.Tensor:
    return torch.tensor(block_ids, dtype=torch.int64, device=pool.device)
