"""The dense feed-forward block, gated or plain."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fivefold.config.model import Model
from fivefold.nn.chain import Chain
from fivefold.nn.manual_backward import uses_manual_backward
from fivefold.nn.region import Projection

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up, of one shape."""
    if uses_manual_backward(gate):
        return _SwiGLU.apply(gate, up)  # type: ignore[no-any-return,no-untyped-call]
    return F.silu(gate) * up


class _SwiGLU(torch.autograd.Function):
    """Keeps its two inputs; the activation is computed again in backward."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        gate_grad = torch.ops.aten.silu_backward(grad * up, gate)
        return gate_grad, F.silu(gate).mul_(grad)


class GatedFeedForward(nn.Module):
    """SwiGLU (Shazeer 2020): down(silu(gate(x)) · up(x))."""

    def __init__(self, model: Model, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(model.hidden, width, bias=model.output_bias)
        self.up = nn.Linear(model.hidden, width, bias=model.output_bias)
        self.down = Projection(width, model.hidden, bias=model.output_bias)
        self.activated = Chain(swiglu)

    def forward(self, x: Tensor) -> Tensor:
        """`x` and the result: `[batch, sequence, hidden]`."""
        return self.down(self.activated(self.gate(x), self.up(x)))  # type: ignore[no-any-return]


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
