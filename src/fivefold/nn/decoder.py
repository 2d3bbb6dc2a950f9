"""The decoder: embedding, layers, final norm, head and loss."""

from typing import Literal

import torch
from torch import Tensor, nn

from fivefold.config.tree import Model
from fivefold.nn.attention import Attention, Segments
from fivefold.nn.feed_forward import FeedForward
from fivefold.nn.loss import cross_entropy_sum
from fivefold.nn.recompute import Recompute
from fivefold.nn.rotary import Rotary, rotary_table


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, model: Model, recompute: Recompute) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(model.hidden, eps=model.norm_eps)
        self.attention = Attention(model, recompute)
        self.feed_forward_norm = nn.RMSNorm(model.hidden, eps=model.norm_eps)
        self.feed_forward = FeedForward(model)
        self.run = recompute.layer(self._run)

    def forward(self, x: Tensor, rotary: Rotary, segments: Segments) -> Tensor:
        """`x` and the result: `[batch, sequence, hidden]`."""
        return self.run(x, rotary, segments)

    def _run(self, x: Tensor, rotary: Rotary, segments: Segments) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotary, segments)
        return x + self.feed_forward(self.feed_forward_norm(x))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """A Llama-style decoder. Layers are keyed by their number in the whole model."""

    def __init__(
        self, model: Model, recompute: Literal["none", "attention", "elementwise", "full"] = "none"
    ) -> None:
        super().__init__()
        self.model = model
        self.embedding = nn.Embedding(model.vocab, model.hidden)
        modes = Recompute(recompute)
        self.layers = nn.ModuleDict({str(index): DecoderLayer(model, modes) for index in range(model.layers)})
        self.norm = nn.RMSNorm(model.hidden, eps=model.norm_eps)
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
        rotary = rotary_table(self.model, torch.arange(tokens.shape[1], device=tokens.device))
        x = self.embedding(tokens)
        for layer in self.layers.values():
            x = layer(x, rotary, segments)
        x = self.norm(x)
        if labels is None:
            return self.head(x)  # type: ignore[no-any-return]
        return cross_entropy_sum(x.flatten(0, 1), self.head.weight, labels.flatten())
