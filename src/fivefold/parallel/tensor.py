"""Tensor parallel (Shoeybi et al. 2019) and sequence parallel (Korthikanti et al. 2022).

Every rank of the group computes a part of each region: its heads of attention, its columns of the feed-forward and of
every expert, its rows of the vocabulary. What passes between ranks is the residual stream, twice a layer forward and
twice backward. Without sequence parallel each rank holds the stream whole: entering a region is free, its
gradients are summed; leaving it sums. With it each rank holds the stream of its run of the micro-batch's tokens:
entering gathers and leaving reduce-scatters, and the reverse in backward. Runs are of tokens, not of rows' positions,
so they are contiguous in memory on both sides; tokens that do not divide are filled up with zeros at the end of
the last runs, which no region sees and no gradient comes from.

The functions below communicate and have no weights: schedules that split backward run a node with weights twice.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fivefold.nn.decoder import Decoder
from fivefold.nn.region import Projection, Region
from fivefold.nn.vocabulary import Embedding, VocabularyShard
from fivefold.spec.layout import vocabulary_rows


def apply_tensor_parallel(
    decoder: Decoder, group: dist.ProcessGroup, *, sequence_parallel: bool, keeps_projections: bool
) -> None:
    """Makes `decoder`, whose parameters are this rank's parts, compute in regions over `group`.

    Args:
        keeps_projections: the outputs of projections are kept for backward (recompute "elementwise"), so they
            must not be summed in place.
    """

    def region_of(shape: tuple[int, int]) -> Region:
        if sequence_parallel:
            return SequenceParallelRegion(group, shape)
        return TensorParallelRegion(group, in_place=not keeps_projections)

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
    """This rank's rows of a vocabulary."""
    runs = [vocabulary_rows(vocab, group.size(), rank) for rank in range(group.size())]
    own = runs[group.rank()]

    def gather(tensor: Tensor) -> Tensor:
        return _all_gather(tensor.contiguous(), group).view(group.size(), *tensor.shape)

    return VocabularyShard(own.start, len(own), len(runs[0]), vocab, gather)


class TensorParallelRegion(Region):
    """A region outside of which every rank holds the residual stream whole."""

    def __init__(self, group: dist.ProcessGroup, *, in_place: bool) -> None:
        self.group, self.in_place = group, in_place

    def enter(self, x: Tensor) -> Tensor:
        """As it is; its gradient is summed."""
        return _SumGradients.apply(x, self.group)  # type: ignore[no-any-return,no-untyped-call]

    def leave(self, x: Tensor) -> Tensor:
        """Summed; may overwrite `x`."""
        return _Sum.apply(x, self.group, self.in_place)  # type: ignore[no-any-return,no-untyped-call]


class SequenceParallelRegion(Region):
    """A region outside of which every rank holds the residual stream of a run of tokens, `[tokens / ranks, hidden]`.

    Runs are equal in length: the last ones are filled up.
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

    def own(self, per_token: Tensor) -> Tensor:
        """`[sequence]` or `[batch, sequence]` → `[tokens / ranks]`; 0 where the run is filled up."""
        tokens = _filled(per_token.expand(self.shape).reshape(-1), self.group.size())
        return tokens.chunk(self.group.size())[self.group.rank()]


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        # In place: the engine summed it from the region's branches, and nothing else holds it.
        slope = slope.contiguous()
        dist.all_reduce(slope, group=ctx.group)
        return slope, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, in_place: bool) -> Tensor:
        total = x.contiguous() if in_place else x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None]:
        return slope, None, None


class _Gather(torch.autograd.Function):
    """`[tokens / ranks, width]` → `[tokens, width]`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, tokens: int) -> Tensor:
        ctx.group = group
        return _all_gather(x.contiguous(), group)[:tokens]

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None]:
        return _reduce_scatter(slope, ctx.group), None, None


class _ReduceScatter(torch.autograd.Function):
    """`[tokens, width]` → `[tokens / ranks, width]`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.tokens = group, x.shape[0]
        return _reduce_scatter(x, group)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        return _all_gather(slope.contiguous(), ctx.group)[: ctx.tokens], None


def _all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Every rank's `x`, one after the other along dim 0."""
    out = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
    dist.all_gather_single(out, x, group=group)
    return out


def _reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's run of the sum of every rank's `x` along dim 0, filled up to a multiple of the ranks."""
    filled = _filled(x, group.size()).contiguous()
    out = filled.new_empty(filled.shape[0] // group.size(), *filled.shape[1:])
    dist.reduce_scatter_single(out, filled, group=group)
    return out


def _filled(x: Tensor, ranks: int) -> Tensor:
    """`x` with zeros at the end of dim 0, so that the ranks divide it."""
    lacking = -x.shape[0] % ranks
    return F.pad(x, (0, 0) * (x.dim() - 1) + (0, lacking)) if lacking else x
