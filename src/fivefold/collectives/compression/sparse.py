"""Sparse sums: only the largest elements of a gradient are sent, the rest is kept (Strom 2015; Deep Gradient
Compression, Lin 2018).

With momentum μ, velocities are accumulated before the selection (u ← μu + g, v ← v + u), and both are cleared where
elements are sent; an element sent late then has the same effect as one sent at once. The optimizer must have no
momentum of its own.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.collectives.compression.flat import Parts, joined, split
from fivefold.collectives.compression.state import Memory


class Sparse:
    """Sums gradients of which each rank sends a few: `density` of a bucket's elements, the largest; or, if a
    `threshold` is given, those larger than so many times the root mean square of what waits on that rank.

    A value and its index cost 8 bytes (float32) and go to all other ranks, where a dense sum moves 2/n of 4 bytes: from
    a density of 1/n on everything is sent, densely.
    """

    def __init__(self, density: float, momentum: float = 0.0, threshold: float | None = None) -> None:
        self._density = density
        self._momentum = momentum
        self._threshold = threshold
        self.memory = Memory()

    def prepare(self, parts: Parts) -> None:
        """Makes the state of parameters of these shapes."""
        for name, tensor in parts:
            for kind in ("error", "velocity")[: 2 if self._momentum else 1]:
                self.memory.set_own(kind, name, torch.zeros_like(tensor))
        self.memory.settle(True)

    def reduce(self, parts: Parts, group: dist.ProcessGroup) -> None:
        """Sums what is sent over the group, in place. Collective."""
        waiting, velocity = self._accumulated(parts)
        if self._threshold is None and self._density * group.size() >= 1:
            sent = torch.ones_like(waiting, dtype=torch.bool)
            reduced = waiting.clone()
            dist.all_reduce(reduced, group=group)
            masked = velocity  # nothing waits, so no velocity is stale: plain momentum
        else:
            indices, count = self._select(waiting, group)
            sent = torch.zeros_like(waiting, dtype=torch.bool)
            sent[indices] = True
            reduced = _gathered(waiting, sent, indices, count, group)
            masked = velocity.masked_fill(sent, 0.0)
        left = waiting.masked_fill(sent, 0.0)
        for _, tensor, piece in split(reduced, parts):
            tensor.copy_(piece)
        for name, _, piece in split(left, parts):
            self.memory.set_own("error", name, piece.clone())
        if self._momentum:
            for name, _, piece in split(masked, parts):
                self.memory.set_own("velocity", name, piece.clone())

    def _accumulated(self, parts: Parts) -> tuple[Tensor, Tensor]:
        """What waits with this step's gradient in it, and the velocity."""
        gradient = joined([tensor for _, tensor in parts])
        if self._momentum:
            before = joined([self.memory.own("velocity", name, tensor) for name, tensor in parts])
            gradient = gradient + self._momentum * before
        errors = joined([self.memory.own("error", name, tensor) for name, tensor in parts])
        return errors + gradient, gradient

    def _select(self, waiting: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, int]:
        """Indices this rank sends, and how many the rank with the most sends."""
        size = waiting.abs()
        if self._threshold is None:
            count = max(1, min(len(waiting), round(self._density * len(waiting))))
            return torch.topk(size, count, sorted=False).indices, count
        limit = self._threshold * waiting.square().mean().sqrt()
        # What is not finite always goes: an overflow on one rank must be seen by all.
        chosen = (~(size <= limit) | ~size.isfinite()).nonzero().view(-1)
        most = torch.tensor([len(chosen)])
        dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
        return chosen, int(most)


def _gathered(waiting: Tensor, sent: Tensor, indices: Tensor, count: int, group: dist.ProcessGroup) -> Tensor:
    """The sum over the ranks of what each sends, added in rank order; `count` is the most that one sends."""
    ranks, reduced = group.size(), torch.zeros_like(waiting)
    if count * ranks >= len(waiting):
        reduced = waiting.masked_fill(~sent, 0.0)
        dist.all_reduce(reduced, group=group)
        return reduced
    width = waiting.element_size() + 4
    packed = torch.zeros(count, width, dtype=torch.uint8)
    packed[: len(indices), :4] = indices.to(torch.int32).view(-1, 1).view(torch.uint8)
    packed[: len(indices), 4:] = waiting[indices].view(-1, 1).view(torch.uint8)
    everyone = packed.new_empty(ranks * count, width)
    dist.all_gather_single(everyone, packed, group=group)
    places = everyone[:, :4].contiguous().view(torch.int32).view(ranks, count).long()
    values = everyone[:, 4:].contiguous().view(waiting.dtype).view(ranks, count)
    for place, value in zip(places, values, strict=True):
        reduced.index_add_(0, place, value)  # padding adds zero to element 0
    return reduced
