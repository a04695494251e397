"""Sampling that can be repeated: a token is a pure function of logits, parameters, history, seed and place.

Owns the order of operations (bias, penalties, mask, temperature, top-k, top-p, min-p), the counter-based
noise and reported log-probabilities. Keeps no state between calls. Used on the step thread.
"""

from engine.sampling.logprobs import token_logprobs
from engine.sampling.row import SamplingRow, row_of
from engine.sampling.sampled import SampledColumns, SampledToken
from engine.sampling.sampler import Sampler
from engine.sampling.settings import SamplingColumns, columns_of, join_columns

__all__ = [
    "SampledColumns",
    "SampledToken",
    "Sampler",
    "SamplingColumns",
    "SamplingRow",
    "columns_of",
    "join_columns",
    "row_of",
    "token_logprobs",
]
