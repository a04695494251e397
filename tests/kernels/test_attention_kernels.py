"""Attention over pages equals its twin at any length, size, rule and order of blocks."""

from __future__ import annotations

import math

import pytest
import torch

from engine.kernels.paged_kv import AttentionRule, PagedKV
from engine.kernels.tables import AttentionTiles, DecodeTile, PrefillTile, architecture, attention_tiles
from tests.kernels.pages import SMALL, Heads, Pages, assert_close

_LENGTHS = [1, 2, 15, 16, 17, 31, 32, 33, 65]
# decodes, drafts of each number, prompts from their beginning, chunks after a context
_DECODES = [(index, 1) for index in range(9)]
_DRAFTS = [(8, 8), (7, 2), (6, 7), (5, 1), (4, 3), (3, 8), (1, 2)]
_CHUNKS = [(8, 65), (7, 17), (6, 9), (5, 31), (2, 15), (0, 1), (4, 16)]


def check(
    pages: Pages, new: list[tuple[int, int]], tiles: AttentionTiles = SMALL, rule: AttentionRule | None = None
) -> None:
    rule = rule or pages.heads.rule
    assert_close(pages.run(new, tiles, rule), pages.run(new, tiles, rule, twin=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("new", [_DECODES, _DRAFTS, _CHUNKS], ids=["decodes", "drafts", "chunks"])
def test_lengths_around_the_borders_of_blocks_tiles_and_splits(
    new: list[tuple[int, int]], dtype: torch.dtype, device: torch.device
) -> None:
    check(Pages(_LENGTHS, Heads(2, 1, 64, dtype=dtype), device), new)


@pytest.mark.parametrize(
    "heads",
    [
        Heads(3, 1, 80, 7),
        Heads(2, 2, 96, 32),
        Heads(2, 1, 128, 64, torch.bfloat16),
        Heads(1, 1, 192, 16, torch.float16),
        Heads(2, 1, 256, 4, torch.bfloat16),
        Heads(12, 1, 16, 16),
    ],
    ids=str,
)
def test_head_sizes_groups_and_block_sizes(heads: Heads, device: torch.device) -> None:
    pages = Pages([33, 16, 70], heads, device)
    check(pages, [(2, 30), (0, 1), (1, 3)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rule", [(0.0, 5), (0.0, 16), (0.0, 33), (2.0, 0), (2.0, 17)], ids=str)
def test_windows_and_soft_caps(rule: tuple[float, int], dtype: torch.dtype, device: torch.device) -> None:
    pages = Pages([5, 33, 60], Heads(2, 1, 32, dtype=dtype), device)
    cap, window = rule
    for new in ([(0, 1), (1, 1), (2, 1)], [(2, 8), (1, 2), (0, 5)], [(2, 60), (1, 11)]):
        check(pages, new, rule=AttentionRule(0.3, cap, window))


def test_blocks_that_have_left_the_window_are_not_read(device: torch.device) -> None:
    # blocks smaller than a tile of keys: the first tile reaches into blocks that are gone
    pages = Pages([100, 90], Heads(2, 1, 32, block_size=4), device)
    rule = AttentionRule(0.3, window=21)
    for new in ([(0, 12), (1, 1)], [(0, 5), (1, 9)]):
        for index, count in new:
            first_seen = pages.lengths[index] - count + 1 - rule.window
            pages.pool[:, pages.tables[index][: first_seen // 4]] = torch.nan
        check(pages, new, rule=rule)
        pages = Pages([100, 90], pages.heads, device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_8k_context(dtype: torch.dtype, device: torch.device) -> None:
    pages = Pages([8192, 8001], Heads(4, 1, 64, 64, dtype), device)
    tiles = AttentionTiles(PrefillTile(64, 128, 4, 1), DecodeTile(16, 128, 4, 1, split=512))
    check(pages, [(0, 20), (1, 1)], tiles)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_large_scores_neither_overflow_nor_vanish(dtype: torch.dtype, device: torch.device) -> None:
    pages = Pages([33, 70], Heads(2, 1, 64, dtype=dtype), device, spread=60.0)
    for new in ([(0, 1), (1, 3)], [(0, 33), (1, 20)]):
        actual = pages.run(new, SMALL, pages.heads.rule)
        # Scores in the tens of thousands carry rounding of their own size times 2^-24: the twin takes it too.
        assert_close(actual, pages.run(new, SMALL, pages.heads.rule, twin=True), 2e-2)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, under the interpreter, speaks of NaN
@pytest.mark.parametrize("new", [[(0, 1)], [(0, 5)], [(0, 40)]], ids=str)
@pytest.mark.parametrize("which", ["q", "keys", "values"])
def test_what_is_not_finite_in_a_sequence_stays_visible(
    which: str, new: list[tuple[int, int]], device: torch.device
) -> None:
    pages = Pages([40, 9], Heads(2, 1, 32), device)
    if which == "q":
        pages.q[0][39] = torch.nan
    else:
        pages.pool[0 if which == "keys" else 1, pages.tables[0][0], :, 3] = torch.nan
    out = pages.run([*new, (1, 1)], SMALL, pages.heads.rule)
    assert out[new[0][1] - 1].isnan().any()
    assert not out[-1].isnan().any()  # and is not its neighbour's


@pytest.mark.parametrize("block_size", [32, 64])
def test_keys_fetched_by_the_copy_engine(block_size: int, device: torch.device) -> None:
    tiles = AttentionTiles(PrefillTile(64, 32, 4, 2), DecodeTile(16, 32, 4, 2, split=64), uses_tma=True)
    heads = Heads(2, 1, 96, block_size, torch.bfloat16)
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] < 9:
        pytest.skip("the copy engine (TMA) came with sm_90; without a GPU the interpreter runs this")
    pages = Pages([1, 31, 33, 100], heads, device)
    for rule in (heads.rule, AttentionRule(0.2, window=20)):
        check(pages, [(3, 1), (2, 7), (0, 1)], tiles, rule)
        check(pages, [(3, 40), (2, 33)], tiles, rule)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_slots_with_scales(dtype: torch.dtype, device: torch.device) -> None:
    pages = Pages([33, 70], Heads(2, 1, 32), device)
    scales = pages.pool.abs().amax(-1) / (127 if dtype == torch.int8 else 448)
    pool = torch.nan_to_num(pages.pool / scales.unsqueeze(-1), nan=100.0).to(dtype)
    kv = PagedKV(*pool.unbind(0), *scales.unbind(0))
    for new in ([(0, 1), (1, 3)], [(0, 33), (1, 20)]):
        results = [pages.run(new, SMALL, pages.heads.rule, twin, kv) for twin in (False, True)]
        assert_close(*results)


def test_the_tables_tiles_serve_every_supported_head_size(device: torch.device) -> None:
    for head_dim in (64, 80, 128, 256):
        for dtype, block_size in ((torch.float32, 16), (torch.bfloat16, 16), (torch.bfloat16, 128)):
            heads = Heads(4, 1, head_dim, block_size, dtype)
            tiles = attention_tiles(architecture(device), head_dim, dtype, block_size)
            check(Pages([70, 300], heads, device), [(0, 70), (1, 1)], tiles)


def test_a_hidden_key_has_no_weight_at_all(device: torch.device) -> None:
    """A token's result is the same bits whatever follows it in its sequence."""
    pages = Pages([50], Heads(2, 1, 32), device)
    whole = pages.run([(0, 50)], SMALL, pages.heads.rule)
    block, offset = pages.tables[0][40 // 16], 40 % 16
    pages.pool[:, block, :, offset:] = 1e4
    changed = pages.run([(0, 50)], SMALL, pages.heads.rule)
    assert torch.equal(whole[:40], changed[:40])
    assert math.isfinite(float(changed.sum()))
