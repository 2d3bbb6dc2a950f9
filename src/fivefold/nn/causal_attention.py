"""Causal attention of whole sequences on CPUs, in blocks of queries.

A block computes scores only up to its last query, so half of the score matrix, all in batched matrix products.
Probabilities are saved for backward: about twice as fast as torch's flash kernel for CPUs, which recomputes them.
Partial sequences, for context parallel: `blocked_attention.py`.
"""

from math import sqrt
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_BLOCK = 128
"""Queries in a block."""


def blocked_causal_attention(
    query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None = None
) -> Tensor:
    """Softmax attention of each position to itself and those before it in its document.

    Keeps (T² + 128·T) / 2 probabilities per head for backward, for sequence length T.

    Args:
        query: `[batch, heads, sequence, head_dim]`.
        key: `[batch, kv_heads, sequence, head_dim]`, as is value; query head h reads KV head
            h · kv_heads / heads.
        documents: `[batch, sequence]`, the document each position is in; None = one a row.

    Returns:
        `[batch, heads, sequence, head_dim]`.
    """
    return _BlockedCausal.apply(query, key, value, documents)  # type: ignore[no-any-return,no-untyped-call]


class _BlockedCausal(torch.autograd.Function):
    """Internally the queries that share a KV head are adjacent: `[n, sequence · group, head_dim]` for the n KV heads of
    all rows. So a block of queries is one matrix per KV head, and a view. The result is laid out as
    `[batch, sequence, heads, head_dim]`, as the output projection reads it, which therefore saves no copy.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None) -> Tensor:
        batch, kv_heads, sequence, head_dim = key.shape
        group = query.shape[1] // kv_heads
        grouped = query.new_empty(batch, kv_heads, sequence, group, head_dim)
        by_position = torch.unflatten(query, 1, (kv_heads, group)).transpose(2, 3)
        queries = torch.mul(by_position, 1 / sqrt(head_dim), out=grouped).flatten(2, 3).flatten(0, 1)
        keys, values = key.reshape(-1, sequence, head_dim), value.reshape(-1, sequence, head_dim)
        out = query.new_empty(batch, sequence, kv_heads, group, head_dim)
        future = _future(group, query)
        kept = []
        for start, end in _blocks(sequence):
            rows = slice(start * group, end * group)
            scores = torch.bmm(queries[:, rows], keys[:, :end].transpose(1, 2))
            scores[..., start:].add_(future[: (end - start) * group, : end - start])
            if documents is not None:
                elsewhere = documents[:, start:end].unsqueeze(2) != documents[:, :end].unsqueeze(1)
                by_row = elsewhere.repeat_interleave(group, dim=1).repeat_interleave(kv_heads, dim=0)
                scores.masked_fill_(by_row, float("-inf"))
            probabilities = scores.softmax(dim=-1)
            attended = torch.bmm(probabilities, values[:, :end])
            out[:, start:end] = attended.view(batch, kv_heads, end - start, group, head_dim).transpose(1, 2)
            kept.append(probabilities)
        ctx.save_for_backward(queries, keys, values, out, *kept)
        return out.flatten(2, 3).transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        queries, keys, values, out, *kept = ctx.saved_tensors
        batch, sequence, kv_heads, group, head_dim = out.shape
        by_position = torch.unflatten(grad.transpose(1, 2), 2, (kv_heads, group))
        mean = _rows((by_position * out).sum(dim=-1, keepdim=True))  # Σ_j p_ij · dp_ij
        grads = _rows(by_position)
        query_grad = torch.empty_like(queries)
        key_grad, value_grad = torch.zeros_like(keys), torch.zeros_like(values)
        for (start, end), probabilities in zip(_blocks(sequence), kept, strict=True):
            rows = slice(start * group, end * group)
            value_grad[:, :end].baddbmm_(probabilities.transpose(1, 2), grads[:, rows])
            score_grad = torch.bmm(grads[:, rows], values[:, :end].transpose(1, 2))
            score_grad.sub_(mean[:, rows]).mul_(probabilities)
            query_grad[:, rows] = torch.bmm(score_grad, keys[:, :end])
            key_grad[:, :end].baddbmm_(score_grad.transpose(1, 2), queries[:, rows])
        by_head = query_grad.view(batch, kv_heads, sequence, group, head_dim).transpose(2, 3)
        result = by_head.new_empty(by_head.shape)
        torch.mul(by_head, 1 / sqrt(head_dim), out=result)
        shape = (batch, kv_heads, sequence, head_dim)
        return result.flatten(1, 2), key_grad.view(shape), value_grad.view(shape), None


def _blocks(sequence: int) -> list[tuple[int, int]]:
    return [(start, min(start + _BLOCK, sequence)) for start in range(0, sequence, _BLOCK)]


def _future(group: int, like: Tensor) -> Tensor:
    """The causal mask added to the scores of a block's queries (times group): −∞ for keys after the query."""
    forbidden = torch.full((_BLOCK, _BLOCK), float("-inf"), dtype=like.dtype, device=like.device).triu_(1)
    return forbidden.repeat_interleave(group, dim=0)


def _rows(x: Tensor) -> Tensor:
    """`[batch, sequence, kv_heads, group, d]` → `[batch · kv_heads, sequence · group, d]`, contiguous."""
    return x.transpose(1, 2).flatten(2, 3).flatten(0, 1)
