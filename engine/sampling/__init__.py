"""Sampling that can be repeated: a token is a pure function of logits, parameters, history, seed and place.

Owns the order of operations (bias, penalties, mask, temperature, top-k, top-p, min-p), the counter-based
noise and reported log-probabilities. Keeps no state between calls. Used on the step thread.
"""

from engine.sampling.logprobs import token_logprobs
from engine.sampling.row import SamplingRow, row_of
from engine.sampling.sampler import Sampler

__all__ = ["Sampler", "SamplingRow", "row_of", "token_logprobs"]
