"""Ring attention (Liu et al. 2023) with the zigzag division of sequences, which balances causal work.

Keys and values are passed once around the ring. Each rank computes attention of its queries to the block it has while
the next one arrives, and merges partial results by their normalisers (log Σ exp). Backward passes keys and values
around again, each block's gradient following one hop behind; the last hop returns it to the block's owner.

Keys and values are sent in the compute dtype, once per KV head (not repeated for the query heads); their gradients in
at least float32.
"""

from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from fivefold.nn import blocked_attention as blocked
from fivefold.nn.attention import Core, Segments
from fivefold.nn.blocked_attention import Piece, Visible
from fivefold.parallel.cut import Cut
from fivefold.spec.sequence import front_tokens, keeps_probabilities


class Ring:
    """Ring attention over `group`; `core` is used where a rank has whole sequences (generation).

    With `recompute_attention` probabilities are not saved: backward computes them again, without further messages.
    """

    def __init__(self, group: ProcessGroup, core: Core, recompute_attention: bool) -> None:
        self.group = group
        self.core = core
        self.recompute = recompute_attention

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, segments: Segments) -> Tensor:
        """query and the result `[batch, heads, tokens, head_dim]`, key and value `[batch, kv_heads, tokens,
        head_dim]`: this rank's tokens. `segments` describes whole sequences."""
        cut = Cut.of_whole(self.group, "ring", query, segments)
        if cut is None:
            return self.core(query, key, value, segments)
        kv_heads = key.shape[1]
        documents = blocked.per_head(segments.documents, kv_heads)
        few = keeps_probabilities(cut.length, cut.most)
        exact = query.dtype in (torch.float32, torch.float64)
        keep = query.device.type == "cpu" and exact and few and not self.recompute
        flat = blocked.grouped(query, kv_heads), key.flatten(0, 1), value.flatten(0, 1)
        out: Tensor = _RingAttention.apply(*flat, cut, documents, keep)  # type: ignore[no-untyped-call]
        return out.view(query.shape)


@dataclass(frozen=True, slots=True)
class _Pairing:
    """Which of this rank's queries see which keys of rank `source`.

    In the zigzag division each rank has a front and a back chunk. All queries see the front chunk of an earlier rank
    and none see its back chunk; only the back queries see a later rank's keys, and they see both chunks.
    """

    queries: slice
    keys: slice
    visible: Visible

    @staticmethod
    def of(cut: Cut, source: int, documents: Tensor | None) -> "_Pairing":
        mine, theirs = cut.tokens(cut.rank), cut.tokens(source)
        queries, keys = slice(0, mine), slice(0, theirs)
        if source > cut.rank:
            queries = slice(front_tokens(mine), mine)
        elif source < cut.rank:
            keys = slice(0, front_tokens(theirs))
        seen = (None, None)
        if documents is not None:
            seen = cut.of(documents, cut.rank)[:, queries], cut.of(documents, source)[:, keys]  # type: ignore[assignment]
        return _Pairing(queries, keys, Visible(source == cut.rank, *seen))


class _RingAttention(torch.autograd.Function):
    """query `[n, group, tokens, head_dim]`, key and value `[n, tokens, head_dim]`, documents `[n, length]`."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, cut: Cut, documents: Tensor | None, keep: bool
    ) -> Tensor:
        queries = query.to(torch.promote_types(query.dtype, torch.float32))
        block = _packed(key, value, cut.most)
        message = _Message.pass_on(block, cut)
        piece = _attend(queries, block, _Pairing.of(cut, cut.rank, documents), keep)
        out, normalizer = piece.out, piece.normalizer
        own, kept = [normalizer.clone()], [piece.kept]
        for source in cut.earlier():
            block = message.wait()
            if source != cut.next:
                message = _Message.pass_on(block, cut)
            pair = _Pairing.of(cut, source, documents)
            piece = _attend(queries, block, pair, keep)
            _join(out[:, :, pair.queries], normalizer[:, :, pair.queries], piece)
            own.append(piece.normalizer)
            kept.append(piece.kept)
        out = out.to(query.dtype)
        ctx.cut, ctx.documents, ctx.keep = cut, documents, keep
        ctx.counts = [len(some) for some in kept]
        tensors = [query, key, value, out, normalizer]
        ctx.save_for_backward(*tensors, *(own if keep else ()), *(tensor for some in kept for tensor in some))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cut: Cut = ctx.cut
        query, key, value, out, normalizer, *rest = ctx.saved_tensors
        grad = grad.to(normalizer.dtype)
        work = _Backward(
            cut,
            ctx.documents,
            query.to(grad.dtype),
            normalizer,
            grad,
            (grad * out).sum(dim=-1, keepdim=True),
        )
        own, kept = (rest[: cut.cp], iter(rest[cut.cp :])) if ctx.keep else ([None] * cut.cp, iter(()))
        pieces = [(one, list(islice(kept, count))) for one, count in zip(own, ctx.counts, strict=True)]
        block = _packed(key, value, cut.most)
        message = _Message.pass_on(block, cut)
        mine = work.piece(block, cut.rank, *pieces[0])
        gradient: _Message | None = None  # of the current block: the sum over the ranks it has passed
        for hop, source in enumerate(cut.earlier(), start=1):
            block = message.wait()
            if source != cut.next:
                message = _Message.pass_on(block, cut)
            total = work.piece(block, source, *pieces[hop])
            if gradient:
                total += gradient.wait()
            gradient = _Message.pass_on(total, cut)
        if gradient:
            mine += gradient.wait()
        key_grad, value_grad = mine[:, :, : key.shape[1]].to(key.dtype).unbind()
        return work.query_grad.to(query.dtype), key_grad, value_grad, None, None, None


def _attend(queries: Tensor, block: Tensor, pair: _Pairing, keep: bool) -> Piece:
    keys, values = block[:, :, pair.keys].to(queries.dtype).unbind()
    return blocked.attend(queries[:, :, pair.queries], keys, values, pair.visible, keep)


class _Backward:
    """What backward needs of this rank's queries, all in at least float32; shapes as in `blocked.attend_backward`."""

    def __init__(
        self,
        cut: Cut,
        documents: Tensor | None,
        query: Tensor,
        normalizer: Tensor,
        grad: Tensor,
        mean: Tensor,  # Σ_j p_ij · dp_ij
    ) -> None:
        self.cut, self.documents = cut, documents
        self.query, self.normalizer, self.grad, self.mean = query, normalizer, grad, mean
        self.query_grad = torch.zeros_like(query, memory_format=torch.contiguous_format)

    def piece(self, block: Tensor, source: int, own: Tensor | None, kept: list[Tensor]) -> Tensor:
        """This rank's contribution to the gradient of `block` `[2, n, most, head_dim]`; adds to the queries' gradient.

        Args:
            own: the piece's own normaliser if its probabilities were saved, else None.
        """
        pair = _Pairing.of(self.cut, source, self.documents)
        at = (slice(None), slice(None), pair.queries)
        keys, values = block[:, :, pair.keys].to(self.query.dtype).unbind()
        query, grad, mean, normalizer = self.query[at], self.grad[at], self.mean[at], self.normalizer[at]
        if own is None:
            found = blocked.attend_backward_again(query, keys, values, pair.visible, normalizer, grad, mean)
        else:
            share = (own - normalizer).exp_()
            found = blocked.attend_backward(
                query, keys, values, pair.visible, kept, grad * share, mean * share
            )
        self.query_grad[at] += found.query
        gradient = block.new_zeros(block.shape, dtype=self.query.dtype)
        gradient[0, :, pair.keys], gradient[1, :, pair.keys] = found.key, found.value
        return gradient


def _join(out: Tensor, normalizer: Tensor, piece: Piece) -> None:
    """Merges a piece into the result over the keys so far, in place; every query has seen at least one key by then."""
    joined = torch.logaddexp(normalizer, piece.normalizer)
    out.mul_((normalizer - joined).exp_())
    out.addcmul_(piece.out, (piece.normalizer - joined).exp_())
    normalizer.copy_(joined)


def _packed(key: Tensor, value: Tensor, most: int) -> Tensor:
    """`[2, n, most, head_dim]`: keys and values of one rank as one message."""
    n, tokens, head_dim = key.shape
    block = key.new_zeros((2, n, most, head_dim)) if tokens < most else key.new_empty((2, n, most, head_dim))
    block[0, :, :tokens], block[1, :, :tokens] = key, value
    return block


@dataclass(frozen=True, slots=True)
class _Message:
    """A block being sent to the next rank of the ring, and one being received from the previous rank."""

    sent: Tensor  # must stay alive until the send has finished
    received: Tensor
    works: list[Any]

    @staticmethod
    def pass_on(block: Tensor, cut: Cut) -> "_Message":
        received = torch.empty_like(block)
        before = (cut.rank - 1) % cut.cp
        works = dist.batch_isend_irecv(
            [  # The receive first: where both ends begin to send, gloo uses one direction of a link at a time.
                dist.P2POp(dist.irecv, received, group=cut.group, group_peer=before),
                dist.P2POp(dist.isend, block, group=cut.group, group_peer=cut.next),
            ]
        )
        return _Message(block, received, works)

    def wait(self) -> Tensor:
        """The received block; the send has finished too."""
        for work in self.works:
            work.wait()
        return self.received
