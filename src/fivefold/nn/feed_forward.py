"""The dense feed-forward block."""

import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.config.tree import Model


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020): down(silu(gate(x)) · up(x))."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.gate = nn.Linear(model.hidden, model.ffn, bias=False)
        self.up = nn.Linear(model.hidden, model.ffn, bias=False)
        self.down = nn.Linear(model.ffn, model.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`x` and the result: `[batch, sequence, hidden]`."""
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]
