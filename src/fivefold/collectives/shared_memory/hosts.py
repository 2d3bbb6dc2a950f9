"""Collectives of a group that spans hosts: shared memory within each, gloo between them.

Every host has the same number of ranks. The ranks with the same index on their hosts are a *rail*, a gloo group of
its own: what a host has reduced by shared memory is divided among its ranks, and each carries its share over its
rail, so that every byte leaves a host once and all ranks of it send.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Work

from fivefold.collectives.shared_memory.engine import Steps
from fivefold.collectives.shared_memory.exchange import Exchange
from fivefold.collectives.shared_memory.reduction import Kind, reduce_into
from fivefold.collectives.shared_memory.span import Parts, Span, even, shares, whole


class Hosts:
    """The collectives of `Exchange`, over several hosts.

    Args:
        local: those of this host's ranks.
        hosts: the group's ranks by host.
        rank: this rank in the group.
        rail: gloo between the ranks with this one's index, in the order of the hosts.
        whole: gloo between all ranks.
    """

    def __init__(self, local: Exchange, hosts: list[list[int]], rank: int, rail: Any, whole: Any) -> None:
        self._local, self._hosts, self._rail, self._whole = local, hosts, rail, whole
        self._rank = rank
        self.size = sum(map(len, hosts))
        self._host = next(i for i, ranks in enumerate(hosts) if rank in ranks)
        self._index = hosts[self._host].index(rank)

    def barrier(self) -> Steps:
        yield from self._local.barrier()
        yield from _over(self._rail.barrier)
        yield from self._local.barrier()

    def all_reduce(self, span: Span, kind: Kind) -> Steps:
        plain = _plain(kind)
        parts = shares(span, len(self._hosts[0]))
        mine = parts.span(self._index)
        yield from self._local.reduce_scatter(mine, parts, plain)
        if mine.numel:
            total = mine.vector()
            yield from _over(self._rail.allreduce, [total], _options(dist.AllreduceOptions(), plain))
            self._finish(total, kind)
        yield from self._local.all_gather(parts, mine)

    def reduce_scatter(self, out: Span, inputs: Parts, kind: Kind) -> Steps:
        # Gloo's own reduce-scatter costs a whole all-reduce; exchanging the parts and adding them does not.
        flat, plain = out.vector(), _plain(kind)
        reduced = torch.empty(len(self._hosts) * out.numel, dtype=flat.dtype)
        places = even(reduced, len(self._hosts))
        for host, ranks in enumerate(self._hosts):
            yield from self._local.reduce_scatter(places.span(host), inputs.of(ranks), plain)
        received = torch.empty_like(reduced)
        yield from _over(self._rail.alltoall_base, received, reduced, [], [])
        reduce_into(flat, list(received.view(len(self._hosts), -1)) if out.numel else [flat], plain)
        self._finish(flat, kind)

    def all_gather(self, outputs: Parts, source: Span) -> Steps:
        flat = source.vector()
        received = torch.empty(len(self._hosts) * source.numel, dtype=flat.dtype)
        yield from _over(self._rail._allgather_base, received, flat)
        parts = even(received, len(self._hosts))
        for host, ranks in enumerate(self._hosts):
            yield from self._local.all_gather(outputs.of(ranks), parts.span(host))

    def all_to_all(self, outputs: Parts, inputs: Parts, *, even: bool) -> Steps:
        here = self._hosts[self._host]
        yield from self._local.all_to_all(outputs.of(here), inputs.of(here), even=even)
        away = [rank for rank in range(self.size) if rank not in here]
        sent = torch.cat([inputs.span(rank).vector() for rank in away])
        counts = [
            [0 if rank in here else parts.span(rank).numel for rank in range(self.size)]
            for parts in (outputs, inputs)
        ]
        received = torch.empty(sum(counts[0]), dtype=sent.dtype)
        yield from _over(self._whole.alltoall_base, received, sent, *counts)
        for rank, part in zip(away, torch.split(received, [counts[0][rank] for rank in away]), strict=True):
            outputs.span(rank).vector().copy_(part)

    def broadcast(self, span: Span, root: int) -> Steps:
        host, index = self._place(root)
        if self._index == index:
            options = dist.BroadcastOptions()
            options.rootRank = host
            yield from _over(self._rail.broadcast, [span.vector()], options)
        yield from self._local.broadcast(span, index)

    def reduce(self, span: Span, root: int, kind: Kind) -> Steps:
        host, index = self._place(root)
        plain = _plain(kind)
        total = span.vector() if self._rank == root else span.vector().clone()
        yield from self._local.reduce(whole(total), index, plain)
        if self._index == index:
            options = _options(dist.ReduceOptions(), plain)
            options.rootRank = host
            yield from _over(self._rail.reduce, [total], options)
        if self._rank == root:
            self._finish(total, kind)

    def gather(self, outputs: Parts, source: Span, root: int) -> Steps:
        options = dist.GatherOptions()
        options.rootRank = root
        places = [outputs.vectors()] if outputs.tensors else []
        yield from _over(self._whole.gather, places, [source.vector()], options)

    def scatter(self, out: Span, inputs: Parts, root: int) -> Steps:
        options = dist.ScatterOptions()
        options.rootRank = root
        sources = [inputs.vectors()] if inputs.tensors else []
        yield from _over(self._whole.scatter, [out.vector()], sources, options)

    def _place(self, rank: int) -> tuple[int, int]:
        """A rank's host, and its index there."""
        return next((i, ranks.index(rank)) for i, ranks in enumerate(self._hosts) if rank in ranks)

    def _finish(self, total: Tensor, kind: Kind) -> None:
        """Makes of the sum over all ranks what was asked for."""
        if kind == Kind.AVG:
            rounding = None if total.is_floating_point() or total.is_complex() else "trunc"
            total.div_(self.size, rounding_mode=rounding)


def _over(start: Callable[..., Work], *arguments: Any) -> Steps:
    """An operation of gloo."""
    work = start(*arguments)
    yield work
    work.wait()


def _plain(kind: Kind) -> Kind:
    """What may be applied several times over, to parts."""
    return Kind.SUM if kind == Kind.AVG else kind


def _options(options: Any, kind: Kind) -> Any:
    options.reduceOp = getattr(dist.ReduceOp, kind.name)
    return options
