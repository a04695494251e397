"""The sampler against its definition: order of steps, repeatability, corner values, distribution."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from core.errors import StepFailed
from core.ids import RequestId
from core.request import Request
from engine.sampling import Sampler, SamplingRow, row_of
from engine.sequence import new_sequence
from engine.step import SampledToken
from tests.unit.engine.sampling.reference import EOS, adjusted_logits, params, reference, row

VOCAB = 97


def random_logits(seed: int, num_rows: int = 1, vocab: int = VOCAB, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def sample_one(logits: torch.Tensor, item: SamplingRow, tile_rows: int | None = None) -> SampledToken:
    return Sampler(tile_rows).sample(logits, [item])[0]


tokens = st.lists(st.integers(0, VOCAB - 1), max_size=12)
settings_of_a_request = st.fixed_dictionaries(
    {
        "seed": st.integers(-(2**63), 2**63 - 1),
        "temperature": st.sampled_from([0.0, 1e-6, 0.3, 0.9, 1.0, 2.0]),
        "top_p": st.sampled_from([1.0, 0.0, 0.1, 0.5, 0.9, 0.999]),
        "top_k": st.sampled_from([0, 1, 2, 5, 40, VOCAB, 10**9]),
        "min_p": st.sampled_from([0.0, 0.02, 0.3, 1.0]),
        "repetition_penalty": st.sampled_from([1.0, 0.7, 1.3]),
        "presence_penalty": st.sampled_from([0.0, -1.0, 1.5]),
        "frequency_penalty": st.sampled_from([0.0, 0.4, -0.2]),
        "logit_bias": st.sampled_from([(), ((3, 100.0),), ((3, -100.0), (4, 2.5)), ((2, 50.0),)]),
        "min_tokens": st.sampled_from([0, 0, 3, 50]),
        "stop_token_ids": st.sampled_from([(), (3, 7), (10**6,)]),
        "ignore_eos": st.booleans(),
    }
)


@settings(max_examples=200, deadline=None)
@given(
    logits_seed=st.integers(0, 10**6),
    scale=st.sampled_from([0.5, 3.0]),
    prompt=tokens,
    output=tokens,
    sample=st.integers(0, 3),
    fields=settings_of_a_request,
)
def test_each_token_is_the_one_that_the_definition_names(
    logits_seed: int, scale: float, prompt: list[int], output: list[int], sample: int, fields: dict[str, Any]
) -> None:
    logits = random_logits(logits_seed, scale=scale)
    item = row(prompt, output, sample, **fields)
    found = sample_one(logits, item)
    wanted = reference(logits[0].tolist(), item)
    if found.token_id != wanted.token_id:
        assert found.gap < 1e-4, "another token without a near tie"
    assert not math.isnan(found.gap)
    assert found.gap >= 0.0
    assert found.sample_index == sample


@settings(max_examples=100, deadline=None)
@given(
    logits_seed=st.integers(0, 10**6),
    noise_seed=st.integers(0, 10**6),
    fields=settings_of_a_request,
    scale=st.sampled_from([0.5, 3.0]),
)
def test_logits_that_move_by_less_than_the_gap_give_the_same_token(
    logits_seed: int, noise_seed: int, fields: dict[str, Any], scale: float
) -> None:
    logits = random_logits(logits_seed, scale=scale)
    item = row([1, 2], [3], **{**fields, "repetition_penalty": 1.0})
    found = sample_one(logits, item)
    step = min(found.gap, 1.0) / 4 - 1e-5
    if step <= 0:
        return
    moved = logits + (torch.rand(VOCAB, generator=torch.Generator().manual_seed(noise_seed)) * 2 - 1) * step
    assert sample_one(moved, item).token_id == found.token_id


# ---------------------------------------------------------------- repeatability


def mixed_rows() -> list[SamplingRow]:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {},
        {"temperature": 0.9, "top_p": 0.9},
        {"top_k": 50},
        {"top_k": 5, "top_p": 0.8, "temperature": 0.7},
        {"min_p": 0.05},
        {"top_p": 0.99, "min_p": 0.01, "temperature": 1.7},
        {"temperature": 0.0, "repetition_penalty": 1.3, "logprobs": 3},
        {"frequency_penalty": 0.5, "logit_bias": ((11, 5.0),), "min_tokens": 30},
        {"top_p": 0.95, "presence_penalty": 1.0, "logprobs": 0},
    ]
    return [
        row(list(range(i, 2 * i)), list(range(i)), i % 3, seed=1000 + i, **kind)
        for i, kind in enumerate(kinds * 2)
    ]


@pytest.mark.parametrize("vocab", [1001, 49152])
def test_a_token_does_not_depend_on_its_neighbours_bit_for_bit(vocab: int) -> None:
    rows = mixed_rows()
    logits = random_logits(3, len(rows), vocab, scale=3.0)
    alone = [sample_one(logits[i : i + 1], item) for i, item in enumerate(rows)]
    assert Sampler().sample(logits, rows) == alone
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1)).tolist()[:13]
    assert Sampler().sample(logits[order], [rows[i] for i in order]) == [alone[i] for i in order]
    assert Sampler().sample(logits, rows) == alone, "a second call differs"


def test_rows_that_are_worked_on_together_give_the_same_tokens() -> None:
    rows = mixed_rows()
    logits = random_logits(4, len(rows), 1001, scale=3.0)
    alone, together = Sampler(1).sample(logits, rows), Sampler(100).sample(logits, rows)
    assert [token.token_id for token in together] == [token.token_id for token in alone]
    assert [token.gap for token in together] == pytest.approx([token.gap for token in alone], abs=1e-5)


def test_the_logits_are_left_as_they_are() -> None:
    rows = mixed_rows()
    logits = random_logits(5, len(rows), 1001)
    before = logits.clone()
    Sampler().sample(logits, rows)
    Sampler().sample(logits[:1], [row(temperature=0.0, logit_bias=((5, 100.0),))])
    Sampler().sample(logits[:1], [row(temperature=0.0)])
    assert torch.equal(logits, before)


def test_seed_sample_and_position_each_change_the_draws_and_nothing_else_does() -> None:
    logits = random_logits(6, vocab=5000, scale=0.1)
    base = row(output=[1] * 5, seed=42)
    token = sample_one(logits, base).token_id
    others = [
        replace(base, params=params(seed=43)),
        replace(base, params=params(seed=42 + 2**40)),
        replace(base, params=params(seed=-42)),
        replace(base, sample_index=1),
        replace(base, token_ids=[1] * 6),
    ]
    assert len({sample_one(logits, item).token_id for item in others} | {token}) == 6
    same_place = SamplingRow(params(seed=42), 0, [9, 9, 7, 7, 7, 7, 7], 2, EOS)
    assert sample_one(logits, same_place).token_id == token, (
        "prompt length and history are not part of the noise"
    )


def test_samples_of_one_request_differ_and_repeat() -> None:
    logits = random_logits(7, vocab=2000, scale=1.0).expand(4, -1).contiguous()
    rows = [row(sample=i, seed=7) for i in range(4)]
    found = [token.token_id for token in Sampler().sample(logits, rows)]
    assert len(set(found)) == 4
    assert [token.token_id for token in Sampler().sample(logits, rows)] == found


# ---------------------------------------------------------------- distribution


@pytest.mark.parametrize(
    ("along", "fields"),
    [
        ("position", {}),
        ("position", {"temperature": 0.6}),
        ("position", {"top_k": 7}),
        ("position", {"top_p": 0.8}),
        ("position", {"min_p": 0.1}),
        ("position", {"logit_bias": ((5, 2.0), (6, -100.0)), "top_p": 0.95}),
        ("seed", {}),
        ("seed", {"top_k": 20, "top_p": 0.9, "min_p": 0.05, "temperature": 1.2}),
    ],
)
def test_20000_draws_match_the_exact_distribution(along: str, fields: dict[str, Any]) -> None:
    num = 20_000
    logits = random_logits(8, vocab=40, scale=1.5)
    if along == "position":
        rows = [SamplingRow(params(**fields), 0, range(1000, 1000 + i), 0, frozenset()) for i in range(num)]
    else:
        rows = [SamplingRow(params(**{**fields, "seed": i}), 0, [], 0, frozenset()) for i in range(num)]
    found = Sampler(tile_rows=num).sample(logits.expand(num, -1), rows)
    exact = reference(logits[0].tolist(), rows[0])
    counts = Counter(token.token_id for token in found)
    assert set(counts) <= set(exact.kept), "a token was drawn that the filters drop"
    wanted = [probability * num for probability in exact.probabilities]
    # classes with few expected draws are merged, as the test needs
    common = [i for i, value in enumerate(wanted) if value >= 5]
    observed = [float(counts[exact.kept[i]]) for i in common]
    expected = [wanted[i] for i in common]
    if len(common) < len(wanted):
        observed.append(num - sum(observed))
        expected.append(num - sum(expected))
    assert stats.chisquare(observed, expected).pvalue > 0.001


# ---------------------------------------------------------------- corner values


@pytest.mark.parametrize(
    "fields",
    [
        *({"temperature": 0.0, "top_p": value} for value in (0.0, 0.1)),
        *({"temperature": 0.0, "top_k": value} for value in (0, 1, VOCAB, 10**9)),
        *({"temperature": 0.0, "min_p": value} for value in (0.0, 1.0)),
        {"temperature": 1.0, "top_p": 0.0},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1.0, "min_p": 1.0},
        {"temperature": 1e-6},
        {"temperature": 1e-6, "top_p": 0.9, "top_k": 10, "min_p": 0.1},
        {"temperature": 1e-50},
        {"temperature": 5e-324, "top_k": 3},
    ],
)
def test_degenerate_settings_are_greedy(fields: dict[str, Any]) -> None:
    logits = random_logits(9, 20)
    rows = [row(output=[1] * i, seed=i, **fields) for i in range(20)]
    found = Sampler().sample(logits, rows)
    assert [token.token_id for token in found] == logits.argmax(-1).tolist()


def test_large_logits_at_a_tiny_temperature_do_not_overflow() -> None:
    logits = torch.tensor([[3e38, -3e38, 2.9e38, 0.0]])
    for temperature in (0.0, 1e-6, 1.0):
        found = sample_one(logits, row(temperature=temperature))
        assert found.token_id == 0
        assert not math.isnan(found.gap)


@pytest.mark.parametrize("top_k", [VOCAB, VOCAB + 1, 10**9])
@pytest.mark.parametrize("vocab", [VOCAB, 2000])
def test_a_top_k_of_the_whole_vocabulary_drops_nothing(top_k: int, vocab: int) -> None:
    logits = random_logits(10, vocab=vocab, scale=0.01)
    rows = [row(seed=i, top_k=max(top_k, vocab)) for i in range(50)]
    off = [row(seed=i) for i in range(50)]
    sampler, many = Sampler(), logits.expand(50, -1)
    assert sampler.sample(many, rows) == sampler.sample(many, off)


@pytest.mark.parametrize("top_p", [0.5, 0.95, 0.9999])
def test_a_nucleus_wider_than_what_is_listed_at_first_is_whole(top_p: float) -> None:
    logits = random_logits(11, vocab=20_000, scale=0.01)
    rows = [row(seed=i, top_p=top_p) for i in range(30)]
    found = [token.token_id for token in Sampler().sample(logits.expand(30, -1), rows)]
    order = torch.sort(logits[0], descending=True, stable=True).indices.tolist()
    rank = {token_id: i for i, token_id in enumerate(order)}
    assert max(rank[token_id] for token_id in found) < top_p * 20_000 * 1.01
    assert max(rank[token_id] for token_id in found) > top_p * 20_000 * 0.5, "the tail is never drawn"


def test_ties_go_to_the_lowest_id() -> None:
    logits = torch.zeros(1, VOCAB)
    assert sample_one(logits, row(temperature=0.0)).token_id == 0
    assert sample_one(logits, row(top_k=1)).token_id == 0
    assert sample_one(logits, row(top_p=0.0)).token_id == 0
    logits[0, [13, 40]] = 2.5
    assert sample_one(logits, row(temperature=0.0)).token_id == 13
    assert sample_one(logits, row(temperature=0.0)).gap == 0.0
    drawn = {sample_one(logits, row(seed=i, top_k=3)).token_id for i in range(200)}
    assert drawn == {0, 13, 40}


def test_negative_zero_ties_with_zero() -> None:
    logits = torch.tensor([[-1.0, -0.0, 0.0, -0.0]])
    assert sample_one(logits, row(top_k=1)).token_id == 1
    assert sample_one(logits, row(temperature=0.0, logprobs=4)).token_id == 1
    found = sample_one(logits, row(temperature=0.0, logprobs=4)).logprob
    assert found is not None
    assert [token_id for token_id, _ in found.top] == [1, 2, 3, 0]


def test_a_vocabulary_of_one_token_works() -> None:
    for fields in ({"temperature": 0.0}, {}, {"top_k": 3, "top_p": 0.5, "min_p": 0.5}):
        found = sample_one(torch.zeros(1, 1), row(**fields))
        assert (found.token_id, found.gap) == (0, math.inf)


def test_masked_logits_are_never_drawn_and_never_nan() -> None:
    logits = torch.full((1, VOCAB), -math.inf)
    logits[0, [5, 6]] = torch.tensor([1.0, 1.5])
    for fields in ({}, {"top_k": 5}, {"top_p": 0.9999}, {"min_p": 0.001}, {"temperature": 0.0}):
        for seed in range(20):
            found = sample_one(logits, row(seed=seed, logprobs=4, **fields))
            assert found.token_id in (5, 6)
            assert not math.isnan(found.gap)
            assert found.logprob is not None
            assert not any(math.isnan(value) for _, value in found.logprob.top)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("fields", [{"temperature": 0.0}, {}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_broken_logits_are_an_error_and_not_a_token(bad: float, fields: dict[str, Any]) -> None:
    logits = random_logits(12, 2)
    logits[1, 50] = bad
    with pytest.raises(StepFailed):
        Sampler().sample(logits, [row(), row(**fields)])
    with pytest.raises(StepFailed):
        Sampler().sample(torch.full((1, VOCAB), -math.inf), [row(**fields)])


def test_no_rows_are_no_tokens() -> None:
    assert Sampler().sample(torch.zeros(0, VOCAB), []) == []


# ---------------------------------------------------------------- bias, penalties, mask


def test_a_bias_of_a_hundred_forces_and_bans() -> None:
    logits = random_logits(13)
    best = int(logits.argmax())
    for fields in ({"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 2.0, "top_p": 0.9}):
        assert sample_one(logits, row(logit_bias=((77, 100.0),), **fields)).token_id == 77
        banned = row(logit_bias=((best, -100.0),), **fields)
        assert all(sample_one(logits, replace(banned, sample_index=i)).token_id != best for i in range(50))


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("fields", [{"temperature": 0.0}, {"temperature": 1.0}])
def test_end_and_stop_ids_are_masked_until_min_tokens_are_out(
    fields: dict[str, Any], ignore_eos: bool
) -> None:
    logits = random_logits(14)
    bias = ((2, 100.0), (50, 99.0))
    for num_output in range(5):
        item = row(
            [1],
            [1] * num_output,
            min_tokens=3,
            stop_token_ids=(50,),
            logit_bias=bias,
            ignore_eos=ignore_eos,
            **fields,
        )
        token_id = sample_one(logits, item).token_id
        assert (token_id in (2, 50)) == (num_output >= 3)


def test_penalties_count_each_token_where_they_should() -> None:
    logits = random_logits(15)
    prompt, output = [1, 1, 2, 3], [3, 4, 4, 4]
    for fields in (
        {"repetition_penalty": 1.5},
        {"repetition_penalty": 0.5},
        {"presence_penalty": 1.0},
        {"frequency_penalty": 0.7},
        {
            "repetition_penalty": 1.2,
            "presence_penalty": -0.5,
            "frequency_penalty": 0.3,
            "logit_bias": ((4, 3.0),),
        },
    ):
        wanted = adjusted_logits(logits[0].tolist(), row(prompt, output, **fields))
        # seen through the eyes of a greedy choice: lift each token until it just wins
        for token_id in (1, 2, 3, 4, 5):
            best_other = max(value for i, value in enumerate(wanted.tolist()) if i != token_id)
            for shift, wins in ((0.01, True), (-0.01, False)):
                lifted = logits.clone()
                raw = best_other + shift
                bias = dict(fields.get("logit_bias", ()))  # type: ignore[call-overload]
                bias[token_id] = bias.get(token_id, 0.0)
                lifted[0, token_id] = solve(raw, token_id, prompt, output, fields)
                item = row(prompt, output, temperature=0.0, **fields)
                assert (sample_one(lifted, item).token_id == token_id) == wins


def solve(
    target: float, token_id: int, prompt: list[int], output: list[int], fields: dict[str, Any]
) -> float:
    """The raw logit that bias and penalties turn into `target`."""
    value = target
    if token_id in output:
        value += fields.get("presence_penalty", 0.0) + fields.get("frequency_penalty", 0.0) * output.count(
            token_id
        )
    if token_id in prompt + output:
        penalty = fields.get("repetition_penalty", 1.0)
        value = value * penalty if value > 0 else value / penalty
    return value - dict(fields.get("logit_bias", ())).get(token_id, 0.0)


# ---------------------------------------------------------------- logprobs


@pytest.mark.parametrize(
    "fields", [{"temperature": 0.0}, {"temperature": 1.7, "top_p": 0.9, "logit_bias": ((9, 100.0),)}]
)
def test_logprobs_are_those_of_the_raw_logits(fields: dict[str, Any]) -> None:
    logits = random_logits(16)
    exact = torch.log_softmax(logits[0].double(), -1)
    found = sample_one(logits, row([5], [6], logprobs=5, repetition_penalty=1.3, **fields))
    assert found.logprob is not None
    assert found.logprob.token_id == found.token_id
    assert found.logprob.logprob == pytest.approx(exact[found.token_id].item(), abs=1e-5)
    order = sorted(range(VOCAB), key=lambda i: (-logits[0, i].item(), i))[:5]
    assert [token_id for token_id, _ in found.logprob.top] == order
    assert [value for _, value in found.logprob.top] == pytest.approx(exact[order].tolist(), abs=1e-5)


def test_logprobs_come_only_when_asked_for() -> None:
    logits = random_logits(17)
    assert sample_one(logits, row()).logprob is None
    none_best = sample_one(logits, row(logprobs=0)).logprob
    assert none_best is not None
    assert none_best.top == ()
    every = sample_one(logits, row(logprobs=1000)).logprob
    assert every is not None
    assert len(every.top) == VOCAB


def test_equal_logits_are_listed_by_id() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 60] = 1.0
    found = sample_one(logits, row(temperature=0.0, logprobs=3)).logprob
    assert found is not None
    assert [token_id for token_id, _ in found.top] == [60, 0, 1]


# ---------------------------------------------------------------- near ties


def test_a_greedy_gap_is_the_lead_in_logits() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.75, 0.0]])
    assert sample_one(logits, row(temperature=0.0)).gap == pytest.approx(0.25)
    assert sample_one(logits, row(temperature=1e-6)).gap == pytest.approx(0.25, abs=1e-4)


def test_a_filter_decision_is_near_only_if_it_could_change_the_token() -> None:
    logits = torch.tensor([[3.0, 1.0, 0.9999, -4.0, -4.0]])
    moved = torch.tensor([[3.0, 0.9999, 1.0, -4.0, -4.0]])
    for fields in ({"top_k": 2}, {"top_p": 0.8}, {"top_k": 2, "min_p": 0.01}):
        gaps: dict[bool, list[float]] = {True: [], False: []}
        for seed in range(300):
            found = sample_one(logits, row(seed=seed, **fields))
            is_changed = found.token_id != sample_one(moved, row(seed=seed, **fields)).token_id
            gaps[is_changed].append(found.gap)
        assert len(gaps[True]) > 10
        assert max(gaps[True]) < 1e-3, "a decision that mattered was not reported"
        assert sum(gap < 1e-3 for gap in gaps[False]) <= 6, "decisions that did not matter were reported"


# ---------------------------------------------------------------- rows


def test_a_row_of_a_sequence_counts_its_position_from_the_output() -> None:
    request = Request(RequestId("r"), (5, 6, 7), params(seed=3))
    sequence = new_sequence(request, 2, (8, 9), 100)
    item = row_of(sequence, EOS)
    assert (item.position, item.sample_index, item.num_prompt_tokens) == (2, 2, 3)
    assert row_of(sequence, EOS, sample_index=4).sample_index == 4
    sequence.append(1)
    assert item.position == 3, "the row reads the sequence's tokens and copies none"
