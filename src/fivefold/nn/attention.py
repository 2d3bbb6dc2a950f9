"""Causal attention within documents, with grouped key/value heads."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.config.model import Model
from fivefold.nn.causal_attention import blocked_causal_attention
from fivefold.nn.chain import Chain
from fivefold.nn.manual_backward import uses_manual_backward
from fivefold.nn.norm import RMSNorm
from fivefold.nn.recompute import Recompute
from fivefold.nn.region import Projection
from fivefold.nn.rotary import Rotary, apply_rotary
from fivefold.spec.sequence import keeps_probabilities


@dataclass(frozen=True, slots=True)
class Segments:
    """The documents packed into a micro-batch, in the order of its flattened tokens.

    Attributes:
        lengths: tokens of each document; a document never extends beyond its row.
        documents: `[batch, sequence]`, the document (numbered within its row) of each token; None = one per row.
    """

    lengths: tuple[int, ...]
    documents: Tensor | None = None

    @staticmethod
    def from_documents(documents: Tensor, device: torch.device | None = None) -> "Segments":
        """The segments of `documents` `[batch, sequence]`, a CPU tensor: lengths depend on its values."""
        starts = torch.ones_like(documents, dtype=torch.bool)
        starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
        first = starts.flatten().nonzero().flatten()
        ends = torch.cat((first[1:], first.new_tensor([documents.numel()])))
        lengths = tuple((ends - first).tolist())
        whole_rows = len(lengths) == documents.shape[0]
        return Segments(lengths, None if whole_rows else documents.to(device or documents.device))


Core: TypeAlias = Callable[[Tensor, Tensor, Tensor, Segments], Tensor]
"""An attention core: `causal_attention`, or one that runs over context-parallel ranks."""


class Packed(NamedTuple):
    """Queries, keys and values of a flattened micro-batch, each `[tokens, heads, head_dim]`."""

    query: Tensor
    key: Tensor
    value: Tensor


def causal_attention(query: Tensor, key: Tensor, value: Tensor, segments: Segments) -> Tensor:
    """Softmax attention of each token to itself and the earlier tokens of its document.

    A mask would disable flash attention, so its kernels get the lengths of the documents instead.

    Args:
        query: `[batch, heads, sequence, head_dim]`.
        key: `[batch, kv_heads, sequence, head_dim]`, as is value.

    Returns:
        `[batch, heads, sequence, head_dim]`.
    """
    batch, heads, sequence, head_dim = query.shape
    if uses_manual_backward(query) and keeps_probabilities(sequence, sequence):
        return blocked_causal_attention(query, key, value, segments.documents)
    if segments.documents is None:
        return _flash(query, key, value)
    packed = Packed(*(x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)))
    attend = _packed_flash if _has_packed_flash(query) else _document_by_document
    return attend(packed, segments).view(batch, sequence, heads, head_dim).transpose(1, 2)


def _flash(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """torch's kernel for this device; shapes as in `causal_attention`."""
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)


def _has_packed_flash(query: Tensor) -> bool:
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)


def _packed_flash(packed: Packed, segments: Segments) -> Tensor:
    lengths = torch.tensor((0, *segments.lengths), dtype=torch.int32, device=packed.query.device)
    ends = lengths.cumsum(0, dtype=torch.int32)
    longest = max(segments.lengths)
    grouped = packed.query.shape[1] != packed.key.shape[1]
    from torch.nn.attention.varlen import varlen_attn  # half a second: it imports torch's compiler

    out = varlen_attn(*packed, ends, ends, longest, longest, window_size=(-1, 0), enable_gqa=grouped)
    assert isinstance(out, Tensor)
    return out


def _document_by_document(packed: Packed, segments: Segments) -> Tensor:
    lengths = list(segments.lengths)
    query, key, value = (torch.split(x.transpose(0, 1).unsqueeze(0), lengths, dim=2) for x in packed)
    pieces = [_flash(*document) for document in zip(query, key, value, strict=True)]
    return torch.cat(pieces, dim=2).squeeze(0).transpose(0, 1)


class Attention(nn.Module):
    """Query, key and value projections, optional norms of each head's queries and keys, attention, output
    projection."""

    def __init__(self, model: Model, recompute: Recompute) -> None:
        super().__init__()
        self.head_dim = model.head_dim
        self.core: Core = recompute.attention(causal_attention)
        queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
        self.query = nn.Linear(model.hidden, queries, bias=model.qkv_bias)
        self.key = nn.Linear(model.hidden, keys, bias=model.qkv_bias)
        self.value = nn.Linear(model.hidden, keys, bias=model.qkv_bias)
        if model.qk_norm:
            self.query_norm: nn.Module = RMSNorm(model.head_dim, eps=model.norm_eps)
            self.key_norm: nn.Module = RMSNorm(model.head_dim, eps=model.norm_eps)
        else:
            self.query_norm = self.key_norm = nn.Identity()
        self.placed = Chain(self._placed)
        self.output = Projection(queries, model.hidden, bias=model.output_bias)

    def forward(self, x: Tensor, rotary: Rotary | None, segments: Segments) -> Tensor:
        """`x` and the result: `[batch, sequence, hidden]`; `rotary` None = no rotary positions."""
        query, key, value = (self._heads(project(x)) for project in (self.query, self.key, self.value))
        query, key = self.placed(query, key, rotary)
        attended = self.core(query, key, value, segments)
        return self.output(attended.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _placed(self, query: Tensor, key: Tensor, rotary: Rotary | None) -> tuple[Tensor, Tensor]:
        query, key = self.query_norm(query), self.key_norm(key)
        return (query, key) if rotary is None else (apply_rotary(query, rotary), apply_rotary(key, rotary))

    def _heads(self, x: Tensor) -> Tensor:
        """`[batch, sequence, heads · head_dim]` → `[batch, heads, sequence, head_dim]`."""
        return x.view(*x.shape[:-1], -1, self.head_dim).transpose(1, 2)
