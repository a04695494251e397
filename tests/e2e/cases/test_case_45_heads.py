"""Case 45: tied and untied output heads compute what the reference does, or the start is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import oracle
from tests.e2e import profiles, prompts
from tests.e2e.client import Client, at_once
from tests.e2e.fleet import Fleet
from tests.e2e.reference import Ledger, check_greedy

pytestmark = pytest.mark.side_by_side

NUM_PROMPTS = 20
WEIGHTS = "model.safetensors"


def edit_weights(folder: Path, edit: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    tensors = edit(load_file(folder / WEIGHTS))
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS, {"format": "pt"}
    )


def without_head(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}


def with_stray_head(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    shape = tensors["model.embed_tokens.weight"].shape
    return {**tensors, "lm_head.weight": torch.randn(shape, generator=torch.Generator().manual_seed(45))}


def without_prefix(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


def check_prompts(fleet: Fleet, client: Client, folder: Path, where: str) -> None:
    reference, vocabulary, ledger = fleet.models.reference(folder), fleet.models.vocabulary, Ledger()
    batch = prompts.prompts_of_lengths(fleet.models.bundled, [3 + 2 * i for i in range(NUM_PROMPTS)], seed=45)
    body: dict[str, Any] = {
        "max_tokens": 8,
        "temperature": 0,
        "logprobs": 5,
        "ignore_eos": True,
        "skip_special_tokens": False,
    }
    answers = at_once([partial(client.complete, ids, **body) for ids in batch])
    for ids, answer in zip(batch, answers, strict=True):
        check_greedy(reference, ids, vocabulary.ids_of(answer), ledger, where, answer.logprobs)
    assert not ledger.near_ties, "toys have wide gaps"


def tied(fleet: Fleet, name: str, is_tied: bool) -> Path:
    return fleet.models.toy(f"case-45-{name}", tie_word_embeddings=is_tied)


def accepted(fleet: Fleet) -> dict[str, Path]:
    """Checkpoints that must be served, by what is odd about them."""
    stray = tied(fleet, "stray-head", True)
    edit_weights(stray, with_stray_head)
    absent = tied(fleet, "absent-key", False)
    oracle.edit_config(absent, tie_word_embeddings=oracle.ABSENT)
    plain = tied(fleet, "tied", True)
    assert "lm_head.weight" not in load_file(plain / WEIGHTS)
    untied = tied(fleet, "untied", False)
    assert "lm_head.weight" in load_file(untied / WEIGHTS)
    return {"tied": plain, "tied with a stray head": stray, "untied": untied, "no key in the config": absent}


@pytest.mark.timeout(300)
def test_tied_and_untied_heads_equal_the_reference(fleet: Fleet) -> None:
    found = accepted(fleet)
    # transformers unties when both tensors are there and differ; tied means that the embedding is used
    meaning = {**found, "tied with a stray head": found["tied"]}

    def serve(name: str) -> str:
        with fleet.once(profiles.ALONE, found[name]) as system:
            check_prompts(fleet, system.client, meaning[name], name)
            return system.log()

    texts = at_once([partial(serve, name) for name in found], limit=2)
    logs = dict(zip(found, texts, strict=True))
    assert "lm_head.weight" in logs["tied with a stray head"], "the tensor without effect is listed"


def test_an_untied_model_without_its_head_is_refused_by_name(fleet: Fleet) -> None:
    folder = tied(fleet, "headless", False)
    edit_weights(folder, without_head)
    assert "lm_head.weight" in fleet.refuses(profiles.ALONE, folder)


def test_weights_without_the_usual_prefix_are_served_or_refused_by_name(fleet: Fleet) -> None:
    folder = tied(fleet, "bare-names", False)
    edit_weights(folder, without_prefix)
    # what transformers makes of the same tensors under their usual names is what they mean
    usual = tied(fleet, "untied", False)
    try:
        log = fleet.refuses(profiles.ALONE, folder)
    except AssertionError:
        with fleet.once(profiles.ALONE, folder) as system:
            check_prompts(fleet, system.client, usual, "bare names")
    else:
        assert "embed_tokens.weight" in log


def test_the_bundled_model_is_tied_and_equals_the_reference(fleet: Fleet) -> None:
    bundled = fleet.models.bundled
    assert json.loads((bundled / "config.json").read_text())["tie_word_embeddings"] is True
    client = fleet.system(profiles.SPLIT).client
    reference, ledger = fleet.models.reference(bundled), Ledger()
    for ids in prompts.prompts_of_lengths(bundled, [4, 21, 38], seed=451):
        answer = client.complete(ids, max_tokens=8, temperature=0, logprobs=5, ignore_eos=True)
        output = fleet.models.vocabulary.ids_of(answer)
        check_greedy(reference, ids, output, ledger, "bundled", answer.logprobs)
