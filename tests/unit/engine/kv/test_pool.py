"""The pool's blocks as bytes."""

from __future__ import annotations

import pytest
import torch

from core.errors import InvalidConfig
from core.kv_layout import KVLayout
from engine.kv.pool import KVPool


def layout(dtype: str = "float32") -> KVLayout:
    return KVLayout("m", num_layers=3, num_kv_heads=2, head_dim=5, block_size=4, dtype=dtype)


def filled(dtype: str = "float32") -> KVPool:
    pool = KVPool(layout(dtype), 6)
    pool.tensor.copy_(torch.randn(pool.tensor.shape, generator=torch.Generator().manual_seed(1)))
    return pool


def test_a_payload_is_the_blocks_in_order_each_in_the_layouts_shape() -> None:
    pool = filled()
    payload = pool.read_blocks([4, 1])
    assert payload.nbytes == 2 * pool.layout.block_bytes
    blocks = torch.frombuffer(bytearray(payload), dtype=torch.float32).view(2, *pool.layout.block_shape)
    assert torch.equal(blocks[0], pool.tensor[:, :, 4])
    assert torch.equal(blocks[1], pool.tensor[:, :, 1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("offset", [0, 1])
def test_blocks_survive_the_way_into_another_pool_bit_for_bit(dtype: str, offset: int) -> None:
    source, target = filled(dtype), KVPool(layout(dtype), 9)
    data = b"\0" * offset + bytes(source.read_blocks([5, 0]))
    target.write_blocks([7, 2], memoryview(data)[offset:])  # read-only, perhaps not aligned
    assert torch.equal(target.tensor[:, :, 7], source.tensor[:, :, 5])
    assert torch.equal(target.tensor[:, :, 2], source.tensor[:, :, 0])
    others = [block_id for block_id in range(9) if block_id not in (7, 2)]
    assert not target.tensor[:, :, others].any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_read_into_foreign_memory_are_the_payload_and_nothing_beside_it_changes(dtype: str) -> None:
    pool = filled(dtype)
    size = 3 * pool.layout.block_bytes
    memory = bytearray(b"\xaa" * (size + 7))
    pool.read_blocks_into([5, 0, 2], memoryview(memory)[3 : 3 + size])
    assert memory[3 : 3 + size] == pool.read_blocks([5, 0, 2])
    assert memory[:3] == b"\xaa" * 3
    assert memory[3 + size :] == b"\xaa" * 4
    with pytest.raises(ValueError):
        pool.read_blocks_into([1], memoryview(memory)[:5])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_observer_sees_what_the_blocks_hold_in_the_payloads_order(dtype: str) -> None:
    source, target = filled(dtype), KVPool(layout(dtype), 9)
    payload = bytes(source.read_blocks([5, 0]))
    seen = bytearray()
    target.write_blocks([7, 2], payload, seen.extend)
    assert seen == payload == target.read_blocks([7, 2])


def test_an_observer_sees_what_is_written_and_not_a_payload_that_changes_meanwhile() -> None:
    source, target = filled(), KVPool(layout(), 9)
    payload = bytearray(source.read_blocks([5, 0]))
    seen = bytearray()

    def observe(piece: memoryview) -> None:
        before = bytes(piece)
        payload[:] = bytes(len(payload))  # all of it, the piece that is observed now included
        assert piece == before
        seen.extend(piece)

    target.write_blocks([7, 2], payload, observe)
    assert seen == target.read_blocks([7, 2])
    assert seen[: len(seen) // 2] == source.read_blocks([5]), "the first piece was copied before the change"
    assert not any(seen[len(seen) // 2 :]), "the change was not seen"


@pytest.mark.parametrize("num_rows", [1, 4, 6])
def test_blocks_larger_than_the_private_memory_are_observed_and_written_piece_by_piece(
    num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = filled(), KVPool(layout(), 9)
    monkeypatch.setattr("engine.kv.pool._PRIVATE_BYTES", num_rows * 2 * 4 * 5 * 4)
    seen = bytearray()
    target.write_blocks([7, 2], source.read_blocks([5, 0]), seen.extend)
    assert seen == target.read_blocks([7, 2]) == source.read_blocks([5, 0])


def test_what_was_read_does_not_change_with_the_pool() -> None:
    pool = filled()
    payload = pool.read_blocks([3])
    before = bytes(payload)
    pool.tensor.zero_()
    assert bytes(payload) == before


def test_a_payload_of_the_wrong_length_is_refused_and_writes_nothing() -> None:
    pool = KVPool(layout(), 4)
    with pytest.raises(ValueError):
        pool.write_blocks([1, 2], b"\1" * (2 * pool.layout.block_bytes - 1))
    assert not pool.tensor.any()


def test_no_blocks_are_no_bytes() -> None:
    pool = filled()
    assert bytes(pool.read_blocks([])) == b""
    pool.write_blocks([], b"")
    pool.copy_blocks([])


def test_copies_read_all_sources_before_they_write() -> None:
    pool = filled()
    before = pool.tensor.clone()
    pool.copy_blocks([(0, 1), (1, 2)])
    assert torch.equal(pool.tensor[:, :, 1], before[:, :, 0])
    assert torch.equal(pool.tensor[:, :, 2], before[:, :, 1])
    assert torch.equal(pool.tensor[:, :, [0, 3, 4, 5]], before[:, :, [0, 3, 4, 5]])


@pytest.mark.parametrize("num_blocks", [1 << 45, 1 << 60])
def test_a_pool_that_no_memory_holds_is_refused_by_the_setting(num_blocks: int) -> None:
    with pytest.raises(InvalidConfig, match=r"no memory for .* lower engine\.kv_cache_bytes"):
        KVPool(layout(), num_blocks)
