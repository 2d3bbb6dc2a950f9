"""Where a layer's work leaves the residual stream and comes back to it.

Between the two points tensor-parallel ranks compute parts of one sum; outside of them each holds the stream,
whole or (sequence parallel) a share of its tokens. nn knows no ranks: `parallel/tensor.py` puts its own regions here.
"""

import torch.nn.functional as F
from torch import Tensor, nn


class Region:
    """The region of one micro-batch on a rank that computes alone: nothing is summed."""

    def enter(self, x: Tensor) -> Tensor:
        """The residual stream as a layer reads it: all tokens, `[batch, sequence, hidden]`."""
        return x

    def leave(self, x: Tensor) -> Tensor:
        """The sum of what the ranks computed, `[batch, sequence, hidden]`, as the residual stream holds it."""
        return x

    def stream_shape(self, shape: tuple[int, int], hidden: int) -> tuple[int, ...]:
        """Of the residual stream here, for a micro-batch of `shape` `(batch, sequence)`."""
        return (*shape, hidden)

    def own(self, per_token: Tensor) -> Tensor:
        """What belongs to the tokens of this rank's residual stream, of something that goes by token.

        Args:
            per_token: `[sequence]` or `[batch, sequence]`, not differentiated.
        """
        return per_token


WHOLE = Region()


class Projection(nn.Linear):
    """A linear layer inside a region whose results are summed over ranks.

    Attributes:
        bias_share: how often this rank counts the bias: the ranks of a sum must count it once together.
    """

    bias_share = 1.0

    def forward(self, input: Tensor) -> Tensor:
        """`[..., in]` → `[..., out]`, a part of the sum."""
        if self.bias is None or self.bias_share == 1.0:
            return F.linear(input, self.weight, self.bias)
        return F.linear(input, self.weight, self.bias * self.bias_share)
