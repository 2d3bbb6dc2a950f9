"""Named tensors as one vector and back."""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

Parts = Sequence[tuple[str, Tensor]]
"""Gradients of one bucket by parameter name; contiguous, one type, the same names and shapes on every rank."""


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """A new vector of all elements."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def split(vector: Tensor, parts: Parts) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(name, tensor, its piece of the vector in its shape)."""
    pieces = torch.split(vector, [tensor.numel() for _, tensor in parts])
    for (name, tensor), piece in zip(parts, pieces, strict=True):
        yield name, tensor, piece.view(tensor.shape)


def summed(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """The tensors summed over the group, in one message."""
    vector = joined(tensors)
    dist.all_reduce(vector, group=group)
    pieces = torch.split(vector, [tensor.numel() for tensor in tensors])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)]
