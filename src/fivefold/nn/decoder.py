"""The decoder: embedding, layers, final norm, head and loss."""

from typing import Literal

import torch
from torch import Tensor, nn

from fivefold.config.tree import Model
from fivefold.nn.attention import Attention, Segments
from fivefold.nn.feed_forward import make_feed_forward
from fivefold.nn.loss import cross_entropy_sum
from fivefold.nn.norm import make_norm
from fivefold.nn.recompute import Recompute
from fivefold.nn.rotary import Rotary, rotary_table


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, model: Model, recompute: Recompute) -> None:
        super().__init__()
        self.attention_norm = make_norm(model)
        self.attention = Attention(model, recompute)
        self.feed_forward_norm = make_norm(model)
        self.feed_forward = make_feed_forward(model, model.ffn)
        self.run = recompute.layer(self._run)

    def forward(self, x: Tensor, rotary: Rotary | None, segments: Segments) -> Tensor:
        """`x` and the result: `[batch, sequence, hidden]`."""
        return self.run(x, rotary, segments)

    def _run(self, x: Tensor, rotary: Rotary | None, segments: Segments) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotary, segments)
        return x + self.feed_forward(self.feed_forward_norm(x))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """A decoder of the family that `model` describes. Layers are keyed by their number in the whole model."""

    def __init__(
        self, model: Model, recompute: Literal["none", "attention", "elementwise", "full"] = "none"
    ) -> None:
        super().__init__()
        self.model = model
        self.embedding = nn.Embedding(model.vocab, model.hidden)
        if model.positions == "learned":
            self.positions = nn.Embedding(model.max_positions, model.hidden)
        if model.embedding_norm:
            self.embedding_norm = make_norm(model)
        modes = Recompute(recompute)
        self.layers = nn.ModuleDict({str(index): DecoderLayer(model, modes) for index in range(model.layers)})
        self.norm = make_norm(model)
        self.head = nn.Linear(model.hidden, model.vocab, bias=False)
        if model.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, segments: Segments, labels: Tensor | None = None) -> Tensor:
        """The summed loss over counted labels, or the logits where no labels are given.

        Args:
            tokens: `[batch, sequence]`, int64.
            segments: the documents packed in `tokens`.
            labels: `[batch, sequence]`, int64; `loss.IGNORED` is not counted.

        Returns:
            A scalar, or logits `[batch, sequence, vocabulary]`.
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self._embedded(tokens, positions)
        rotary = rotary_table(self.model, positions) if self.model.positions == "rotary" else None
        for layer in self.layers.values():
            x = layer(x, rotary, segments)
        x = self.norm(x)
        if labels is None:
            return self.head(x)  # type: ignore[no-any-return]
        return cross_entropy_sum(x.flatten(0, 1), self.head.weight, labels.flatten())

    def _embedded(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """`[batch, sequence]` → `[batch, sequence, hidden]`; learned positions are those in the packed row."""
        x: Tensor = self.embedding(tokens)
        if self.model.positions == "learned":
            x = x + self.positions(positions)
        if self.model.embedding_norm:
            x = self.embedding_norm(x)
        return x
