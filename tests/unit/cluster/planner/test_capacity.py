"""The arithmetic of one worker gives the numbers that are known for Llama-3-70B on H100s."""

from __future__ import annotations

import pytest

from cluster.planner.capacity import CEILING, Capacity, Shares
from cluster.planner.hardware import Catalogue
from cluster.planner.model_config import model_shape
from cluster.planner.model_shape import ModelShape
from cluster.planner.speculation import Speculation
from core.errors import InvalidConfig
from tests.unit.cluster.planner.model_configs import DEEPSEEK_V3, LLAMA_3_70B, MIXTRAL_8X7B, QWEN3_30B_A3B

_H100 = Catalogue().gpu("h100")
_LENGTH = 8192


def _llama(weight_bits: float = 16) -> ModelShape:
    """With the nominal 70 B parameters that the known numbers are calculated with."""
    return model_shape(LLAMA_3_70B, "llama-3-70b").with_num_params(70e9).with_bits(weight_bits, None)


def _on(num_gpus: int, shares: Shares = CEILING, weight_bits: float = 16) -> Capacity:
    return Capacity(_llama(weight_bits), _H100, num_gpus, shares)


def test_a_token_takes_320_kib_and_a_sequence_of_8192_takes_2_7_gb() -> None:
    assert _llama().kv_bytes_per_token == 320 * 1024
    assert round(_llama().kv_bytes(_LENGTH) / 1e9, 1) == 2.7


@pytest.mark.parametrize(("weight_bits", "tokens_per_s"), [(16, 24), (4, 96)], ids=["fp16", "int4"])
def test_one_h100_streams_the_weights_so_often(weight_bits: float, tokens_per_s: int) -> None:
    assert round(_on(1, weight_bits=weight_bits).decode_ceiling()) == tokens_per_s


@pytest.mark.parametrize(("batch", "step_ms", "tokens_per_s"), [(1, 10.6, 94), (32, 16.9, 1898)])
def test_four_h100_step_so_fast_with_8192_tokens_of_context(
    batch: int, step_ms: float, tokens_per_s: int
) -> None:
    step_s = _on(4).decode_step_s(batch, _LENGTH)
    assert round(step_s * 1e3, 1) == step_ms
    assert round(batch / step_s) == tokens_per_s


@pytest.mark.parametrize(("utilization", "num_sequences"), [(1.0, 67), (0.9, 55)])
def test_so_many_sequences_of_8192_tokens_fit_on_four_h100(utilization: float, num_sequences: int) -> None:
    assert _on(4, Shares(memory=utilization)).num_sequences(_LENGTH) == num_sequences


def test_kv_that_gpus_cannot_share_is_kept_and_read_by_each() -> None:
    """Four KV heads on eight GPUs: each is kept twice. A latent is one thing: each GPU keeps it."""
    for raw, num_gpus, copies in ((QWEN3_30B_A3B, 4, 1), (QWEN3_30B_A3B, 8, 2), (DEEPSEEK_V3, 16, 16)):
        worker = Capacity(model_shape(raw, "model"), _H100, num_gpus, CEILING)
        per_sequence = copies * worker.shape.kv_bytes(_LENGTH)
        assert worker.num_sequences(_LENGTH) == int(worker.kv_budget_bytes / per_sequence)
        more_s = worker.decode_step_s(1, _LENGTH) - worker.decode_step_s(1, 0)
        assert more_s == pytest.approx(per_sequence / (num_gpus * 3350e9))


def test_a_verify_step_gives_3_7_tokens() -> None:
    assert round(Speculation(acceptance=0.8, num_draft_tokens=5).tokens_per_verify, 1) == 3.7


def test_speculation_pays_while_memory_is_the_limit_and_not_once_arithmetic_is() -> None:
    speculation = Speculation(acceptance=0.8, num_draft_tokens=5)
    worker = _on(4)
    assert speculation.gain(worker, 1, _LENGTH) == pytest.approx(speculation.tokens_per_verify, rel=0.01)
    assert speculation.gain(worker, 512, 64) < 1


def test_weights_that_do_not_fit_leave_no_room_for_a_sequence() -> None:
    assert _on(1).num_sequences(_LENGTH) == 0


def test_the_batch_is_bound_by_the_latency_or_by_memory() -> None:
    worker = _on(4)
    batch = worker.max_batch(_LENGTH, _LENGTH, itl_s=0.0169)
    assert worker.decode_step_s(batch, _LENGTH) <= 0.0169 < worker.decode_step_s(batch + 1, _LENGTH)
    assert worker.max_batch(_LENGTH, _LENGTH, itl_s=1.0) == 67
    assert worker.max_batch(_LENGTH, _LENGTH, itl_s=0.001) == 0


def test_prefill_is_arithmetic_with_attention_and_cached_tokens_are_not_computed() -> None:
    worker = _on(4)
    linear = 2 * 70e9 * _LENGTH / (4 * 989e12)
    attention = 4 * 80 * 64 * 128 * (_LENGTH + 1) / 2 * _LENGTH / (4 * 989e12)
    assert worker.prefill_s(_LENGTH) == pytest.approx(linear + attention, rel=1e-6)
    assert worker.prefill_s(_LENGTH, num_cached=4096) < worker.prefill_s(_LENGTH)
    assert worker.prefill_s(_LENGTH, num_cached=4096) > worker.prefill_s(4096)


def test_a_transfer_takes_the_bytes_over_the_share_of_the_link() -> None:
    link = Catalogue().link("ib-ndr")
    assert _on(4).transfer_s(_LENGTH, link) == pytest.approx(2.684354560e9 / 50e9)
    assert _on(4, Shares(link=0.5)).transfer_s(_LENGTH, link) == pytest.approx(2.684354560e9 / 25e9)


def test_a_nominal_count_is_refused_for_a_mixture() -> None:
    with pytest.raises(InvalidConfig, match="dense"):
        model_shape(MIXTRAL_8X7B, "mixtral").with_num_params(47e9)


def test_shares_beyond_the_data_sheet_are_refused() -> None:
    with pytest.raises(ValueError, match="bandwidth"):
        Shares(bandwidth=1.2)


def test_every_gpu_and_link_has_a_source_and_prices_have_a_date() -> None:
    catalogue = Catalogue()
    assert all(item.source for item in (*catalogue.gpus.values(), *catalogue.links.values()))
    priced = [gpu for gpu in catalogue.gpus.values() if gpu.prices.on_demand is not None]
    assert priced
    assert all("list price of 20" in gpu.prices.source for gpu in priced)
    with pytest.raises(InvalidConfig, match="h100"):
        catalogue.gpu("voodoo2")
