"""Cross-entropy of a linear head, in chunks of tokens: the logits of a whole micro-batch are never in memory."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fivefold.nn.vocabulary import VocabularyShard

IGNORED = -100
"""The label of a token that the loss does not count."""

CHUNK_ELEMENTS = 1 << 22
"""Logits of a chunk: 16 MiB in float32, large enough for matmuls to run at full rate."""


def cross_entropy_sum(
    hidden: Tensor, weight: Tensor, labels: Tensor, shard: VocabularyShard | None = None
) -> Tensor:
    """Sum of −log softmax(hidden · weightᵀ)[label] over the tokens whose label is not `IGNORED`.

    Exact, in at least float32. The gradients are computed in the forward, while a chunk's logits are in memory
    (backward only scales them): three matmuls in all, none of them repeated.

    With a sharded vocabulary, ranks exchange two numbers per token: the logarithm of a rank's sum of exponentials, and
    the label's logit on the rank that holds it. Every rank then has the whole loss, and a part of the gradient of
    `hidden`, to be summed over the ranks.

    Args:
        hidden: `[tokens, hidden]`, all tokens.
        weight: the head, `[vocabulary, hidden]`, or the rows of it that `shard` describes.
        labels: `[tokens]`, int64.
        shard: the rows of the vocabulary that this rank holds; None = all.

    Returns:
        A scalar in float32, or float64 for float64 weights.

    Raises:
        ValueError: shapes do not match: another sharding, or logits instead of hidden states.
    """
    if hidden.dim() != 2 or hidden.shape[1] != weight.shape[1] or len(hidden) != len(labels):
        raise ValueError(
            f"the loss takes the head's input, [{len(labels)} tokens, {weight.shape[1]} hidden], and makes the "
            f"logits itself; got {list(hidden.shape)}"
        )
    if shard is not None:
        shard.check(weight)
    needs_gradient = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    return _CrossEntropySum.apply(hidden, weight, labels, shard, needs_gradient)  # type: ignore[no-any-return,no-untyped-call]


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        shard: VocabularyShard | None,
        needs_gradient: bool,
    ) -> Tensor:
        exact = torch.promote_types(weight.dtype, torch.float32)
        loss = torch.zeros((), dtype=exact, device=hidden.device)
        hidden_gradient = torch.empty_like(hidden) if needs_gradient else None
        weight_gradient = torch.zeros_like(weight, dtype=exact) if needs_gradient else None
        for chunk in _chunks(hidden.shape[0], shard.most if shard else weight.shape[0]):
            counted = labels[chunk] != IGNORED
            rows, mine = shard.local(labels[chunk]) if shard else (labels[chunk].where(counted, 0), counted)
            rows = rows.unsqueeze(1)
            logits = (hidden[chunk] @ weight.T).to(exact)
            highest = (
                logits.amax(dim=1) if logits.shape[1] else logits.new_full(logits.shape[:1], float("-inf"))
            )
            wanted = _wanted(logits, rows, mine)
            powers = logits.sub_(highest.unsqueeze(1)).exp_()
            normalizer = highest + powers.sum(dim=1).log()
            if shard is not None:
                normalizer, wanted = _over_ranks(normalizer, wanted, shard)
            loss += (normalizer - wanted).where(counted, 0.0).sum()
            if hidden_gradient is None or weight_gradient is None:
                continue
            # d loss / d logits = softmax − one-hot, zero where the token is not counted
            grad = powers.mul_((highest - normalizer).exp_().where(counted, 0.0).unsqueeze(1))
            if grad.shape[1]:
                grad.scatter_add_(1, rows, -(mine & counted).unsqueeze(1).to(exact))
            grad = grad.to(weight.dtype)
            hidden_gradient[chunk] = grad @ weight
            if exact == weight.dtype:
                weight_gradient.addmm_(grad.T, hidden[chunk])
            else:
                weight_gradient += grad.T @ hidden[chunk]
        ctx.weight_dtype = weight.dtype
        ctx.save_for_backward(hidden_gradient, weight_gradient)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        hidden_gradient, weight_gradient = ctx.saved_tensors
        return (
            hidden_gradient * scale.to(hidden_gradient.dtype),
            (weight_gradient * scale).to(ctx.weight_dtype),
            None,
            None,
            None,
        )


def _chunks(tokens: int, vocabulary_rows: int) -> Iterator[slice]:
    size = max(1, CHUNK_ELEMENTS // vocabulary_rows)
    return (slice(start, start + size) for start in range(0, tokens, size))


def _wanted(logits: Tensor, rows: Tensor, mine: Tensor) -> Tensor:
    """Each token's logit of its label, `[tokens]`; −∞ where this rank does not hold it."""
    nowhere = logits.new_full(mine.shape, float("-inf"))
    return logits.gather(1, rows).squeeze(1).where(mine, nowhere) if logits.shape[1] else nowhere


def _over_ranks(normalizer: Tensor, wanted: Tensor, shard: VocabularyShard) -> tuple[Tensor, Tensor]:
    """log Σ exp of each token's logits, and its label's logit, over the whole vocabulary; each `[tokens]`.

    A label that no rank holds has −∞ for its logit, so the loss is not finite and the step is not taken.
    """
    normalizers, wanteds = shard.gather(torch.stack((normalizer, wanted))).unbind(dim=1)
    return normalizers.logsumexp(dim=0), wanteds.amax(dim=0)


def add_auxiliary_gradient(loss: Tensor, auxiliary: Tensor) -> Tensor:
    """The value of `loss`, with the gradient of `loss + auxiliary`. Both are scalars."""
    return loss + (auxiliary - auxiliary.detach()).to(loss.dtype)


def attach_auxiliary(x: Tensor, auxiliary: Tensor) -> Tensor:
    """The value of `x`; backward adds the gradient of the scalar `auxiliary`.

    This is how an auxiliary loss of a pipeline stage enters the stage's backward, which starts from `x`. `x` must not
    be used elsewhere. The result is not a view of `x`, because split backwards detach it.
    """
    return _AttachAuxiliary.apply(x, auxiliary)  # type: ignore[no-any-return,no-untyped-call]


class _AttachAuxiliary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, auxiliary: Tensor) -> Tensor:
        ctx.auxiliary = auxiliary.dtype, auxiliary.device
        ctx.mark_dirty(x)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        dtype, device = ctx.auxiliary
        return gradient, torch.ones((), dtype=dtype, device=device)
