"""RightTokens: the prompts whose greedy continuations are compared with the reference, and the comparison.

Owns the prompt sets (a short one for every change, the full one for acceptance) and how a system is asked.
What a variant of the system is, is said by the tests that use it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tokenizers import Tokenizer

from tests.e2e import prompts
from tests.e2e.answers import Answer
from tests.e2e.client import Client, at_once
from tests.e2e.harness import ROOT
from tests.e2e.reference import Ledger, Reference, check_greedy
from tests.e2e.vocabulary import Vocabulary

SYSTEM_TURN = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
BORDER_LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 127, 128, 129, 255, 256, 257)
LONG_SLICES = ((0, 511), (450, 512), (900, 513), (600, 1500))
"""Start and length of long prompts in the licence text: prose, since a thousand random words are a prompt on
which two fp32 computations of one model drift apart by a thousandth.
"""
SHORT_SET_LENGTHS = (1, 15, 16, 17, 48, 65, 128, 257)
NUM_TOKENS = 48


@dataclass(frozen=True, slots=True)
class Prompt:
    """`ids` are what the model reads; `message` is set when they are the rendering of a chat."""

    name: str
    ids: tuple[int, ...]
    message: str | None = None


def render_chat(message: str) -> str:
    """The bundled model's template for one user message, written out by hand."""
    turns = f"<|im_start|>system\n{SYSTEM_TURN}<|im_end|>\n<|im_start|>user\n{message}<|im_end|>\n"
    return f"{turns}<|im_start|>assistant\n"


def make_prompts(folder: Path, lengths: Sequence[int], num_raw: int, num_chats: int) -> list[Prompt]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False).ids)

    found = [Prompt(f"{n} ids", tuple(prompts.random_ids(folder, n, seed=7000 + n))) for n in lengths]
    found += [Prompt(repr(text), ids(text)) for text in prompts.PROSE[:num_raw]]
    found += [Prompt(f"chat {text!r}", ids(render_chat(text)), text) for text in prompts.CHATS[:num_chats]]
    return found


def short_set(folder: Path) -> list[Prompt]:
    """Twelve prompts: borders of blocks, raw text, chats."""
    return make_prompts(folder, SHORT_SET_LENGTHS, 2, 2)


def full_set(folder: Path) -> list[Prompt]:
    """Forty prompts of 1 to 1,500 tokens."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prose = tokenizer.encode((ROOT / "LICENSE").read_text(), add_special_tokens=False).ids
    long = [Prompt(f"{n} ids of prose", tuple(prose[start : start + n])) for start, n in LONG_SLICES]
    found = make_prompts(folder, BORDER_LENGTHS, 8, 8) + long
    assert max(len(prompt.ids) for prompt in found) == 1500
    assert len(found) == 40
    return found


def ask(client: Client, prompt: Prompt, num_tokens: int) -> Answer:
    """Greedy, exactly `num_tokens`, special tokens spelled out so that each token can be told."""
    body = {
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "skip_special_tokens": False,
    }
    if prompt.message is not None:
        answer = client.chat(prompt.message, **body, logprobs=True)
    else:
        answer = client.complete(prompt.ids, **body, logprobs=1)
    assert answer.num_prompt_tokens == len(prompt.ids), prompt.name
    assert answer.num_tokens == num_tokens, prompt.name
    return answer


@dataclass(slots=True)
class Comparison:
    """A system's answers against the reference of its checkpoint."""

    reference: Reference
    vocabulary: Vocabulary
    num_tokens: int = NUM_TOKENS

    def run(
        self,
        client: Client,
        batch: Sequence[Prompt],
        where: str,
        at_a_time: int = 1,
        is_cached: Callable[[Answer, Prompt], bool] | None = None,
    ) -> Ledger:
        """Ask for all prompts, `at_a_time` at once, and compare; `is_cached` must hold of each answer."""
        jobs = [partial(ask, client, prompt, self.num_tokens) for prompt in batch]
        answers = at_once(jobs, limit=at_a_time)
        ledger = Ledger()
        for prompt, answer in zip(batch, answers, strict=True):
            story = f"{where}, {prompt.name}"
            if is_cached is not None:
                assert is_cached(answer, prompt), f"{story}: {answer.num_cached_tokens} tokens were cached"
            output = self.vocabulary.ids_of(answer)
            assert len(output) == self.num_tokens, f"{story}: {len(output)} tokens are listed"
            check_greedy(self.reference, prompt.ids, output, ledger, story, answer.logprobs)
        ledger.check_share()
        return ledger


def is_cold(answer: Answer, prompt: Prompt, block_size: int = 16) -> bool:
    """Nothing was cached, but for a chat the template's first block: the sample at the start has it too."""
    return answer.num_cached_tokens <= (0 if prompt.message is None else block_size)


def is_warm(answer: Answer, prompt: Prompt, block_size: int = 16) -> bool:
    """All whole blocks that leave one token to compute were cached."""
    return answer.num_cached_tokens >= (len(prompt.ids) - 1) // block_size * block_size


def check_prompt_logprobs(
    reference: Reference, client: Client, batch: Sequence[Prompt], where: str
) -> Ledger:
    """Teacher forcing by the server itself: the logprob of each prompt token is the reference's."""
    ledger = Ledger()
    for prompt in batch:
        if prompt.message is not None or len(prompt.ids) < 2:
            continue
        answer = client.complete(prompt.ids, max_tokens=0, echo=True, logprobs=1)
        assert len(answer.logprobs) == len(prompt.ids), prompt.name
        assert answer.logprobs[0] is None, "the first token has no prediction"
        scores = reference.scores(prompt.ids, len(prompt.ids) - 1)
        for position, (mine, theirs) in enumerate(zip(answer.logprobs[1:], scores.logprobs, strict=True), 1):
            assert mine is not None
            ledger.add_error(abs(mine - float(theirs)), f"{where}, {prompt.name}, prompt token {position}")
        ledger.num_tokens += len(prompt.ids) - 1
        ledger.num_prompts += 1
    return ledger
