"""Reference: what transformers computes for a sequence, and the comparison of a system's tokens with it.

Owns the cache of oracle results on disk (keyed by the checkpoint's digest and the token ids, so that grids do
not compute twice), the near-tie rule, and the ledger that counts near ties. The arithmetic itself is in
`tests.oracle`.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from engine.model.bundled import cache_folder
from tests import oracle

NEAR_TIE = 1e-3
TOLERANCE = 1e-3
MAX_NEAR_TIE_SHARE = 1 / 2000
NUM_CANDIDATES = 24
RECENT_BYTES = 256 << 20

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-softmax of the reference at the last positions of a sequence.

    `logprobs` `[n]` of the tokens that stand there; `top_ids`, `top_logprobs` `[n, NUM_CANDIDATES]`, best
    first.
    """

    logprobs: Floats
    top_ids: Ints
    top_logprobs: Floats


class Reference:
    """The oracle of one checkpoint folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._cache = cache_folder() / "oracle" / _digest(folder)
        self._cache.mkdir(parents=True, exist_ok=True)
        self._recent: OrderedDict[tuple[tuple[int, ...], int], Floats] = OrderedDict()

    def scores(self, ids: Sequence[int], num_last: int) -> Scores:
        """Of the last `num_last` tokens of `ids`, each given all before it; one forward pass, or the disk."""
        assert 0 < num_last < len(ids), "the first token has no prediction"
        key = hashlib.blake2b(np.asarray(ids, np.int32).tobytes(), digest_size=16).hexdigest()
        path = self._cache / f"{key}-{num_last}.npz"
        if path.exists():
            with np.load(path) as stored:
                return Scores(stored["logprobs"], stored["top_ids"], stored["top_logprobs"])
        scores = self._compute(ids, num_last)
        making = path.with_suffix(f".{id(scores)}.tmp.npz")
        np.savez(making, logprobs=scores.logprobs, top_ids=scores.top_ids, top_logprobs=scores.top_logprobs)
        making.rename(path)
        return scores

    def logits(self, ids: Sequence[int], num_last: int) -> Floats:
        """Raw logits that predict the last `num_last` tokens of `ids`: `[num_last, vocab_size]`."""
        key = (tuple(ids[:-1]), num_last)
        if key not in self._recent:
            rows: Floats = oracle.oracle_logits(self.folder, key[0], num_last).numpy()
            self._recent[key] = rows
            while len(self._recent) > 1 and sum(kept.nbytes for kept in self._recent.values()) > RECENT_BYTES:
                self._recent.popitem(last=False)
        return self._recent[key]

    def next_logprobs(self, ids: Sequence[int]) -> Floats:
        """Log-softmax `[vocab_size]` of what follows `ids`."""
        return log_softmax(self.logits([*ids, 0], 1))[0]

    def _compute(self, ids: Sequence[int], num_last: int) -> Scores:
        logprobs = log_softmax(self.logits(ids, num_last))
        width = min(NUM_CANDIDATES, logprobs.shape[1])
        top = np.argpartition(-logprobs, width - 1, axis=1)[:, :width]
        order = np.lexsort((top, -np.take_along_axis(logprobs, top, 1)), axis=1)
        top = np.take_along_axis(top, order, 1)
        actual = np.asarray(ids[-num_last:], np.int64)[:, None]
        return Scores(
            np.take_along_axis(logprobs, actual, 1)[:, 0],
            top.astype(np.int32),
            np.take_along_axis(logprobs, top, 1),
        )


def log_softmax(logits: Floats) -> Floats:
    rows = logits.astype(np.float64)
    rows -= rows.max(axis=1, keepdims=True)
    rows -= np.log(np.exp(rows).sum(axis=1, keepdims=True))
    return rows.astype(np.float32)


@dataclass(slots=True)
class Ledger:
    """What was compared: tokens, divergences that were near ties, and the largest logprob error."""

    num_tokens: int = 0
    num_prompts: int = 0
    near_ties: list[str] = field(default_factory=list)
    max_error: float = 0.0

    def add(self, other: Ledger) -> None:
        """What another comparison found, too."""
        self.num_tokens += other.num_tokens
        self.num_prompts += other.num_prompts
        self.near_ties += other.near_ties
        self.max_error = max(self.max_error, other.max_error)

    def check_share(self) -> None:
        """More than one near tie in 2,000 tokens is no coincidence any more."""
        allowed = max(1, math.floor(self.num_tokens * MAX_NEAR_TIE_SHARE))
        assert len(self.near_ties) <= allowed, (
            f"{len(self.near_ties)} near ties in {self.num_tokens} tokens: {self.near_ties}"
        )

    def add_error(self, error: float, where: str) -> None:
        assert error <= TOLERANCE, f"{where}: a logprob is off by {error:.5f}"
        self.max_error = max(self.max_error, error)

    def __str__(self) -> str:
        counts = f"{self.num_prompts} prompts, {self.num_tokens} tokens, {len(self.near_ties)} near ties"
        return f"{counts}, max logprob error {self.max_error:.1e}" if self.max_error else counts


def check_greedy(
    reference: Reference,
    prompt: Sequence[int],
    output: Sequence[int],
    ledger: Ledger,
    where: str,
    logprobs: Sequence[float | None] = (),
) -> None:
    """Each token is the reference's best given the prompt and the tokens before it, but for near ties.

    Reported `logprobs`, if any, must be the reference's. After a near tie the rest is checked by teacher
    forcing, which is what scoring the emitted sequence means.
    """
    assert output, f"{where}: no tokens"
    scores = reference.scores([*prompt, *output], len(output))
    for position, token_id in enumerate(output):
        gap = float(scores.top_logprobs[position, 0] - scores.logprobs[position])
        if gap > 0.0:
            best = int(scores.top_ids[position, 0])
            story = f"{where}: token {position} is {token_id}, the reference says {best}, gap {gap:.6f}"
            assert gap < NEAR_TIE, f"{story}; output {list(output)}"
            ledger.near_ties.append(story)
        if logprobs:
            reported = logprobs[position]
            assert reported is not None, f"{where}: token {position} has no logprob"
            ledger.add_error(abs(reported - float(scores.logprobs[position])), f"{where}, token {position}")
    ledger.num_tokens += len(output)
    ledger.num_prompts += 1


def _digest(folder: Path) -> str:
    """Of configuration and weights, contents and all."""
    digest = hashlib.blake2b(digest_size=12)
    for path in sorted([folder / "config.json", *folder.glob("*.safetensors")]):
        digest.update(path.name.encode())
        with path.open("rb") as stream:
            while piece := stream.read(1 << 24):
                digest.update(piece)
    return digest.hexdigest()
