"""The workloads are the same for every server, and as long as they say."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from benchmarks.workloads import CORPUS, Batch, Interruption, Prompts, Workload, make_workload, shapes_of_b


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE learned from the corpus: words are one to several tokens, as in a real one."""
    trained = Tokenizer(BPE())
    trained.pre_tokenizer = ByteLevel(add_prefix_space=False)
    trained.train([str(CORPUS)], BpeTrainer(vocab_size=600, show_progress=False))
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    trained.save(str(file))
    return file


def lengths(tokenizer: Path, texts: list[str]) -> list[int]:
    read = Tokenizer.from_file(str(tokenizer))
    return [len(read.encode(text, add_special_tokens=False).ids) for text in texts]


def test_b_has_the_published_lengths() -> None:
    shapes = shapes_of_b()
    assert len(shapes) == 16
    assert sum(shape.num_prompt_tokens for shape in shapes) == 3991
    assert sum(shape.num_output_tokens for shape in shapes) == 2037


@pytest.mark.parametrize("workload", [Workload.A, Workload.B, Workload.C])
def test_each_prompt_has_exactly_the_tokens_it_says(workload: Workload, tokenizer: Path) -> None:
    work = make_workload(workload, Prompts(tokenizer), 0)
    assert isinstance(work, Batch)
    assert lengths(tokenizer, [ask.prompt for ask in work.asks]) == [
        ask.num_prompt_tokens for ask in work.asks
    ]


def test_a_long_prompt_comes_into_eight_streams(tokenizer: Path) -> None:
    work = make_workload(Workload.D, Prompts(tokenizer), 0)
    assert isinstance(work, Interruption)
    assert lengths(tokenizer, [ask.prompt for ask in work.running]) == [128] * 8
    assert lengths(tokenizer, [work.long.prompt]) == [1500]


def test_the_requests_of_c_share_their_first_1024_tokens_and_no_more(tokenizer: Path) -> None:
    work = make_workload(Workload.C, Prompts(tokenizer), 0)
    assert isinstance(work, Batch)
    read = Tokenizer.from_file(str(tokenizer))
    ids = [read.encode(ask.prompt, add_special_tokens=False).ids for ask in work.asks]
    assert (len(ids), work.concurrency) == (32, 8)
    assert len({tuple(prompt[:1024]) for prompt in ids}) == 1
    assert len({tuple(prompt[:1040]) for prompt in ids}) == 32


@pytest.mark.parametrize("workload", list(Workload))
def test_a_run_repeats_for_each_server_and_differs_from_the_next(workload: Workload, tokenizer: Path) -> None:
    prompts = Prompts(tokenizer)
    first = make_workload(workload, prompts, 0)
    assert make_workload(workload, Prompts(tokenizer), 0) == first
    heads = [text[:8] for work in (first, make_workload(workload, prompts, 1)) for text in texts_of(work)]
    assert len(set(heads)) == (2 if workload is Workload.C else len(heads))


def texts_of(work: Batch | Interruption) -> list[str]:
    asks = work.asks if isinstance(work, Batch) else (*work.running, work.long)
    return [ask.prompt for ask in asks]


def test_more_tokens_than_the_corpus_has_are_refused(tokenizer: Path) -> None:
    with pytest.raises(ValueError, match="no 900000 tokens"):
        Prompts(tokenizer).text(900000, random.Random(0))
