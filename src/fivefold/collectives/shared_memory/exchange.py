"""Collectives between the ranks of one segment, as operations of the engine.

All of them are made of steps, numbered alike on all ranks. In a step a rank puts data into its slot (`_open`, `_put`,
`_post`), and others read it (`_met`, copy, `_close`). A rank may put out its data for a step once all have read those
of the step before last, in another slot than those of the last. Data longer than a slot pass in rounds.
"""

import ctypes
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from fivefold.collectives.shared_memory.engine import Lack, Steps
from fivefold.collectives.shared_memory.reduction import Kind, reduce_into
from fivefold.collectives.shared_memory.segment import LINE_BYTES, Segment, SharedMemoryError
from fivefold.collectives.shared_memory.slots import MANY, TIMED_BYTES, Slots
from fivefold.collectives.shared_memory.span import Span, shares

copy = ctypes.memmove
"""(to, from, bytes): a tenth of the overhead of a tensor's copy_, and no view of either side is needed."""

AT_ONCE_BYTES = 1 << 17  # up to here every rank reduces everything itself: one meeting instead of two
SHORT_BYTES = 1 << 16
MOST_VIEWS = 64
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
    """The collectives of a segment."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._rank, self.size = segment.rank, segment.size
        self._ranks = range(self.size)
        self._others = [(self._rank + i) % self.size for i in range(1, self.size)]  # each begins with another
        # Of a slot, for each rank.
        self.share_bytes = segment.slot_bytes // self.size // LINE_BYTES * LINE_BYTES
        # Between two ranks it copies no more than sharing out does, and saves a meeting at any size.
        self._at_once_bytes = min(segment.slot_bytes, segment.slot_bytes if self.size == 2 else AT_ONCE_BYTES)
        self._own = Slots()
        self._chosen = 0  # the number of this rank's slot in this step
        self._writes = 0  # those long enough to be timed
        self._timed_bytes, self._timed_seconds = 0, 0.0
        self._reserved: set[int] = set()
        self._step = 0
        self._words = segment.words
        self._posted = [segment.posted(rank) for rank in range(self.size)]
        self._done = [segment.done(rank) for rank in range(self.size)]
        self._notes = [[segment.note(rank, step) for rank in range(self.size)] for step in (0, 1)]
        self._first = [segment.address + segment.slot(rank, 0) for rank in range(self.size)]
        self._slots = self._first.copy()  # in this step: the address of this rank's, and of those it has met
        self._slot_bytes = segment.slot_bytes
        self._parts: dict[tuple[object, ...], list[Tensor]] = {}

    def barrier(self) -> Steps:
        note = _note("barrier", 0)
        yield from self._open()
        self._post(note)
        yield from self._met(self._others, note)
        self._close()

    def all_reduce(self, span: Span, kind: Kind) -> Steps:
        note = _note("all_reduce", span.nbytes, kind)
        if span.nbytes <= self._at_once_bytes:
            if span.nbytes:
                yield from self._all_reduce_at_once(span, kind, note)
            return
        item = span.tensor.itemsize
        if self.size == 2:
            for start, stop in rounds(span.numel, self._at_once_bytes // item):
                yield from self._all_reduce_at_once(span.part(start, stop - start), kind, note)
            return
        together = self.share_bytes // item * self.size
        for start in range(0, span.numel, together):
            part = span.part(start, min(together, span.numel - start))
            yield from self._all_reduce_shared_out(part, kind, note)

    def _all_reduce_at_once(self, span: Span, kind: Kind, note: int) -> Steps:
        flat = span.vector()
        yield from self._open()
        self._put(0, span.address, span.nbytes)
        self._post(note)
        yield from self._met(self._others, note)
        parts = self._views(0, span.numel, flat.dtype)
        if self._rank < 2:  # the first two are read before anything is written
            parts[self._rank] = flat
        reduce_into(flat, parts, kind)
        self._close()

    def _all_reduce_shared_out(self, span: Span, kind: Kind, note: int) -> Steps:
        """Each rank reduces its share, and hands it to all."""
        shared = shares(span, self.size)
        mine = shared[self._rank]
        flat = mine.vector()
        width = shared[0].nbytes
        yield from self._open()
        for rank in self._others:
            self._put(rank * width, shared[rank].address, shared[rank].nbytes)
        self._post(note)
        yield from self._met(self._others, note)
        parts = self._views(self._rank * width, mine.numel, flat.dtype)
        parts[self._rank] = flat
        step = self._step
        yield from self._open()  # before the step before is closed: its data are still to be read
        reduce_into(self._view(self._rank, 0, mine.numel, flat.dtype), parts, kind)
        self._segment.set(self._done[self._rank], step)
        self._post(note)
        copy(mine.address, self._slots[self._rank], mine.nbytes)
        for rank in self._others:
            yield from self._met([rank], note)
            copy(shared[rank].address, self._slots[rank], shared[rank].nbytes)
        self._close()

    def reduce_scatter(self, out: Span, inputs: Sequence[Span], kind: Kind) -> Steps:
        """`inputs` holds this rank's part for each rank, as long as that rank's `out`; its own may be `out`."""
        longest = max([part.numel for part in inputs])
        item, dtype = out.tensor.itemsize, out.tensor.dtype
        note = _note("reduce_scatter", longest * item, kind)
        mine, flat, width = inputs[self._rank], out.vector(), self.share_bytes
        # The third rank's own part is read after `out` is written: where they are one, its slot keeps it. A short
        # part is kept too: copying it takes less time than making a tensor of it.
        keeps = mine.nbytes <= SHORT_BYTES or (self._rank >= 2 and mine.address == out.address)
        own = flat if keeps else mine.vector()
        for start, stop in rounds(longest, width // item):
            yield from self._open()
            for rank in self._ranks if keeps else self._others:
                source = inputs[rank]
                size = within(start, stop, source.numel) * item
                self._put(rank * width, source.address + start * item, size)
            self._post(note)
            yield from self._met(self._others, note)
            if numel := within(start, stop, out.numel):
                parts = self._views(self._rank * width, numel, dtype)
                if not keeps:
                    parts[self._rank] = own if numel == out.numel else own[start : start + numel]
                place = flat if numel == out.numel else flat[start : start + numel]
                reduce_into(place, parts, kind)
            self._close()

    def all_gather(self, outputs: Sequence[Span], source: Span) -> Steps:
        """`outputs` has a place for each rank's `source`; these may differ in length."""
        longest = max([out.nbytes for out in outputs])
        note = _note("all_gather", longest)
        mine = outputs[self._rank]
        for start, stop in rounds(longest, self._segment.slot_bytes):
            yield from self._open()
            size = within(start, stop, source.nbytes)
            self._put(0, source.address + start, size)
            self._post(note)
            if mine.address != source.address:
                copy(mine.address + start, source.address + start, size)
            for rank in self._others:
                yield from self._met([rank], note)
                out = outputs[rank]
                copy(out.address + start, self._slots[rank], within(start, stop, out.nbytes))
            self._close()

    def all_to_all(self, outputs: Sequence[Span], inputs: Sequence[Span], *, even: bool) -> Steps:
        """`inputs[r]` goes to rank r, `outputs[r]` comes from it. `even`: all are equally long, on all ranks."""
        longest = inputs[0].nbytes
        if not even:
            table: list[list[int]] = []
            yield from self._tell(_note("all_to_all", 0), [part.nbytes for part in inputs], table)
            for rank in self._others:
                if (sent := table[rank][self._rank]) != outputs[rank].nbytes:
                    name = self._segment.peers[rank].rank
                    raise RuntimeError(f"rank {name} sends {sent} bytes, {outputs[rank].nbytes} are expected")
            longest = max(map(max, table))
        note = _note("all_to_all", longest)
        mine, width = inputs[self._rank], self.share_bytes
        for start, stop in rounds(longest, width):
            yield from self._open()
            size = stop - start
            for rank in self._others:
                source = inputs[rank]
                size = size if even else within(start, stop, source.nbytes)
                self._put(rank * width, source.address + start, size)
            self._post(note)
            size = size if even else within(start, stop, mine.nbytes)
            copy(outputs[self._rank].address + start, mine.address + start, size)
            for rank in self._others:
                yield from self._met([rank], note)
                size = size if even else within(start, stop, outputs[rank].nbytes)
                copy(outputs[rank].address + start, self._slots[rank] + self._rank * width, size)
            self._close()

    def broadcast(self, span: Span, root: int) -> Steps:
        note = _note("broadcast", span.nbytes, root=root)
        for start, stop in rounds(span.nbytes, self._segment.slot_bytes):
            yield from self._open(writes=self._rank == root)
            if self._rank == root:
                self._put(0, span.address + start, stop - start)
                self._post(note)
            else:
                yield from self._met([root], note)
                copy(span.address + start, self._slots[root], stop - start)
            self._close()

    def reduce(self, span: Span, root: int, kind: Kind) -> Steps:
        note = _note("reduce", span.nbytes, kind, root)
        flat = span.vector()
        item = flat.itemsize
        for start, stop in rounds(span.numel, self._segment.slot_bytes // item):
            yield from self._open()
            self._put(0, span.address + start * item, (stop - start) * item)
            self._post(note)
            if self._rank == root:
                yield from self._met(self._others, note)
                parts = self._views(0, stop - start, flat.dtype)
                reduce_into(flat[start:stop], parts, kind)
            self._close()

    def gather(self, outputs: Sequence[Span], source: Span, root: int) -> Steps:
        """`outputs` has a place for each rank's `source` on the root, and is empty elsewhere."""
        note = _note("gather", source.nbytes, root=root)
        if self._rank == root:
            copy(outputs[root].address, source.address, source.nbytes)
        for start, stop in rounds(source.nbytes, self._segment.slot_bytes):
            yield from self._open(writes=self._rank != root)
            if self._rank != root:
                self._put(0, source.address + start, stop - start)
                self._post(note)
            else:
                for rank in self._others:
                    yield from self._met([rank], note)
                    copy(outputs[rank].address + start, self._slots[rank], stop - start)
            self._close()

    def scatter(self, out: Span, inputs: Sequence[Span], root: int) -> Steps:
        """`inputs` holds each rank's part on the root, and is empty elsewhere."""
        note = _note("scatter", out.nbytes, root=root)
        width = self.share_bytes
        if self._rank == root:
            copy(out.address, inputs[root].address, out.nbytes)
        for start, stop in rounds(out.nbytes, width):
            yield from self._open(writes=self._rank == root)
            if self._rank == root:
                for rank in self._others:
                    self._put(rank * width, inputs[rank].address + start, stop - start)
                self._post(note)
            else:
                yield from self._met([root], note)
                copy(out.address + start, self._slots[root] + self._rank * width, stop - start)
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

    def _open(self, *, writes: bool = True) -> list[Lack]:
        """Begins the next step; what has to come before this rank's slot is free for what it puts out."""
        self._step = step = self._step + 1
        if not writes:
            return []
        words, done, last = self._words, self._done, step - 2
        self._chosen = number = self._choose()
        self._slots[self._rank] = self._first[self._rank] + number * self._slot_bytes
        return [Lack(done[rank], last, rank) for rank in self._others if words[done[rank]] < last]

    def _choose(self) -> int:
        """This rank's slot for a step."""
        number = self._own.next()
        if number in self._reserved:
            return number
        if number < 2 or self._segment.has_plenty(MANY * self._slot_bytes * self.size):
            try:
                self._segment.reserve(self._segment.slot(self._rank, number), self._slot_bytes)
                self._reserved.add(number)
                return number
            except SharedMemoryError:
                if number < 2:
                    raise
        self._own.only_two()
        return self._choose()

    def _put(self, offset: int, address: int, size: int) -> None:
        """Copies data into this rank's slot."""
        place = self._slots[self._rank] + offset
        if size >= TIMED_BYTES:
            self._writes += 1
        if size < TIMED_BYTES or self._writes % self._own.timed_every:
            copy(place, address, size)
            return
        before = time.perf_counter()
        copy(place, address, size)
        self._timed_seconds += time.perf_counter() - before
        self._timed_bytes += size

    def _post(self, note: int) -> None:
        """This rank's slot is ready to be read."""
        step = self._step
        self._words[self._notes[step & 1][self._rank]] = note | self._chosen << _SLOT_BIT
        self._segment.set(self._posted[self._rank], step)
        if self._timed_bytes:
            self._own.took(self._timed_bytes, self._timed_seconds)
            self._timed_bytes, self._timed_seconds = 0, 0.0

    def _met(self, ranks: Sequence[int], note: int) -> Steps:
        """Waits until those ranks' slots are ready.

        Raises:
            RuntimeError: one of them is in another collective.
        """
        step, words, posted = self._step, self._words, self._posted
        notes, slots = self._notes[step & 1], self._slots
        first, slot_bytes = self._first, self._slot_bytes
        for rank in ranks:
            if words[posted[rank]] < step:
                yield Lack(posted[rank], step, rank)
            found = words[notes[rank]]
            if found & _ALL_BUT_SLOT != note:
                name = self._segment.peers[rank].rank
                raise RuntimeError(f"rank {name} has entered {_read(found)} in its place, not {_read(note)}")
            slots[rank] = first[rank] + (found >> _SLOT_BIT & MANY - 1) * slot_bytes

    def _close(self) -> None:
        """This rank has read all it needs of this step, and of those before."""
        self._segment.set(self._done[self._rank], self._step)

    def _view(self, rank: int, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """A part of a rank's slot."""
        return self._segment.view(self._slots[rank] - self._segment.address + offset, numel, dtype)

    def _views(self, offset: int, numel: int, dtype: torch.dtype) -> list[Tensor]:
        """The same part of every rank's slot."""
        key = (*self._slots, offset, numel, dtype)
        views = self._parts.get(key)
        if views is None:
            if len(self._parts) >= MOST_VIEWS:
                self._parts.clear()
            views = self._parts[key] = [self._view(rank, offset, numel, dtype) for rank in self._ranks]
        return views.copy()


def rounds(length: int, most: int) -> Iterator[tuple[int, int]]:
    """Start and stop of pieces of at most so much."""
    return pairwise((0, length) if 0 < length <= most else (*range(0, length, most), length))


def within(start: int, stop: int, length: int) -> int:
    """How much of start to stop lies within so much."""
    return max(0, min(stop, length) - start)


# A note says in one word what a rank does: primitive, reduction, root, its slot and bytes.
_SLOT_BIT = 38
_ALL_BUT_SLOT = ~((MANY - 1) << _SLOT_BIT)
_BYTES = (1 << _SLOT_BIT) - 1
_NUMBERS = {primitive: number << 60 for number, primitive in enumerate(PRIMITIVES)}


def _note(primitive: str, size: int, kind: Kind = Kind.SUM, root: int = 0) -> int:
    return _NUMBERS[primitive] | kind << 56 | root << 44 | size & _BYTES


def _read(note: int) -> str:
    primitive = PRIMITIVES[note >> 60]
    return f"{primitive} of {note & _BYTES} bytes"
