"""Transformer: token ids to hidden rows, hidden rows to logits.

Owns the embedding, the layers, the final norm and the head. Knows flat tokens and positions only: which
sequence a token belongs to is in the attention plan. Called on the step thread; holds weights, no state.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch

from engine.model.config import ModelConfig
from engine.model.layers import Attention, DecoderLayer, RMSNorm
from engine.model.linear import DenseLinears, LinearFactory
from engine.model.rope import Rope, RopeRows
from engine.model.weights import EMBEDDING, FINAL_NORM, Weights, load_weights


class Layer(Protocol):
    """One layer or several: changes the residual stream `hidden [num_tokens, hidden_size]` in place."""

    def __call__(self, hidden: torch.Tensor, rope: RopeRows, attention: Attention) -> None: ...


class Transformer:
    """A decoder-only model in fp32."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        linears: LinearFactory,
        num_positions: int | None = None,
        layers: Sequence[Layer] | None = None,
    ) -> None:
        """`num_positions` bounds the rope tables; the model's whole context if not given.

        `layers` run one after the other; plain torch layers if not given.
        """
        self.config = config
        self._embedding = weights[EMBEDDING]
        device = self._embedding.device
        self._rope = Rope(config.rope, config.head_dim, num_positions or config.max_context, device)
        self._layers = layers or [
            DecoderLayer(config, index, weights, linears) for index in range(config.num_layers)
        ]
        self._norm = RMSNorm(weights[FINAL_NORM], config.rms_norm_eps)
        self._head = linears(["embed_tokens" if config.is_head_tied else "lm_head"])

    @classmethod
    def load(
        cls,
        path: Path,
        config: ModelConfig,
        num_positions: int | None = None,
        device: torch.device | str = "cpu",
    ) -> Transformer:
        """Read the checkpoint in `path`. Raises InvalidConfig when it does not fit `config`."""
        weights = {name: tensor.to(device) for name, tensor in load_weights(path, config).items()}
        with torch.inference_mode():
            return cls(config, weights, DenseLinears(weights), num_positions)

    @torch.inference_mode()
    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: Attention) -> torch.Tensor:
        """Run all layers over the tokens of a step.

        `token_ids` and `positions` are int64 `[num_tokens]`. Returns the residual stream before the final
        norm, fp32 `[num_tokens, hidden_size]`: `logits` takes the rows that are wanted.
        """
        hidden = self._embedding.index_select(0, token_ids).float()
        rope = self._rope.at(positions)
        for layer in self._layers:
            layer(hidden, rope, attention)
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`hidden [num_rows, hidden_size]` from `forward` to fp32 logits `[num_rows, vocab_size]`."""
        return self._head(self._norm(hidden))
