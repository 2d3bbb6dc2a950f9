"""Ulysses (Jacobs et al. 2023): one all-to-all gives each rank the whole sequence for some heads, another returns
its own tokens of all heads."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from fivefold.nn.attention import Core, Segments
from fivefold.nn.manual_backward import uses_manual_backward
from fivefold.parallel.cut import Cut


class Ulysses:
    """All-to-all over heads around an attention core on whole sequences.

    With fewer KV heads than ranks, each KV head is sent to every rank that needs it.
    """

    def __init__(self, group: ProcessGroup, core: Core) -> None:
        self.group = group
        self.core = core

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, segments: Segments) -> Tensor:
        """As `Ring`."""
        cut = Cut.of_whole(self.group, "ulysses", query, segments)
        if cut is None:
            return self.core(query, key, value, segments)
        parts = [_by_rank(x, cut.cp) for x in (query, key, value)]
        heads = [part.shape[2] for part in parts]
        whole: Tensor = _GatherSequence.apply(torch.cat(parts, dim=2), cut)  # type: ignore[no-untyped-call]
        query, key, value = torch.split(whole, heads, dim=1)
        if heads[1] == 1 and uses_manual_backward(query):
            # A single head is a view: saving it for backward would keep the whole gathered tensor alive.
            key, value = key.clone(), value.clone()
        out = self.core(query, key, value, segments)
        back: Tensor = _ScatterSequence.apply(out, cut)  # type: ignore[no-untyped-call]
        return back.transpose(0, 1).flatten(1, 2)


def _by_rank(x: Tensor, cp: int) -> Tensor:
    """`[batch, heads, tokens, head_dim]` → `[cp, batch, heads of a rank, tokens, head_dim]`."""
    if x.shape[1] < cp:
        x = x.repeat_interleave(cp // x.shape[1], dim=1)
    batch, heads, tokens, head_dim = x.shape
    return x.reshape(batch, cp, heads // cp, tokens, head_dim).transpose(0, 1)


def _gather_sequence(x: Tensor, cut: Cut) -> Tensor:
    """`[cp, batch, heads, tokens, head_dim]`, heads of each rank → `[batch, heads, length, head_dim]`, this rank's
    heads."""
    tokens, most = x.shape[3], cut.most
    if tokens < most:
        x = torch.cat((x, x.new_zeros((*x.shape[:3], most - tokens, x.shape[4]))), dim=3)
    received = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, x.contiguous(), group=cut.group)
    return torch.cat([part[:, :, : cut.tokens(rank)] for rank, part in enumerate(received)], dim=2)


def _scatter_sequence(x: Tensor, cut: Cut) -> Tensor:
    """The inverse of `_gather_sequence`."""
    batch, heads, _, head_dim = x.shape
    sent = x.new_zeros((cut.cp, batch, heads, cut.most, head_dim))
    for rank in range(cut.cp):
        ((start, stop),) = cut.spans(rank)
        sent[rank, :, :, : stop - start] = x[:, :, start:stop]
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=cut.group)
    return received[:, :, :, : cut.tokens(cut.rank)]


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cut: Cut) -> Tensor:
        ctx.cut = cut
        return _gather_sequence(x, cut)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _scatter_sequence(grad, ctx.cut), None


class _ScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cut: Cut) -> Tensor:
        ctx.cut = cut
        return _scatter_sequence(x, cut)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _gather_sequence(grad, ctx.cut), None
