"""Normalisation of the residual stream."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fivefold.config.model import Model
from fivefold.nn.manual_backward import uses_manual_backward


def make_norm(model: Model) -> nn.Module:
    """The model's norm over its hidden width: RMSNorm (Zhang & Sennrich 2019) or LayerNorm (Ba et al. 2016)."""
    if model.norm == "rmsnorm":
        return RMSNorm(model.hidden, eps=model.norm_eps)
    return nn.LayerNorm(model.hidden, eps=model.norm_eps)


class RMSNorm(nn.RMSNorm):
    """weight · x / √(mean(x²) + eps), as torch's; torch has no kernel for it on CPUs (for LayerNorm it has)."""

    def forward(self, x: Tensor) -> Tensor:
        """`x` and the result: `[…, hidden]`."""
        if uses_manual_backward(x) and x.dtype == self.weight.dtype:
            return _RMSNorm.apply(x, self.weight, self.eps)  # type: ignore[no-any-return,no-untyped-call]
        return super().forward(x)


class _RMSNorm(torch.autograd.Function):
    """Saves its input and one number per row.

    It computes a weight gradient, so a schedule that splits backward runs it twice: a few passes over the residual
    stream, little beside a layer's matmuls.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        inverse = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()  # [..., 1]
        ctx.save_for_backward(x, weight, inverse)
        out: Tensor = (x * inverse).mul_(weight)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        rows, incoming = x.reshape(-1, x.shape[-1]), grad.reshape(-1, x.shape[-1])
        factors = inverse.reshape(-1)
        product = incoming * rows
        weight_grad = product.T.mv(factors)
        # per row: Σ_j grad_j · weight_j · x_j / (hidden · mean square), the component along x to subtract
        along = product.mv(weight).mul_(factors.square()).div_(x.shape[-1])
        result = torch.mul(incoming, weight, out=product)
        result.addcmul_(rows, along.unsqueeze(1), value=-1.0).mul_(factors.unsqueeze(1))
        return result.view(x.shape), weight_grad, None
