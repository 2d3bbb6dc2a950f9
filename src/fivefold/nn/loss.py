"""Cross-entropy of a linear head, chunk by chunk: the logits of a whole micro-batch never exist."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fivefold.nn.vocabulary import VocabularyShard

IGNORED = -100
"""The label of a token that is not counted."""

CHUNK_ELEMENTS = 1 << 22
"""Logits held at once: 16 MiB in float32, large enough for matmuls to run at full rate."""


def cross_entropy_sum(
    hidden: Tensor, weight: Tensor, labels: Tensor, shard: VocabularyShard | None = None
) -> Tensor:
    """Sum of −log softmax(hidden · weightᵀ)[label] over the tokens whose label is not `IGNORED`.

    Exact, in at least float32. The loss is linear in its incoming gradient, so the gradients are computed
    while a chunk's logits are at hand: three matmuls in all, none of them twice.

    Over a shard of the vocabulary no rank sees another's logits: what passes between them is, for each token, the
    logarithm of a rank's sum of exponentials, and the label's logit from the rank that holds it. The loss is then
    the whole one on every rank, and the gradient of `hidden` a part, to be summed over the ranks.

    Args:
        hidden: `[tokens, hidden]`, all tokens.
        weight: the head, `[vocabulary, hidden]`, or those rows of it that `shard` says.
        labels: `[tokens]`, int64.
        shard: the rows of the vocabulary that this rank holds; None = all.

    Returns:
        A scalar in float32, or float64 for float64 weights.

    Raises:
        ValueError: what is given is sharded otherwise, or is logits.
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
    """The value of `x`, with the gradient of `auxiliary`, a scalar, added to whatever gradient `x` gets.

    How a loss that arises on a pipeline stage enters that stage's backward, which starts from `x`: an operation's
    result that nothing else reads. The result is no view of it, for split backwards detach it.
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
