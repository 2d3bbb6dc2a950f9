"""Stretches of contiguous tensors, as addresses: making a tensor of each takes longer than copying a small one."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from torch import Tensor


@dataclass(slots=True, eq=False)
class Span:
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


@dataclass(slots=True, eq=False)
class Parts:
    """A stretch for each rank: all of one tensor, or each of its own; the tensors stay alive with it."""

    tensors: Sequence[Tensor]
    base: int  # an address
    offsets: Sequence[int]  # of the stretches from there, in bytes
    sizes: tuple[int, ...]  # in bytes

    def address(self, rank: int) -> int:
        """Where that rank's begins."""
        return self.base + self.offsets[rank]

    def span(self, rank: int) -> Span:
        """That rank's."""
        tensor = self.tensors[rank if len(self.tensors) > 1 else 0]
        address, nbytes, item = self.address(rank), self.sizes[rank], tensor.itemsize
        return Span(tensor, (address - tensor.data_ptr()) // item, nbytes // item, address, nbytes)

    def vectors(self) -> list[Tensor]:
        """The elements of each in a row."""
        return [self.span(rank).vector() for rank in range(len(self.sizes))]

    def of(self, ranks: Sequence[int]) -> "Parts":
        """Those of some ranks."""
        tensors = [self.tensors[rank] for rank in ranks] if len(self.tensors) > 1 else self.tensors
        offsets, sizes = [self.offsets[rank] for rank in ranks], tuple(self.sizes[rank] for rank in ranks)
        return Parts(tensors, self.base, offsets, sizes)


def only(span: Span) -> Parts:
    """One stretch."""
    return Parts((span.tensor,), span.address, (0,), (span.nbytes,))


def each(tensors: Sequence[Tensor]) -> Parts:
    """All of each contiguous tensor."""
    addresses, sizes = [tensor.data_ptr() for tensor in tensors], tuple(tensor.nbytes for tensor in tensors)
    return Parts(tensors, 0, addresses, sizes)


def even(tensor: Tensor, count: int) -> Parts:
    """A contiguous tensor in equal parts."""
    offsets, sizes = _evenly(tensor.nbytes, tensor.itemsize, count)
    return Parts((tensor,), tensor.data_ptr(), offsets, sizes)


@lru_cache(maxsize=256)
def _evenly(nbytes: int, item: int, count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offsets and sizes of the parts."""
    if nbytes // item % count:
        raise RuntimeError(f"{nbytes // item} elements do not divide among {count} ranks")
    size = nbytes // count
    return tuple(size * rank for rank in range(count)), (size,) * count


def uneven(tensor: Tensor, rows: Sequence[int]) -> Parts:
    """A contiguous tensor in parts of so many rows of its first dimension."""
    row_bytes = tensor[0].nbytes if tensor.shape[0] else 0
    if sum(rows) != tensor.shape[0]:
        raise RuntimeError(f"the parts have {sum(rows)} rows together, the tensor {tensor.shape[0]}")
    return _in_a_row(tensor, tensor.data_ptr(), tuple(count * row_bytes for count in rows))


def shares(span: Span, count: int) -> Parts:
    """A stretch in `count` parts: the first ones full, the last ones short or empty."""
    width = -(-span.numel // count) * span.tensor.itemsize
    sizes = tuple(max(0, min(width, span.nbytes - i * width)) for i in range(count))
    return _in_a_row(span.tensor, span.address, sizes)


def _in_a_row(tensor: Tensor, address: int, sizes: tuple[int, ...]) -> Parts:
    return Parts((tensor,), address, [*accumulate(sizes[:-1], initial=0)], sizes)


def alike(tensor: Tensor, parts: Parts) -> Parts:
    """A contiguous tensor in such parts as those of another."""
    return Parts((tensor,), tensor.data_ptr(), parts.offsets, parts.sizes)


def overlap(one: int, one_bytes: int, other: int, other_bytes: int) -> bool:
    """Whether two stretches, each an address and a length, share memory."""
    return one < other + other_bytes and other < one + one_bytes
