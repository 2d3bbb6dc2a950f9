"""Stretches of contiguous tensors, as addresses: making a tensor of each takes longer than copying a small one."""

from collections.abc import Sequence
from itertools import accumulate
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


class Parts(NamedTuple):
    """A stretch for each rank: all of one tensor, or each of its own; the tensors stay alive with it."""

    tensors: Sequence[Tensor]
    addresses: Sequence[int]
    sizes: Sequence[int]  # in bytes

    def span(self, rank: int) -> Span:
        """That rank's."""
        tensor = self.tensors[rank if len(self.tensors) > 1 else 0]
        address, nbytes, item = self.addresses[rank], self.sizes[rank], tensor.itemsize
        return Span(tensor, (address - tensor.data_ptr()) // item, nbytes // item, address, nbytes)

    def vectors(self) -> list[Tensor]:
        """The elements of each in a row."""
        return [self.span(rank).vector() for rank in range(len(self.sizes))]

    def of(self, ranks: Sequence[int]) -> "Parts":
        """Those of some ranks."""
        tensors = [self.tensors[rank] for rank in ranks] if len(self.tensors) > 1 else self.tensors
        return Parts(tensors, [self.addresses[rank] for rank in ranks], [self.sizes[rank] for rank in ranks])


def each(tensors: Sequence[Tensor]) -> Parts:
    """All of each contiguous tensor."""
    return Parts(tensors, [tensor.data_ptr() for tensor in tensors], [tensor.nbytes for tensor in tensors])


def even(tensor: Tensor, count: int) -> Parts:
    """A contiguous tensor in equal parts."""
    if tensor.numel() % count:
        raise RuntimeError(f"{tensor.numel()} elements do not divide among {count} ranks")
    address, nbytes = tensor.data_ptr(), tensor.nbytes
    size = nbytes // count
    addresses = range(address, address + nbytes, size) if size else (address,) * count
    return Parts((tensor,), addresses, (size,) * count)


def uneven(tensor: Tensor, rows: Sequence[int]) -> Parts:
    """A contiguous tensor in parts of so many rows of its first dimension."""
    row_bytes = tensor[0].nbytes if tensor.shape[0] else 0
    if sum(rows) != tensor.shape[0]:
        raise RuntimeError(f"the parts have {sum(rows)} rows together, the tensor {tensor.shape[0]}")
    sizes = [count * row_bytes for count in rows]
    return _in_a_row(tensor, tensor.data_ptr(), sizes)


def shares(span: Span, count: int) -> Parts:
    """A stretch in `count` parts: the first ones full, the last ones short or empty."""
    width = -(-span.numel // count) * span.tensor.itemsize
    sizes = [max(0, min(width, span.nbytes - i * width)) for i in range(count)]
    return _in_a_row(span.tensor, span.address, sizes)


def _in_a_row(tensor: Tensor, address: int, sizes: list[int]) -> Parts:
    return Parts((tensor,), [*accumulate(sizes[:-1], initial=address)], sizes)


def apart(source: Tensor, place: Tensor) -> Tensor:
    """The source, copied if it shares memory with the tensor that is written to."""
    return torch.clone(source.data) if overlap(source, place) else source


def overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two contiguous tensors share memory."""
    first, start = one.data_ptr(), other.data_ptr()
    return start < first + one.nbytes and first < start + other.nbytes
