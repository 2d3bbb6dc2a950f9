"""Collectives between the ranks of one segment, as operations of the engine.

All of them are made of steps, numbered alike on all ranks. In a step a rank puts data into its slot (`_open`, copy,
`_post`), and others read it (`_met`, copy, `_close`). A rank has two slots in turn: it may put out its data for a step
once all have read those of the step before last. Data longer than a slot pass in rounds.
"""

import ctypes
from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from fivefold.collectives.shared_memory.engine import Lack, Steps
from fivefold.collectives.shared_memory.reduction import Kind, reduce_into
from fivefold.collectives.shared_memory.segment import LINE_BYTES, Segment

copy = ctypes.memmove
"""(to, from, bytes): a tenth of the overhead of a tensor's copy_, and no view of either side is needed."""

AT_ONCE_BYTES = 1 << 17  # up to here every rank reduces everything itself: one meeting instead of two
PRIMITIVES = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "barrier",
)


class Exchange:
    """The collectives of a segment. Tensors are contiguous; those to be read and written may be the same."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._rank, self.size = segment.rank, segment.size
        self._others = [rank for rank in range(self.size) if rank != self._rank]
        self._step = 0
        self._words = segment.words
        self._posted = segment.posted(self._rank)
        self._done = segment.done(self._rank)

    def barrier(self) -> Steps:
        note = _note("barrier", 0)
        yield from self._open()
        self._post(note)
        yield from self._met(self._others, note)
        self._close()

    def all_reduce(self, tensor: Tensor, kind: Kind) -> Steps:
        note = _note("all_reduce", tensor.nbytes, kind)
        flat = vector(tensor)
        if tensor.nbytes <= min(AT_ONCE_BYTES, self._segment.slot_bytes):
            if tensor.nbytes:
                yield from self._all_reduce_at_once(flat, kind, note)
            return
        share = self._segment.slot_bytes // self.size // LINE_BYTES * LINE_BYTES // flat.itemsize
        for start in range(0, flat.numel(), share * self.size):
            part = flat[start : start + share * self.size]
            yield from self._all_reduce_shared_out(part, kind, note)

    def _all_reduce_at_once(self, flat: Tensor, kind: Kind, note: int) -> Steps:
        numel, dtype, size = flat.numel(), flat.dtype, flat.nbytes
        yield from self._open()
        copy(self._mine(), flat.data_ptr(), size)
        self._post(note)
        yield from self._met(self._others, note)
        parts = [self._view(rank, 0, numel, dtype) for rank in range(self.size)]
        if self._rank < 2:  # the first two are read before anything is written
            parts[self._rank] = flat
        reduce_into(flat, parts, kind)
        self._close()

    def _all_reduce_shared_out(self, flat: Tensor, kind: Kind, note: int) -> Steps:
        """Each rank reduces its share, and hands it to all."""
        bounds = shares(flat.numel(), self.size)
        item, dtype, address = flat.itemsize, flat.dtype, flat.data_ptr()
        width = bounds[1] * item
        first, last = bounds[self._rank], bounds[self._rank + 1]
        yield from self._open()
        for rank in self._others:
            copy(
                self._mine() + rank * width,
                address + bounds[rank] * item,
                (bounds[rank + 1] - bounds[rank]) * item,
            )
        self._post(note)
        yield from self._met(self._others, note)
        parts = [self._view(rank, self._rank * width, last - first, dtype) for rank in range(self.size)]
        parts[self._rank] = flat[first:last]
        step = self._step
        yield from self._open()  # before the step before is closed: its data are still to be read
        out = self._view(self._rank, 0, last - first, dtype)
        reduce_into(out, parts, kind)
        self._segment.set(self._done, step)
        self._post(note)
        copy(address + first * item, self._mine(), (last - first) * item)
        for rank in self._others:
            yield from self._met([rank], note)
            copy(
                address + bounds[rank] * item,
                self._theirs(rank),
                (bounds[rank + 1] - bounds[rank]) * item,
            )
        self._close()

    def reduce_scatter(self, out: Tensor, inputs: Sequence[Tensor], kind: Kind) -> Steps:
        """`inputs` holds this rank's part for each rank, as long as that rank's `out`."""
        longest = max(part.numel() for part in inputs)
        note = _note("reduce_scatter", longest * out.itemsize, kind)
        flat, sources = vector(out), [vector(part) for part in inputs]
        item, dtype = flat.itemsize, flat.dtype
        width = self._share_bytes()
        # The third rank's own part is read after `out` is written: where they are one, its slot keeps it.
        keeps = self._rank >= 2 and sources[self._rank].data_ptr() == flat.data_ptr()
        for start, stop in rounds(longest, width // item):
            yield from self._open()
            for rank in range(self.size) if keeps else self._others:
                size = _part(start, stop, sources[rank].numel()) * item
                copy(self._mine() + rank * width, sources[rank].data_ptr() + start * item, size)
            self._post(note)
            yield from self._met(self._others, note)
            if numel := _part(start, stop, flat.numel()):
                parts = [self._view(r, self._rank * width, numel, dtype) for r in range(self.size)]
                if not keeps:
                    parts[self._rank] = sources[self._rank][start : start + numel]
                reduce_into(flat[start : start + numel], parts, kind)
            self._close()

    def all_gather(self, outputs: Sequence[Tensor], source: Tensor) -> Steps:
        """`outputs` has a place for each rank's `source`; these may differ in length."""
        sizes = [out.nbytes for out in outputs]
        note = _note("all_gather", max(sizes))
        address, places = source.data_ptr(), [out.data_ptr() for out in outputs]
        if (mine := places[self._rank]) != address:
            copy(mine, address, source.nbytes)
        for start, stop in rounds(max(sizes), self._segment.slot_bytes):
            yield from self._open()
            copy(self._mine(), address + start, _part(start, stop, source.nbytes))
            self._post(note)
            for rank in self._others:
                yield from self._met([rank], note)
                copy(places[rank] + start, self._theirs(rank), _part(start, stop, sizes[rank]))
            self._close()

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *, even: bool) -> Steps:
        """`inputs[r]` goes to rank r, `outputs[r]` comes from it. `even`: all are equally long, on all ranks."""
        sizes, wanted = [part.nbytes for part in inputs], [part.nbytes for part in outputs]
        longest = sizes[0]
        if not even:
            table: list[list[int]] = []
            yield from self._tell(_note("all_to_all", 0), sizes, table)
            for rank in self._others:
                if table[rank][self._rank] != wanted[rank]:
                    name = self._segment.peers[rank].rank
                    raise RuntimeError(
                        f"rank {name} sends {table[rank][self._rank]} bytes, {wanted[rank]} are expected"
                    )
            longest = max(map(max, table))
        note = _note("all_to_all", longest)
        sources, places = [part.data_ptr() for part in inputs], [part.data_ptr() for part in outputs]
        copy(places[self._rank], sources[self._rank], sizes[self._rank])
        width = self._share_bytes()
        for start, stop in rounds(longest, width):
            yield from self._open()
            for rank in self._others:
                copy(self._mine() + rank * width, sources[rank] + start, _part(start, stop, sizes[rank]))
            self._post(note)
            for rank in self._others:
                yield from self._met([rank], note)
                copy(
                    places[rank] + start,
                    self._theirs(rank) + self._rank * width,
                    _part(start, stop, wanted[rank]),
                )
            self._close()

    def broadcast(self, tensor: Tensor, root: int) -> Steps:
        note = _note("broadcast", tensor.nbytes, root=root)
        address = tensor.data_ptr()
        for start, stop in rounds(tensor.nbytes, self._segment.slot_bytes):
            yield from self._open(writes=self._rank == root)
            if self._rank == root:
                copy(self._mine(), address + start, stop - start)
                self._post(note)
            else:
                yield from self._met([root], note)
                copy(address + start, self._theirs(root), stop - start)
            self._close()

    def reduce(self, tensor: Tensor, root: int, kind: Kind) -> Steps:
        note = _note("reduce", tensor.nbytes, kind, root)
        flat = vector(tensor)
        item, dtype = flat.itemsize, flat.dtype
        for start, stop in rounds(flat.numel(), self._segment.slot_bytes // item):
            yield from self._open()
            copy(self._mine(), flat.data_ptr() + start * item, (stop - start) * item)
            self._post(note)
            if self._rank == root:
                yield from self._met(self._others, note)
                parts = [self._view(rank, 0, stop - start, dtype) for rank in range(self.size)]
                reduce_into(flat[start:stop], parts, kind)
            self._close()

    def gather(self, outputs: Sequence[Tensor], source: Tensor, root: int) -> Steps:
        """`outputs` has a place for each rank's `source` on the root, and is empty elsewhere."""
        note = _note("gather", source.nbytes, root=root)
        address = source.data_ptr()
        if self._rank == root:
            copy(outputs[root].data_ptr(), address, source.nbytes)
        for start, stop in rounds(source.nbytes, self._segment.slot_bytes):
            yield from self._open(writes=self._rank != root)
            if self._rank != root:
                copy(self._mine(), address + start, stop - start)
                self._post(note)
            else:
                for rank in self._others:
                    yield from self._met([rank], note)
                    copy(outputs[rank].data_ptr() + start, self._theirs(rank), stop - start)
            self._close()

    def scatter(self, out: Tensor, inputs: Sequence[Tensor], root: int) -> Steps:
        """`inputs` holds each rank's part on the root, and is empty elsewhere."""
        note = _note("scatter", out.nbytes, root=root)
        address, width = out.data_ptr(), self._share_bytes()
        if self._rank == root:
            copy(address, inputs[root].data_ptr(), out.nbytes)
        for start, stop in rounds(out.nbytes, width):
            yield from self._open(writes=self._rank == root)
            if self._rank == root:
                for rank in self._others:
                    copy(self._mine() + rank * width, inputs[rank].data_ptr() + start, stop - start)
                self._post(note)
            else:
                yield from self._met([root], note)
                copy(address + start, self._theirs(root) + self._rank * width, stop - start)
            self._close()

    def _tell(self, note: int, numbers: list[int], table: list[list[int]]) -> Steps:
        """Fills `table` with the numbers of each rank."""
        size = len(numbers)
        yield from self._open()
        self._view(self._rank, 0, size, torch.int64).copy_(torch.tensor(numbers))
        self._post(note)
        yield from self._met(self._others, note)
        table += [self._view(rank, 0, size, torch.int64).tolist() for rank in range(self.size)]
        self._close()

    # The steps

    def _open(self, *, writes: bool = True) -> Steps:
        """Begins the next step; this rank's slot is free for what it puts out."""
        self._step = step = self._step + 1
        if writes:
            if step <= 2:
                self._segment.reserve(self._segment.slot(self._rank, step), self._segment.slot_bytes)
            for rank in self._others:
                word = self._segment.done(rank)
                if self._words[word] + 2 < step:
                    yield Lack(word, step - 2, rank)

    def _post(self, note: int) -> None:
        """This rank's slot is ready to be read."""
        self._words[self._segment.note(self._rank, self._step)] = note
        self._segment.set(self._posted, self._step)

    def _met(self, ranks: Iterator[int] | Sequence[int], note: int) -> Steps:
        """Waits until those ranks' slots are ready.

        Raises:
            RuntimeError: one of them is in another collective.
        """
        step = self._step
        for rank in ranks:
            word = self._segment.posted(rank)
            if self._words[word] < step:
                yield Lack(word, step, rank)
            found = self._words[self._segment.note(rank, step)]
            if found != note:
                name = self._segment.peers[rank].rank
                raise RuntimeError(f"rank {name} has entered {_read(found)} in its place, not {_read(note)}")

    def _close(self) -> None:
        """This rank has read all it needs of this step, and of those before."""
        self._segment.set(self._done, self._step)

    def _mine(self) -> int:
        """The address of this rank's slot."""
        return self._theirs(self._rank)

    def _theirs(self, rank: int) -> int:
        return self._segment.address + self._segment.slot(rank, self._step)

    def _view(self, rank: int, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """A part of a rank's slot."""
        return self._segment.view(self._segment.slot(rank, self._step) + offset, numel, dtype)

    def _share_bytes(self) -> int:
        """What a slot holds for each rank."""
        return self._segment.slot_bytes // self.size // LINE_BYTES * LINE_BYTES


def vector(tensor: Tensor) -> Tensor:
    """The tensor's elements in a row, apart from autograd."""
    return tensor.data.view(-1)


def shares(numel: int, size: int) -> list[int]:
    """The bounds of `size` shares of so many elements: the first ones full, the last ones short or empty."""
    width = -(-numel // size)
    return [min(i * width, numel) for i in range(size + 1)]


def rounds(length: int, most: int) -> Iterator[tuple[int, int]]:
    """Start and stop of pieces of at most so much."""
    return pairwise([*range(0, length, most), length])


def _part(start: int, stop: int, length: int) -> int:
    """How much of start to stop lies within so much."""
    return max(0, min(stop, length) - start)


# A note says in one word what a rank does: primitive, reduction, root and bytes.


def _note(primitive: str, size: int, kind: Kind = Kind.SUM, root: int = 0) -> int:
    return PRIMITIVES.index(primitive) << 60 | kind << 56 | root << 44 | size


def _read(note: int) -> str:
    primitive = PRIMITIVES[note >> 60]
    return f"{primitive} of {note & (1 << 44) - 1} bytes"
