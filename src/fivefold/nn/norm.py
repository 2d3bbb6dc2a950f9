"""Normalisation of the residual stream."""

from torch import nn

from fivefold.config.tree import Model


def make_norm(model: Model) -> nn.Module:
    """The model's norm over its hidden width: RMSNorm (Zhang & Sennrich 2019) or LayerNorm (Ba et al. 2016)."""
    if model.norm == "rmsnorm":
        return nn.RMSNorm(model.hidden, eps=model.norm_eps)
    return nn.LayerNorm(model.hidden, eps=model.norm_eps)
