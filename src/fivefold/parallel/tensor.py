"""Tensor parallel (Shoeybi et al. 2019) and sequence parallel (Korthikanti et al. 2022).

Each rank computes a part of every region: some heads of attention, some columns of the feed-forward and of each expert,
some rows of the vocabulary. A layer has two regions, attention and feed-forward. Ranks communicate where it enters and
leaves them; backward does the reverse:

                                enter a region                  leave it
    without sequence parallel   identity (backward all-reduce)  all-reduce (backward identity)
    with sequence parallel      all-gather                      reduce-scatter

Without sequence parallel each rank holds the whole residual stream, with it the stream of a contiguous run of the
micro-batch's flattened tokens. Tokens that the ranks do not divide are padded with zeros at the end of the last runs;
regions never see the padding, and no gradient comes from it.

The autograd functions below only communicate. They hold no weights, because schedules that split backward run a node
with weights twice. Twin: ledger/tensor.py.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.config.tree import Parallel
from fivefold.nn.decoder import Decoder
from fivefold.nn.region import Projection, Region
from fivefold.nn.vocabulary import Embedding, VocabularyShard
from fivefold.parallel.local import LocalParameter
from fivefold.parallel.mesh import Groups
from fivefold.spec.layout import gradient_ranks
from fivefold.spec.legal import Resolved
from fivefold.spec.parts import shard_range


def tensor_parallel(decoder: Decoder, group: dist.ProcessGroup, layout: Parallel) -> None:
    """Makes `decoder`, whose parameters are this rank's parts, compute regions over `group`."""
    # Selective recomputation saves the outputs of projections, so these must not be reduced in place.
    in_place = layout.recompute != "elementwise"

    def region_of(shape: tuple[int, int]) -> Region:
        if layout.sequence_parallel:
            return SequenceParallelRegion(group, shape)
        return TensorParallelRegion(group, in_place=in_place)

    decoder.region_of = region_of
    decoder.region_ranks = group.size()
    shard = vocabulary_shard(decoder.model.vocab, group)
    decoder.head_shard = shard
    for module in decoder.modules():
        if isinstance(module, Embedding):
            module.shard = shard
        if isinstance(module, Projection) and group.rank() > 0:
            module.bias_share = 0.0


def vocabulary_shard(vocab: int, group: dist.ProcessGroup) -> VocabularyShard:
    """The vocabulary rows of this rank."""
    first, end = shard_range(vocab, group.size(), group.rank())
    most = shard_range(vocab, group.size(), 0)[1]

    def gather(tensor: Tensor) -> Tensor:
        return _all_gather(tensor.contiguous(), group).view(group.size(), *tensor.shape)

    return VocabularyShard(first, end - first, most, vocab, gather)


class PartialGradients:
    """Gradients of replicated parameters of which each tensor-parallel rank computes a part (norms under sequence
    parallel, shared KV heads, …): summed once per step, after the reduction over the data axes."""

    def __init__(self, resolved: Resolved, groups: Groups, parameters: Sequence[LocalParameter]) -> None:
        model, layout, tp = resolved.config.model, resolved.config.parallel, resolved.mesh.tp
        self._sums: list[tuple[dist.ProcessGroup, list[nn.Parameter]]] = []
        for group in dict.fromkeys((groups.tp, groups.tp_copies)):
            if group is not None:
                values = [
                    p.value
                    for p in parameters
                    if gradient_ranks(model, p.spec.name, tp, layout.sequence_parallel) == group.size()
                ]
                self._sums.append((group, values))

    def sum(self) -> None:
        """One all-reduce per group. Collective over tp."""
        for group, values in self._sums:
            gradients = [value.grad for value in values if value.grad is not None]
            if not gradients:
                continue
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            dist.all_reduce(flat, group=group)
            totals = torch.split(flat, [gradient.numel() for gradient in gradients])
            for gradient, total in zip(gradients, totals, strict=True):
                gradient.copy_(total.view_as(gradient))


class TensorParallelRegion(Region):
    """A region without sequence parallel: outside it every rank holds the whole residual stream."""

    def __init__(self, group: dist.ProcessGroup, *, in_place: bool) -> None:
        self.group, self.in_place = group, in_place

    def enter(self, x: Tensor) -> Tensor:
        """Identity; backward all-reduces the gradient."""
        return _SumGradients.apply(x, self.group)  # type: ignore[no-any-return,no-untyped-call]

    def leave(self, x: Tensor) -> Tensor:
        """All-reduce; may overwrite `x`. Backward is the identity."""
        return _Sum.apply(x, self.group, self.in_place)  # type: ignore[no-any-return,no-untyped-call]


class SequenceParallelRegion(Region):
    """A region with sequence parallel: outside it every rank holds the residual stream of a run of tokens,
    `[tokens / ranks, hidden]`. Runs have equal length; the last ones are padded.
    """

    def __init__(self, group: dist.ProcessGroup, shape: tuple[int, int]) -> None:
        self.group, self.shape = group, shape

    def enter(self, x: Tensor) -> Tensor:
        """`[tokens / ranks, hidden]` → `[batch, sequence, hidden]`."""
        batch, sequence = self.shape
        gathered: Tensor = _Gather.apply(x, self.group, batch * sequence)  # type: ignore[no-untyped-call]
        return gathered.view(batch, sequence, -1)

    def leave(self, x: Tensor) -> Tensor:
        """`[batch, sequence, hidden]` → the sum's run, `[tokens / ranks, hidden]`."""
        return _ReduceScatter.apply(x.flatten(0, 1), self.group)  # type: ignore[no-any-return,no-untyped-call]

    def stream_shape(self, shape: tuple[int, int], hidden: int) -> tuple[int, ...]:
        """`[tokens / ranks, hidden]`"""
        return (-(-shape[0] * shape[1] // self.group.size()), hidden)

    def own(self, per_token: Tensor) -> Tensor:
        """`[sequence]` or `[batch, sequence]` → `[tokens / ranks]`; 0 where the run is padded."""
        tokens = _padded(per_token.expand(self.shape).reshape(-1), self.group.size())
        return tokens.chunk(self.group.size())[self.group.rank()]


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # In place: autograd has accumulated it from the region's branches, and nothing else refers to it.
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, in_place: bool) -> Tensor:
        total = x.contiguous() if in_place else x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


class _Gather(torch.autograd.Function):
    """`[tokens / ranks, width]` → `[tokens, width]`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, tokens: int) -> Tensor:
        ctx.group = group
        return _all_gather(x.contiguous(), group)[:tokens]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _reduce_scatter(grad, ctx.group), None, None


class _ReduceScatter(torch.autograd.Function):
    """`[tokens, width]` → `[tokens / ranks, width]`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.tokens = group, x.shape[0]
        return _reduce_scatter(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_gather(grad.contiguous(), ctx.group)[: ctx.tokens], None


def _all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Every rank's `x`, one after the other along dim 0."""
    out = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
    dist.all_gather_single(out, x, group=group)
    return out


def _reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's run, along dim 0, of the sum of every rank's `x`, padded to a multiple of the ranks."""
    filled = _padded(x, group.size()).contiguous()
    out = filled.new_empty(filled.shape[0] // group.size(), *filled.shape[1:])
    dist.reduce_scatter_single(out, filled, group=group)
    return out


def _padded(x: Tensor, ranks: int) -> Tensor:
    """`x` with dim 0 padded with zeros to a multiple of `ranks`."""
    lacking = -x.shape[0] % ranks
    return F.pad(x, (0, 0) * (x.dim() - 1) + (0, lacking)) if lacking else x
