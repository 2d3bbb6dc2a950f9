"""Cross-entropy of a linear head, chunk by chunk: the logits of a whole micro-batch never exist."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORED = -100
"""The label of a token that is not counted."""

_CHUNK_ELEMENTS = 1 << 22
"""Logits held at once: 16 MiB in float32, large enough for matmuls to run at full rate."""


def cross_entropy_sum(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Sum of −log softmax(hidden · weightᵀ)[label] over the tokens whose label is not `IGNORED`.

    Exact, in at least float32. The loss is linear in its incoming gradient, so the gradients are computed
    while a chunk's logits are at hand: three matmuls in all, none of them twice.

    Args:
        hidden: `[tokens, hidden]`.
        weight: the head, `[vocabulary, hidden]`.
        labels: `[tokens]`, int64.

    Returns:
        A scalar in float32, or float64 for float64 weights.
    """
    needs_gradient = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    return _CrossEntropySum.apply(hidden, weight, labels, needs_gradient)  # type: ignore[no-any-return,no-untyped-call]


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, needs_gradient: bool) -> Tensor:
        exact = torch.promote_types(weight.dtype, torch.float32)
        loss = torch.zeros((), dtype=exact, device=hidden.device)
        hidden_gradient = torch.empty_like(hidden) if needs_gradient else None
        weight_gradient = torch.zeros_like(weight, dtype=exact) if needs_gradient else None
        rows = max(1, _CHUNK_ELEMENTS // weight.shape[0])
        for start in range(0, hidden.shape[0], rows):
            chunk = slice(start, start + rows)
            counted = labels[chunk] != IGNORED
            target = labels[chunk].where(counted, 0).unsqueeze(1)
            logits = (hidden[chunk] @ weight.T).to(exact)
            highest = logits.amax(dim=1, keepdim=True)
            at_target = logits.gather(1, target) - highest
            powers = logits.sub_(highest).exp_()
            total = powers.sum(dim=1, keepdim=True)
            loss += (total.log() - at_target).squeeze(1).where(counted, 0.0).sum()
            if hidden_gradient is None or weight_gradient is None:
                continue
            # d loss / d logits = softmax − one-hot, zero where the token is not counted
            kept = counted.unsqueeze(1).to(exact)
            slope = powers.mul_(kept / total).scatter_add_(1, target, -kept).to(weight.dtype)
            hidden_gradient[chunk] = slope @ weight
            if exact == weight.dtype:
                weight_gradient.addmm_(slope.T, hidden[chunk])
            else:
                weight_gradient += slope.T @ hidden[chunk]
        ctx.weight_dtype = weight.dtype
        ctx.save_for_backward(hidden_gradient, weight_gradient)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden_gradient, weight_gradient = ctx.saved_tensors
        return (
            hidden_gradient * scale.to(hidden_gradient.dtype),
            (weight_gradient * scale).to(ctx.weight_dtype),
            None,
            None,
        )


def with_gradient_of(loss: Tensor, auxiliary: Tensor) -> Tensor:
    """The value of `loss`, with the gradient of `loss + auxiliary`. Both are scalars."""
    return loss + (auxiliary - auxiliary.detach()).to(loss.dtype)
