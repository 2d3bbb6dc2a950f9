"""Stretches of contiguous tensors, as addresses: making a tensor of each takes longer than copying a small one."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Span(NamedTuple):
    """`numel` elements of a contiguous tensor from `start` on; the tensor stays alive with it."""

    tensor: Tensor
    start: int
    numel: int
    address: int
    nbytes: int

    def vector(self) -> Tensor:
        """The elements in a row, apart from autograd."""
        data = self.tensor.data
        flat = data if data.dim() == 1 else data.view(-1)
        if self.numel == flat.numel():
            return flat
        return flat[self.start : self.start + self.numel]

    def part(self, start: int, numel: int) -> "Span":
        """A stretch of this one."""
        item = self.tensor.itemsize
        return Span(self.tensor, self.start + start, numel, self.address + start * item, numel * item)


def whole(tensor: Tensor) -> Span:
    """All of a contiguous tensor."""
    return Span(tensor, 0, tensor.numel(), tensor.data_ptr(), tensor.nbytes)


def even(tensor: Tensor, count: int) -> list[Span]:
    """A contiguous tensor in equal parts."""
    numel = tensor.numel()
    if numel % count:
        raise RuntimeError(f"{numel} elements do not divide among {count} ranks")
    numel //= count
    address, nbytes = tensor.data_ptr(), numel * tensor.itemsize
    return [Span(tensor, i * numel, numel, address + i * nbytes, nbytes) for i in range(count)]


def uneven(tensor: Tensor, rows: Sequence[int]) -> list[Span]:
    """A contiguous tensor in parts of so many rows of its first dimension."""
    row = tensor[0].numel() if tensor.shape[0] else 0
    address, row_bytes = tensor.data_ptr(), row * tensor.itemsize
    parts, start = [], 0
    for count in rows:
        parts.append(Span(tensor, start * row, count * row, address + start * row_bytes, count * row_bytes))
        start += count
    if start != tensor.shape[0]:
        raise RuntimeError(f"the parts have {start} rows together, the tensor {tensor.shape[0]}")
    return parts


def shares(span: Span, count: int) -> list[Span]:
    """A stretch in `count` parts: the first ones full, the last ones short or empty."""
    width = -(-span.numel // count)
    starts = [min(i * width, span.numel) for i in range(count + 1)]
    return [span.part(starts[i], starts[i + 1] - starts[i]) for i in range(count)]


def apart(source: Tensor, place: Tensor) -> Tensor:
    """The source, copied if it shares memory with the tensor that is written to."""
    return torch.clone(source.data) if overlap(source, place) else source


def overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two contiguous tensors share memory."""
    first, start = one.data_ptr(), other.data_ptr()
    return start < first + one.nbytes and first < start + other.nbytes
