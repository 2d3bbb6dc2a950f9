"""Named tensors as one vector and back."""

from collections.abc import Iterator, Sequence

import torch
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
