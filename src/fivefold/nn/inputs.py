"""The input of a decoder's forward."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fivefold.nn.attention import Segments


@dataclass(frozen=True, slots=True)
class Inputs:
    """The tokens of a micro-batch and their place in the step's global batch.

    Attributes:
        tokens: `[batch, sequence]`, int64.
        segments: the documents packed in them.
        labels: `[batch, sequence]`, int64, `loss.IGNORED` where nothing is predicted; None = return logits.
        positions: `[sequence]`, int64, positions of the tokens in their row; None = 0, 1, 2, ….
        rows: `[batch]`, int64, numbers of the rows in the step's global batch; None = 0, 1, 2, ….
        dropout_key: `dropout.step_key` of the step; None = nothing is dropped (evaluation, generation).
    """

    tokens: Tensor
    segments: Segments
    labels: Tensor | None = None
    positions: Tensor | None = None
    rows: Tensor | None = None
    dropout_key: int | None = None

    def row_positions(self) -> Tensor:
        """`positions`, written out."""
        if self.positions is not None:
            return self.positions
        return torch.arange(self.tokens.shape[1], device=self.tokens.device)

    def row_numbers(self) -> Tensor:
        """`rows`, written out."""
        if self.rows is not None:
            return self.rows
        return torch.arange(self.tokens.shape[0], device=self.tokens.device)
