"""Rotary position embedding (Su et al. 2021), with the frequency scaling of Llama 3."""

from math import pi
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fivefold.config.model import Model, RopeScaling
from fivefold.nn.manual_backward import uses_manual_backward

Rotary = tuple[Tensor, Tensor]
"""Cosines and sines, each `[sequence, head_dim / 2]`."""


def rotary_table(model: Model, positions: Tensor) -> Rotary:
    """Cosines and sines at `positions` `[sequence]`, in float64: later cast to what they multiply."""
    exponent = (
        torch.arange(0, model.head_dim, 2, dtype=torch.float64, device=positions.device) / model.head_dim
    )
    frequencies = model.rope_theta**-exponent
    if model.rope_scaling is not None:
        frequencies = _scaled(frequencies, model.rope_scaling)
    angles = torch.outer(positions.to(torch.float64), frequencies)
    return angles.cos(), angles.sin()


def apply_rotary(x: Tensor, rotary: Rotary) -> Tensor:
    """Rotates the pairs (i, i + head_dim / 2) of `x` `[batch, heads, sequence, head_dim]`, in at least float32."""
    if uses_manual_backward(x):
        return _Rotate.apply(x, *rotary)  # type: ignore[no-any-return,no-untyped-call]
    compute = torch.promote_types(x.dtype, torch.float32)
    cosine, sine = (table.to(compute) for table in rotary)
    first, second = x.to(compute).chunk(2, dim=-1)
    rotated = torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
    return rotated.to(x.dtype)


class _Rotate(torch.autograd.Function):
    """Saves only the tables: backward rotates in the opposite direction.

    The result is contiguous by heads, as attention reads it; the gradient by positions, as projections read it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        return _rotate(x, cosine, sine, x.new_empty(x.shape))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cosine, sine = ctx.saved_tensors
        batch, heads, sequence, head_dim = grad.shape
        out = grad.new_empty(batch, sequence, heads, head_dim).transpose(1, 2)
        return _rotate(grad, cosine, -sine, out), None, None


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor, out: Tensor) -> Tensor:
    """Into `out`, which is not `x`."""
    cosine, sine = cosine.to(x.dtype), sine.to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    first_out, second_out = out.chunk(2, dim=-1)
    torch.mul(first, cosine, out=first_out).addcmul_(second, sine, value=-1.0)
    torch.mul(second, cosine, out=second_out).addcmul_(first, sine)
    return out


def _scaled(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Low frequencies divided by `factor`, high ones kept, a linear blend between (Llama 3.1)."""
    wavelengths = 2 * pi / frequencies
    blend = (scaling.original_context / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blend = blend.clamp(0.0, 1.0)
    return frequencies * (blend + (1 - blend) / scaling.factor)
