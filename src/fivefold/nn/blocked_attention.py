"""Partial attention for context parallel: some queries against some keys, causal or not, with the normaliser that is
needed to merge partial results. Whole sequences: `causal_attention.py`.

Queries are processed in blocks; a causal block computes scores only up to its last query, so half of the score matrix,
all in batched matrix products. Probabilities are saved for backward, which on CPUs is about twice as fast as torch's
flash kernel (it recomputes them); where they would need too much memory they are recomputed here as well, from the
logarithm of their normaliser.
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
"""The most scores of a block if they are not saved: batch rows and heads are processed in runs below this size."""


def grouped(query: Tensor, kv_heads: int) -> Tensor:
    """`[batch, heads, sequence, head_dim]` → `[batch · kv_heads, group, sequence, head_dim]`: the queries of one
    block that share a KV head become rows of one matrix."""
    batch, heads, sequence, head_dim = query.shape
    return query.reshape(batch * kv_heads, heads // kv_heads, sequence, head_dim)


def per_head(documents: Tensor | None, kv_heads: int) -> Tensor | None:
    """`[batch, sequence]` → `[batch · kv_heads, sequence]`."""
    return None if documents is None else documents.repeat_interleave(kv_heads, dim=0)


class Visible(NamedTuple):
    """Which keys the queries of a piece see.

    Attributes:
        causal: query i sees keys 0 … i (equally many of both); otherwise all keys.
        query_documents, key_documents: `[n, rows]` and `[n, keys]`: a query sees only keys of its document; None = all.
    """

    causal: bool
    query_documents: Tensor | None = None
    key_documents: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """The attention of some queries to some keys, normalised over these keys alone.

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
    """The gradients of a piece whose probabilities were saved.

    Args:
        grad: the gradient of the merged result, `[n, group, rows, head_dim]`, times this piece's weight in it,
            exp(normalizer − log Σ exp(score) over all pieces).
        mean: Σ grad · result over the last dim, `[n, group, rows, 1]`, times the same weight.
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
    """As `attend_backward`, with recomputed probabilities.

    Args:
        normalizer: log Σ exp(score) over all keys that a query sees, in this and other pieces; so `grad` and `mean`
            are those of the merged result, without weights.
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
    keys: int  # it sees the first `keys` keys

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
