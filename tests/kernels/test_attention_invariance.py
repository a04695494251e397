"""A sequence's attention is the same bits whoever shares its batch and wherever its blocks lie."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.kernels.paged_kv import AttentionRule
from tests.kernels.pages import SMALL, Heads, Pages

_HEADS = Heads(2, 1, 32, 8)
_LENGTHS = [75, 40, 33, 9, 64, 1]


@pytest.fixture(scope="module")
def pages(device: torch.device) -> Pages:
    return Pages(_LENGTHS, _HEADS, device)


@st.composite
def companies(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Other sequences than the first, each with some of its last tokens new."""
    others = draw(st.lists(st.integers(1, len(_LENGTHS) - 1), unique=True, max_size=4))
    return [(index, draw(st.integers(1, _LENGTHS[index]))) for index in others]


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    company=companies(),
    count=st.sampled_from([1, 2, 8, 9, 30, 75]),
    place=st.integers(0, 4),
    window=st.sampled_from([0, 20]),
)
def test_a_result_does_not_depend_on_the_batch(
    pages: Pages, company: list[tuple[int, int]], count: int, place: int, window: int
) -> None:
    rule = AttentionRule(0.3, window=window)
    alone = pages.run([(0, count)], SMALL, rule)
    new = [*company[:place], (0, count), *company[place:]]
    start = sum(other for _, other in company[:place])
    assert torch.equal(pages.run(new, SMALL, rule)[start : start + count], alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_result_does_not_depend_on_where_blocks_lie(dtype: torch.dtype, device: torch.device) -> None:
    heads = Heads(2, 1, 64, 16, dtype)
    results = []
    for filler in ([], [20], [5, 90]):  # other sequences take other blocks and reshuffle the first one's
        pages = Pages([50, *filler], heads, device)
        results.append([pages.run([(0, count)], SMALL, heads.rule) for count in (1, 4, 50)])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("window", [0, 20])
def test_a_prompt_cut_between_tiles_is_the_prompt_at_once(pages: Pages, window: int) -> None:
    # Between tiles only: on a CPU, a row of a product may round by its place among the rows.
    rule = AttentionRule(0.3, window=window)
    whole = pages.run([(0, 75)], SMALL, rule)
    for count in (75 - 8, 75 - 40, 75 - 64):
        assert torch.equal(pages.run([(0, count)], SMALL, rule), whole[75 - count :])


@pytest.mark.parametrize("window", [0, 20])
def test_the_number_of_drafts_changes_no_token_before_them(device: torch.device, window: int) -> None:
    rule = AttentionRule(0.3, window=window)
    pages = Pages([70], _HEADS, device)
    eight = pages.run([(0, 8)], SMALL, rule)
    for count in (2, 3, 7):
        pages.lengths = [62 + count]
        assert torch.equal(pages.run([(0, count)], SMALL, rule), eight[:count])
