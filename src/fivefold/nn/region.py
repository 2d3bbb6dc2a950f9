"""Regions: the parts of a layer (attention, feed-forward) that tensor-parallel ranks compute together.

Within a region each rank computes a part of a sum; outside each rank holds the residual stream, whole or (sequence
parallel) for a share of the tokens. This package knows no ranks: `parallel/tensor.py` provides the regions that
communicate.
"""

import torch.nn.functional as F
from torch import Tensor, nn


class Region:
    """The region without tensor parallel: nothing is communicated."""

    def enter(self, x: Tensor) -> Tensor:
        """From the residual stream to the input of the region: all tokens, `[batch, sequence, hidden]`."""
        return x

    def leave(self, x: Tensor) -> Tensor:
        """Sums the ranks' outputs of the region, `[batch, sequence, hidden]`, in the form of the residual stream."""
        return x

    def stream_shape(self, shape: tuple[int, int], hidden: int) -> tuple[int, ...]:
        """The shape of the residual stream on this rank for a micro-batch of `shape` `(batch, sequence)`."""
        return (*shape, hidden)

    def own(self, per_token: Tensor) -> Tensor:
        """The values of a per-token quantity for the tokens of this rank's residual stream.

        Args:
            per_token: `[sequence]` or `[batch, sequence]`, not differentiated.
        """
        return per_token


WHOLE = Region()


class Projection(nn.Linear):
    """A row-parallel linear layer at the end of a region, whose results are summed over ranks.

    Attributes:
        bias_share: the factor on the bias on this rank; over the ranks of a sum the factors add up to 1.
    """

    bias_share = 1.0

    def forward(self, input: Tensor) -> Tensor:
        """`[..., in]` → `[..., out]`, a part of the sum."""
        if self.bias is None or self.bias_share == 1.0:
            return F.linear(input, self.weight, self.bias)
        return F.linear(input, self.weight, self.bias * self.bias_share)
