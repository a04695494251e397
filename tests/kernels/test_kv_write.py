"""Norm, rotation and the writing of keys and values equal their twins and touch no other slot."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.kernels import reference
from engine.kernels.kv_write import Rotation, kv_write
from engine.kernels.paged_kv import PagedKV
from engine.model.rope import Rope
from engine.model.rope_config import RopeConfig
from tests.kernels.pages import assert_close

_BLOCKS, _BLOCK_SIZE = 6, 4


class Case:
    """A few tokens, slots for them out of order, and a pool of NaN."""

    def __init__(
        self,
        device: torch.device,
        shape: tuple[int, int, int] = (6, 2, 64),
        dtype: torch.dtype = torch.float32,
        slot_dtype: torch.dtype | None = None,
    ) -> None:
        num_heads, num_kv_heads, head_dim = shape
        generator = torch.Generator().manual_seed(head_dim)

        def draw(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator)

        self.slots = torch.tensor([7, 22, 0, 13, 6], device=device)
        num_tokens = len(self.slots)
        heads = draw(num_tokens, num_heads + 2 * num_kv_heads, head_dim).to(dtype).to(device)
        self.heads, self.num_heads, self.num_kv_heads = heads, num_heads, num_kv_heads
        angles = draw(num_tokens, head_dim // 2) * 3
        self.rotation = Rotation(
            angles.cos().to(device),
            angles.sin().to(device),
            (1 + 0.1 * draw(head_dim)).to(dtype).to(device),
            (1 + 0.1 * draw(head_dim)).to(dtype).to(device),
            1e-5,
        )
        slot_dtype = slot_dtype or dtype
        self.shape = (2, _BLOCKS, num_kv_heads, _BLOCK_SIZE, head_dim)
        self.slot_dtype = slot_dtype

    def pool(self) -> torch.Tensor:
        fill = 99.0 if self.slot_dtype == torch.int8 else torch.nan
        return torch.full(self.shape, fill, device=self.heads.device).to(self.slot_dtype)

    def run(self, twin: bool, rotation: Rotation, slots: torch.Tensor | None = None) -> list[torch.Tensor]:
        """`heads` afterwards, the pool and its scales."""
        heads, pool = self.heads.clone(), self.pool()
        scales = torch.full(self.shape[:-1], torch.nan, device=heads.device)
        q, k = heads[:, : self.num_heads], heads[:, self.num_heads : -self.num_kv_heads]
        v = heads[:, -self.num_kv_heads :]
        kv = PagedKV(*pool.unbind(0))
        if pool.dtype.itemsize == 1:
            kv = replace(kv, key_scales=scales[0], value_scales=scales[1])
        write = reference.kv_write if twin else kv_write
        write(q, k, v, kv, self.slots if slots is None else slots, rotation)
        return [heads, pool, scales]


def rotations(case: Case) -> list[Rotation]:
    full = case.rotation
    return [
        full,
        Rotation(full.cos, full.sin),
        Rotation(q_weight=full.q_weight, k_weight=full.k_weight, eps=full.eps),
        Rotation(),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(6, 2, 64), (3, 1, 80), (2, 2, 16), (5, 1, 256)], ids=str)
def test_every_combination_equals_the_twin_and_writes_only_its_slots(
    shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    case = Case(device, shape, dtype)
    for rotation in rotations(case):
        (heads, pool, _), (expected_heads, expected_pool, _) = (
            case.run(twin, rotation) for twin in (False, True)
        )
        assert_close(heads, expected_heads)
        assert torch.equal(heads[:, case.num_heads :], case.heads[:, case.num_heads :])
        assert torch.equal(pool.isnan(), expected_pool.isnan())
        assert_close(torch.nan_to_num(pool), torch.nan_to_num(expected_pool))


def test_values_are_stored_as_they_are(device: torch.device) -> None:
    case = Case(device, dtype=torch.bfloat16)
    heads, pool, _ = case.run(False, case.rotation)
    blocks, offsets = case.slots // _BLOCK_SIZE, case.slots % _BLOCK_SIZE
    assert torch.equal(pool[1, blocks, :, offsets], heads[:, -case.num_kv_heads :])


def test_a_token_without_a_slot_writes_nothing(device: torch.device) -> None:
    case = Case(device)
    slots = case.slots.clone()
    slots[1] = -1
    _, pool, _ = case.run(False, case.rotation, slots)
    _, expected, _ = case.run(True, case.rotation, slots)
    assert torch.equal(pool.isnan(), expected.isnan())
    assert int((~pool.isnan()).sum()) == 2 * 4 * case.num_kv_heads * case.shape[-1]


@pytest.mark.parametrize("slot_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_quantized_slots_keep_each_vector_to_a_step_of_its_own_scale(
    slot_dtype: torch.dtype, device: torch.device
) -> None:
    if slot_dtype == torch.float8_e4m3fn and device.type == "cpu":
        # see the next test for what can be shown without a GPU
        pytest.skip("Triton's interpreter loses the carry when it rounds to fp8")
    case = Case(device, slot_dtype=slot_dtype)
    case.heads[2, case.num_heads :] = 0.0  # a vector of zeros has no scale to divide by
    _, pool, scales = case.run(False, case.rotation)
    _, expected, expected_scales = case.run(True, case.rotation)
    assert torch.equal(scales.isnan(), expected_scales.isnan())
    assert_close(torch.nan_to_num(scales), torch.nan_to_num(expected_scales))
    written = ~scales.isnan()
    full = Case(device)
    full.heads = case.heads
    _, exact, _ = full.run(True, case.rotation)
    restored = pool.float() * scales.unsqueeze(-1)
    step = scales if slot_dtype == torch.int8 else scales * 32
    error = (restored - exact)[written].abs().amax(-1)
    assert (error <= step[written] * 0.51 + 1e-7).all()
    difference = (pool.float() - expected.float())[written].abs()
    assert difference.max() <= (1 if slot_dtype == torch.int8 else 32)  # at a rounding's border
    assert (difference > 0).float().mean() < 0.01


def test_fp8_slots_keep_what_fp8_can_hold_exactly(device: torch.device) -> None:
    case = Case(device, slot_dtype=torch.float8_e4m3fn)
    values = torch.randn(case.heads.shape, device=device).mul_(50).to(torch.float8_e4m3fn).float()
    values[..., 0] = 448.0  # the largest: each vector's scale is 1, and nothing is rounded
    case.heads = values
    _, pool, scales = case.run(False, Rotation())
    blocks, offsets = case.slots // _BLOCK_SIZE, case.slots % _BLOCK_SIZE
    assert (scales[:, blocks, :, offsets] == 1.0).all()
    assert torch.equal(pool[1, blocks, :, offsets].float(), values[:, -case.num_kv_heads :])
    first_key = values.shape[1] - 2 * case.num_kv_heads
    assert torch.equal(
        pool[0, blocks, :, offsets].float(), values[:, first_key : first_key + case.num_kv_heads]
    )


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, under the interpreter, speaks of NaN
@pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=str)
def test_a_vector_that_is_not_finite_has_a_scale_that_tells(value: float, device: torch.device) -> None:
    case = Case(device, slot_dtype=torch.int8)
    case.heads[1, case.num_heads, 5] = value
    _, _, scales = case.run(False, Rotation())
    blocks, offsets = case.slots // _BLOCK_SIZE, case.slots % _BLOCK_SIZE
    is_told = scales[:, blocks, :, offsets].isnan()  # [num_tokens, K or V, num_kv_heads]
    assert is_told[1, 0, 0]
    assert int(is_told.sum()) == 1


def test_the_rotation_is_that_of_the_model(device: torch.device) -> None:
    case = Case(device)
    positions = torch.tensor([3, 500, 0, 77, 12])
    rows = Rope(RopeConfig(), case.shape[-1], 1000).at(positions)
    rotation = Rotation(rows.cos.squeeze(1).to(device), rows.sin.squeeze(1).to(device))
    heads, pool, _ = case.run(False, rotation)
    rotated = rows.rotate(case.heads.cpu()).to(device)
    assert_close(heads[:, : case.num_heads], rotated[:, : case.num_heads])
    blocks, offsets = case.slots // _BLOCK_SIZE, case.slots % _BLOCK_SIZE
    assert_close(pool[0, blocks, :, offsets], rotated[:, case.num_heads : -case.num_kv_heads])
