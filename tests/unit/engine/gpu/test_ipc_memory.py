"""The copies between blocks and shared memory, on the CPU: the same code that runs on a GPU."""

from __future__ import annotations

import pytest
import torch

from core.kv_layout import KVLayout
from engine.gpu.ipc_cuda import share_pool
from engine.gpu.ipc_digest import device_digest
from engine.gpu.ipc_host import HostIpcSource
from engine.gpu.ipc_memory import PoolIpcMemory
from engine.kv.pool import KVPool

LAYOUTS = [
    KVLayout("toy", num_layers=2, num_kv_heads=3, head_dim=4, block_size=4),
    KVLayout("toy", num_layers=3, num_kv_heads=1, head_dim=8, block_size=2, dtype="bfloat16"),
    KVLayout("toy", num_layers=1, num_kv_heads=1, head_dim=3, block_size=1, dtype="int8"),
]


def filled(layout: KVLayout, seed: int) -> KVPool:
    pool = KVPool(layout, 10)
    pool.tensor.view(torch.uint8).random_(0, 256, generator=torch.Generator().manual_seed(seed))
    return pool


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.dtype)
def test_blocks_go_from_one_pool_to_another_and_nothing_else_changes(layout: KVLayout) -> None:
    source, target = filled(layout, 1), filled(layout, 2)
    before = target.tensor.clone()
    ends = [PoolIpcMemory(pool, HostIpcSource()) for pool in (source, target)]
    size = 3 * layout.block_bytes
    memory = ends[1].allocate(100 + size)
    opened = ends[0].open(memory.handle, 100 + size)
    digest = opened.put(100, [7, 0, 4], 5)
    payload = source.read_blocks([7, 0, 4])
    assert memory.read(100, size) == bytes(payload)
    assert digest == device_digest(torch.frombuffer(bytearray(payload), dtype=torch.uint8), 5)
    copy = memory.take(100, size, 5)
    assert (copy.digest, copy.nbytes) == (digest, size)
    opened.write(100, bytes(size))  # a writer that goes on does not reach the copy
    copy.write_to([1, 9, 3])
    assert bytes(target.read_blocks([1, 9, 3])) == bytes(payload)
    others = [index for index in range(10) if index not in (1, 9, 3)]
    assert torch.equal(target.tensor[:, :, others].view(torch.uint8), before[:, :, others].view(torch.uint8))
    with pytest.raises(ValueError, match="payload"):
        copy.write_to([1, 2])
    opened.close()
    memory.close()


def test_damage_in_the_shared_memory_is_in_the_copys_digest() -> None:
    pool = filled(LAYOUTS[0], 1)
    end = PoolIpcMemory(pool, HostIpcSource())
    memory = end.allocate(pool.layout.block_bytes)
    digest = memory.put(0, [3], 1)
    memory.write(17, bytes([memory.read(17, 1)[0] ^ 32]))
    assert memory.take(0, pool.layout.block_bytes, 1).digest != digest
    memory.close()


def test_nothing_is_copied_from_or_to_memory_that_is_closed_or_outside_it() -> None:
    pool = filled(LAYOUTS[0], 1)
    end, size = PoolIpcMemory(pool, HostIpcSource()), pool.layout.block_bytes
    memory = end.allocate(size)
    for offset in (1, -1, size):
        with pytest.raises(OSError, match="outside"):
            memory.put(offset, [0], 1)
    memory.close()
    memory.close()
    for call in (lambda: memory.put(0, [0], 1), lambda: memory.take(0, size, 1), lambda: memory.read(0, 1)):
        with pytest.raises(OSError, match="closed"):
            call()
    with pytest.raises(OSError, match="handle"):
        end.open(b"nothing", size)


def test_a_pool_on_a_cpu_has_no_device_to_share() -> None:
    assert share_pool(filled(LAYOUTS[0], 1)) is None
