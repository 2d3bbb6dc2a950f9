"""Pieces of attention, as context parallelism has them: blocks of queries that see only the keys up to their end, or
any queries and any keys. Whole rows: `causal_attention.py`.

Half the work of a full score matrix, all of it in batched matrix products. The probabilities are kept for
backward, which on CPUs is about twice as fast as torch's flash kernel that computes them again; or they are
computed again here too, from the logarithm of their normaliser, where they would be too many to keep.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import sqrt
from typing import NamedTuple

import torch
from torch import Tensor

_BLOCK = 128
"""Queries in a block."""
_BLOCK_ELEMENTS = 1 << 24
"""Scores of a block, where they are not kept: batch rows and heads are taken in runs that stay below."""


def grouped(query: Tensor, kv_heads: int) -> Tensor:
    """`[batch, heads, sequence, head_dim]` → `[batch · kv_heads, group, sequence, head_dim]`: the queries of one
    block that share a KV head become rows of one matrix."""
    batch, heads, sequence, head_dim = query.shape
    return query.reshape(batch * kv_heads, heads // kv_heads, sequence, head_dim)


def per_head(documents: Tensor | None, kv_heads: int) -> Tensor | None:
    """`[batch, sequence]` → `[batch · kv_heads, sequence]`."""
    return None if documents is None else documents.repeat_interleave(kv_heads, dim=0)


class Visible(NamedTuple):
    """Which keys of a piece its queries see.

    Attributes:
        causal: query i sees keys 0 … i (there are as many of either); otherwise all.
        query_documents, key_documents: `[n, rows]` and `[n, keys]`: only those of its document; None = all.
    """

    causal: bool
    query_documents: Tensor | None = None
    key_documents: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """Some queries against some keys, each query's result normalised over these keys alone.

    Attributes:
        out: `[n, group, rows, head_dim]`.
        normalizer: `[n, group, rows, 1]`, log Σ exp(score); −∞ (and `out` 0) where a query sees no key.
        kept: the probabilities of each block, if they are kept.
    """

    out: Tensor
    normalizer: Tensor
    kept: list[Tensor]


def attend(query: Tensor, key: Tensor, value: Tensor, visible: Visible, keep: bool) -> Piece:
    """query `[n, group, rows, head_dim]`, key and value `[n, keys, head_dim]`, in float32 or float64."""
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    normalizer = out.new_empty((*out.shape[:3], 1))
    kept = []
    for block in _blocks(query, key, visible, keep):
        scores = _scores(query, key, visible, block)
        largest = scores.amax(dim=-1, keepdim=True)
        probabilities = scores.softmax(dim=-1)
        normalizer[block.at] = largest - probabilities.amax(dim=-1, keepdim=True).log()
        if visible.query_documents is not None and (unseen := largest == float("-inf")).any():
            probabilities.masked_fill_(unseen, 0.0)
            normalizer[block.at].masked_fill_(unseen, float("-inf"))
        out[block.at] = _rows(probabilities, value[block.seen])
        if keep:
            kept.append(probabilities)
    return Piece(out, normalizer, kept)


class Gradients(NamedTuple):
    """Gradients of query `[n, group, rows, head_dim]`, key and value `[n, keys, head_dim]`."""

    query: Tensor
    key: Tensor
    value: Tensor


def attend_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Visible,
    kept: list[Tensor],
    grad: Tensor,
    mean: Tensor,
) -> Gradients:
    """The gradients of a piece whose probabilities were kept.

    Args:
        grad: the gradient of the result, `[n, group, rows, head_dim]`. Of a query that sees other keys
            besides, times this piece's share in it, exp(normalizer − log Σ exp(score) of all).
        mean: Σ grad · result over the last dim, `[n, group, rows, 1]`, times that share too.
    """
    grads = _zero_gradients(query, key, value)
    for block, probabilities in zip(_blocks(query, key, visible, True), kept, strict=True):
        _add_gradients(grads, block, query, key, value, probabilities, grad, mean)
    return grads


def attend_backward_again(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Visible,
    normalizer: Tensor,
    grad: Tensor,
    mean: Tensor,
) -> Gradients:
    """As `attend_backward`, the probabilities computed again.

    Args:
        normalizer: log Σ exp(score) over all keys that a query sees, here or in other pieces, so that `grad`
            and `mean` are those of the whole result.
    """
    grads = _zero_gradients(query, key, value)
    for block in _blocks(query, key, visible, False):
        probabilities = _scores(query, key, visible, block).sub_(normalizer[block.at]).exp_()
        _add_gradients(grads, block, query, key, value, probabilities, grad, mean)
    return grads


class _Block(NamedTuple):
    n: slice
    start: int
    end: int
    keys: int  # that it sees: the first so many

    @property
    def at(self) -> tuple[slice, slice, slice]:
        return self.n, slice(None), slice(self.start, self.end)

    @property
    def seen(self) -> tuple[slice, slice]:
        return self.n, slice(0, self.keys)


def _blocks(query: Tensor, key: Tensor, visible: Visible, keep: bool) -> Iterator[_Block]:
    n, group, rows, _ = query.shape
    keys = key.shape[1]
    run = n if keep else max(1, min(n, _BLOCK_ELEMENTS // max(1, group * min(rows, _BLOCK) * keys)))
    for first in range(0, n, run):
        for start in range(0, rows, _BLOCK):
            end = min(start + _BLOCK, rows)
            yield _Block(slice(first, min(first + run, n)), start, end, end if visible.causal else keys)


def _scores(query: Tensor, key: Tensor, visible: Visible, block: _Block) -> Tensor:
    """`[n, group, rows, keys]` of a block, −∞ where a key is not seen."""
    scores = _rows(query[block.at], key[block.seen].transpose(1, 2)).mul_(1 / sqrt(query.shape[-1]))
    if visible.causal:
        size = block.end - block.start
        future = torch.ones(size, size, dtype=torch.bool, device=query.device).triu(1)
        scores[..., block.start :].masked_fill_(future, float("-inf"))
    if visible.query_documents is not None and visible.key_documents is not None:
        own = visible.query_documents[block.n, block.start : block.end].unsqueeze(2)
        elsewhere = own != visible.key_documents[block.seen].unsqueeze(1)
        scores.masked_fill_(elsewhere.unsqueeze(1), float("-inf"))
    return scores


def _zero_gradients(query: Tensor, key: Tensor, value: Tensor) -> Gradients:
    contiguous = torch.contiguous_format
    return Gradients(*(torch.zeros_like(x, memory_format=contiguous) for x in (query, key, value)))


def _add_gradients(
    grads: Gradients,
    block: _Block,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    probabilities: Tensor,
    grad: Tensor,
    mean: Tensor,
) -> None:
    """Adds what one block contributes."""
    scale = 1 / sqrt(query.shape[-1])
    incoming = grad[block.at]
    grads.value[block.seen].baddbmm_(probabilities.flatten(1, 2).transpose(1, 2), incoming.flatten(1, 2))
    score_grad = _rows(incoming, value[block.seen].transpose(1, 2))
    score_grad.sub_(mean[block.at]).mul_(probabilities)
    grads.query[block.at] = _rows(score_grad, key[block.seen]).mul_(scale)
    grads.key[block.seen].baddbmm_(
        score_grad.flatten(1, 2).transpose(1, 2), query[block.at].flatten(1, 2), alpha=scale
    )


def _rows(left: Tensor, right: Tensor) -> Tensor:
    """`[n, group, rows, a]` times `[n, a, b]` → `[n, group, rows, b]`, as one batched product."""
    return torch.bmm(left.flatten(1, 2), right).view(*left.shape[:3], right.shape[-1])
