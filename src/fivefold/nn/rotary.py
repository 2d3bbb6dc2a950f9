"""Rotary position embedding (Su et al. 2021), with the frequency scaling of Llama 3."""

from math import pi

import torch
from torch import Tensor

from fivefold.config.tree import Model, RopeScaling

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
    """Turns the pairs (i, i + head_dim / 2) of `x` `[..., sequence, head_dim]`, in at least float32."""
    compute = torch.promote_types(x.dtype, torch.float32)
    cosine, sine = (table.to(compute) for table in rotary)
    first, second = x.to(compute).chunk(2, dim=-1)
    turned = torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
    return turned.to(x.dtype)


def _scaled(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Low frequencies divided by `factor`, high ones kept, a linear blend between (Llama 3.1)."""
    wavelengths = 2 * pi / frequencies
    blend = (scaling.original_context / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blend = blend.clamp(0.0, 1.0)
    return frequencies * (blend + (1 - blend) / scaling.factor)
