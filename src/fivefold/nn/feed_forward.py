"""The dense feed-forward block, gated or plain."""

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.config.tree import Model
from fivefold.nn.region import Projection

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


class GatedFeedForward(nn.Module):
    """SwiGLU (Shazeer 2020): down(silu(gate(x)) · up(x))."""

    def __init__(self, model: Model, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(model.hidden, width, bias=model.output_bias)
        self.up = nn.Linear(model.hidden, width, bias=model.output_bias)
        self.down = Projection(width, model.hidden, bias=model.output_bias)

    def forward(self, x: Tensor) -> Tensor:
        """`x` and the result: `[batch, sequence, hidden]`."""
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class PlainFeedForward(nn.Module):
    """GELU (Hendrycks & Gimpel 2016), exact or by its tanh: down(gelu(up(x)))."""

    def __init__(self, model: Model, width: int) -> None:
        super().__init__()
        self.activation = _ACTIVATIONS[model.activation]
        self.up = nn.Linear(model.hidden, width, bias=model.output_bias)
        self.down = Projection(width, model.hidden, bias=model.output_bias)

    def forward(self, x: Tensor) -> Tensor:
        """`x` and the result: `[batch, sequence, hidden]`."""
        return self.down(self.activation(self.up(x)))  # type: ignore[no-any-return]


def make_feed_forward(model: Model, width: int) -> nn.Module:
    """The model's feed-forward of a given width."""
    kind = GatedFeedForward if model.activation == "swiglu" else PlainFeedForward
    return kind(model, width)
