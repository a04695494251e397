"""Native products equal their twin, and a row's result depends on nothing but the row."""

from __future__ import annotations

import pytest
import torch

from engine.native.build import NativeUnavailable
from engine.native.operators import ISA_VARIABLE, NativeOps, load_ops
from engine.native.packing import PackedWeight, QuantizedWeight, WeightKind, pack_blocks, pack_dense
from engine.native.reference import ReferenceOps, unpack

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_KINDS = [*_DTYPES, "q4_1", "q8_0"]
_ROWS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 16, 25, 33, 64, 241, 257]


def quantized(kind: str, num_out: int, num_in: int, generator: torch.Generator) -> QuantizedWeight:
    shape = (num_out, num_in // 32)
    scale = (torch.rand(shape, generator=generator) * 0.1).half()
    if kind == "q8_0":
        q = torch.randint(-128, 128, (*shape, 32), generator=generator, dtype=torch.int8)
        return QuantizedWeight(q, scale, None)
    q = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
    return QuantizedWeight(q, scale, torch.randn(shape, generator=generator).half())


def packed(kind: str, num_out: int, num_in: int, seed: int = 0) -> tuple[PackedWeight, torch.Tensor]:
    """A random weight and the values it stands for."""
    generator = torch.Generator().manual_seed(seed)
    if kind in _DTYPES:
        weight = torch.randn(num_out, num_in, generator=generator).to(_DTYPES[kind])
        return pack_dense(weight), weight.float()
    blocks = quantized(kind, num_out, num_in, generator)
    return pack_blocks(blocks), blocks.dequantized()


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.shape == expected.shape
    assert float((actual - expected).abs().max()) <= 1e-5 * float(expected.abs().max())


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("num_out", [1, 31, 32, 33, 96])
def test_packing_loses_nothing(kind: str, num_out: int) -> None:
    weight, values = packed(kind, num_out, 64)
    assert torch.equal(unpack(weight), values)


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize(("num_out", "num_in"), [(96, 64), (100, 576), (31, 1600), (320, 32)])
def test_products_equal_the_twin(ops: NativeOps, kind: str, num_out: int, num_in: int) -> None:
    weight, _ = packed(kind, num_out, num_in)
    bias = torch.randn(num_out)
    for num_rows in _ROWS:
        x = torch.randn(num_rows, num_in)
        assert_close(ops.linear(x, weight), ReferenceOps().linear(x, weight))
        assert_close(ops.linear(x, weight, bias), ReferenceOps().linear(x, weight, bias))
        sums = torch.randn(num_rows, num_out)
        expected = ReferenceOps().linear(x, weight, bias, added_to=sums.clone())
        assert_close(ops.linear(x, weight, bias, added_to=sums), expected)


@pytest.mark.parametrize("kind", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("num_in", [1, 7, 33, 100, 801])
def test_any_number_of_inputs_is_right(ops: NativeOps, kind: str, num_in: int) -> None:
    weight, _ = packed(kind, 40, num_in)
    for num_rows in (1, 5, 9, 30, 260):
        x = torch.randn(num_rows, num_in)
        assert_close(ops.linear(x, weight), ReferenceOps().linear(x, weight))


@pytest.mark.parametrize("kind", _KINDS)
def test_a_row_is_the_same_bits_alone_and_in_any_company(ops: NativeOps, kind: str) -> None:
    weight, _ = packed(kind, 100, 1600)
    x = torch.randn(300, 1600)
    whole = ops.linear(x, weight)
    for first, last in [(0, 1), (7, 8), (3, 5), (20, 28), (40, 49), (60, 77), (70, 103), (100, 160)]:
        assert torch.equal(ops.linear(x[first:last], weight), whole[first:last])


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_the_number_of_threads_changes_no_bit(ops: NativeOps, num_threads: int) -> None:
    weight, _ = packed("q4_1", 1000, 576)
    before = torch.get_num_threads()
    try:
        x = torch.randn(40, 576)
        torch.set_num_threads(num_threads)
        several = [ops.linear(x[:rows], weight) for rows in (1, 16, 40)]
        torch.set_num_threads(1)
        for rows, out in zip((1, 16, 40), several, strict=True):
            assert torch.equal(ops.linear(x[:rows], weight), out)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kind", _KINDS)
def test_both_instruction_sets_give_the_same_bits(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, _ = packed(kind, 100, 576)
    x = torch.randn(20, 576)
    results = []
    for isa in ("avx2", "avx512"):
        monkeypatch.setenv(ISA_VARIABLE, isa)
        try:
            ops = load_ops()
        except NativeUnavailable as error:
            pytest.skip(str(error))
        results.append((ops.linear(x[:3], weight), ops.linear(x, weight)))
    for narrow, wide in zip(*results, strict=True):
        assert torch.equal(narrow, wide)


def test_rows_may_lie_apart(ops: NativeOps) -> None:
    weight, _ = packed("fp16", 96, 64)
    wide = torch.randn(20, 200)
    assert torch.equal(ops.linear(wide[:, 5:69], weight), ops.linear(wide[:, 5:69].contiguous(), weight))


@pytest.mark.parametrize("num_rows", [1, 20])
def test_what_is_not_finite_stays_visible(ops: NativeOps, num_rows: int) -> None:
    weight, _ = packed("q4_1", 96, 64)
    x = torch.randn(num_rows, 64)
    x[0, 3] = torch.nan
    assert ops.linear(x, weight)[0].isnan().all()


def test_the_kinds_have_the_bytes_of_the_checkpoint() -> None:
    sizes = {kind: packed(kind, 64, 64)[0].num_bytes for kind in _KINDS}
    assert sizes == {"fp32": 16384, "fp16": 8192, "bf16": 8192, "q4_1": 2560, "q8_0": 4352}
    assert [packed(kind, 32, 32)[0].kind for kind in _KINDS] == list(WeightKind)
