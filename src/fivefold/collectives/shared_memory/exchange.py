"""Collectives between the ranks of one segment, as operations of the engine.

All of them are made of steps, numbered alike on all ranks. In a step a rank puts data into its slot (`_open`, `_put`),
tells the others (`_post`), and reads what they have put out (`_met`, copy). Every rank posts every step, also one in
which it puts out nothing, and before it opens a step it has met all others in the last one: so they have read what it
put out in the step before that, whose slot is free again. Data longer than a slot pass in rounds.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from fivefold.collectives.shared_memory.copying import LINE_BYTES, Copy, Writing, cache_bytes, copy, stream
from fivefold.collectives.shared_memory.cores import cores_of
from fivefold.collectives.shared_memory.engine import Lack, Steps
from fivefold.collectives.shared_memory.notes import note_of, read
from fivefold.collectives.shared_memory.reduction import Kind, reduce_into
from fivefold.collectives.shared_memory.segment import Segment
from fivefold.collectives.shared_memory.span import Parts, Span, shares

AT_ONCE_BYTES = 1 << 17  # up to here every rank reduces everything itself: one meeting instead of two
SHORT_BYTES = 1 << 16
MOST_VIEWS = 64


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
        self._writing = Writing()
        # Results from here on are longer than the caches have room for, together with what is sent.
        cores = set[int]().union(*(cores_of(peer.pid) for peer in segment.peers))
        self._stream_bytes = cache_bytes(self.size, cores) // 2
        self._reserved: set[int] = set()
        self._step = 0
        self._unmet: tuple[Sequence[int], int] | None = None  # in the last step, and their note
        self._words = segment.words
        self._posted = [segment.posted(rank) for rank in range(self.size)]
        self._notes = [[segment.note(rank, step) for rank in range(self.size)] for step in (0, 1)]
        self._places = [
            [segment.address + segment.slot(rank, step) for rank in self._ranks] for step in (0, 1)
        ]
        self._slots = self._places[0]  # in this step
        self._parts: dict[tuple[object, ...], list[Tensor]] = {}

    def barrier(self) -> Steps:
        note = note_of("barrier", 0)
        yield from self._open()
        self._post(note)
        yield from self._met(self._others, note)

    def all_reduce(self, span: Span, kind: Kind) -> Steps:
        note = note_of("all_reduce", span.nbytes, kind, dtype=span.tensor.dtype)
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

    def _all_reduce_shared_out(self, span: Span, kind: Kind, note: int) -> Steps:
        """Each rank reduces its share, and hands it to all."""
        shared = shares(span, self.size)
        mine = shared.span(self._rank)
        flat = mine.vector()
        width = shared.sizes[0]
        yield from self._open()
        for rank in self._others:
            self._put(rank * width, shared.addresses[rank], shared.sizes[rank])
        self._post(note)
        yield from self._met(self._others, note)
        parts = self._views(self._rank * width, mine.numel, flat.dtype)
        parts[self._rank] = flat
        yield from self._open()
        reduce_into(self._own(mine.numel, flat.dtype), parts, kind)
        self._post(note)
        copy(mine.address, self._slots[self._rank], mine.nbytes)
        for rank in self._others:
            yield from self._met([rank], note)
            copy(shared.addresses[rank], self._slots[rank], shared.sizes[rank])

    def reduce_scatter(self, out: Span, inputs: Parts, kind: Kind) -> Steps:
        """`inputs` holds this rank's part for each rank, as long as that rank's `out`; its own may be `out`."""
        addresses, sizes = inputs.addresses, inputs.sizes
        longest = max(sizes)
        item, dtype = out.tensor.itemsize, out.tensor.dtype
        note = note_of("reduce_scatter", longest, kind, dtype=dtype)
        flat, width = out.vector(), self.share_bytes
        me, own = self._rank, addresses[self._rank]
        # A short part of one's own is copied, which takes less time than making a tensor of it: to where the sum will
        # be, or, from the third rank on, whose part is read after that has been written, into the slot. A longer one is
        # read where it is, if that is not where the sum will be.
        lands = me < 2 and sizes[me] <= SHORT_BYTES
        keeps = me >= 2 and (sizes[me] <= SHORT_BYTES or own == out.address)
        mine = flat if lands or keeps else inputs.span(me).vector()
        for start, stop in rounds(longest, width):
            yield from self._open()
            for rank in self._ranks if keeps else self._others:
                self._put(rank * width, addresses[rank] + start, within(start, stop, sizes[rank]))
            self._post(note)
            size = within(start, stop, out.nbytes)
            if lands and own != out.address:
                copy(out.address + start, own + start, size)
            yield from self._met(self._others, note)
            if size:
                parts = self._views(me * width, size // item, dtype)
                place = _stretch(flat, start // item, size // item)
                if not keeps:
                    parts[me] = place if lands else _stretch(mine, start // item, size // item)
                reduce_into(place, parts, kind)

    def all_gather(self, outputs: Parts, source: Span) -> Steps:
        """`outputs` has a place for each rank's `source`; these may differ in length."""
        addresses, sizes = outputs.addresses, outputs.sizes
        longest = max(sizes)
        note = note_of("all_gather", longest)
        mine, land = addresses[self._rank], self._lander(sum(sizes))
        for start, stop in rounds(longest, self._segment.slot_bytes):
            yield from self._open()
            size = within(start, stop, source.nbytes)
            self._put(0, source.address + start, size)
            self._post(note)
            if mine != source.address:
                land(mine + start, source.address + start, size)
            for rank in self._others:
                yield from self._met([rank], note)
                land(addresses[rank] + start, self._slots[rank], within(start, stop, sizes[rank]))

    def all_to_all(self, outputs: Parts, inputs: Parts, *, even: bool) -> Steps:
        """`inputs[r]` goes to rank r, `outputs[r]` comes from it. `even`: all are equally long, on all ranks."""
        longest = inputs.sizes[0]
        if not even:
            table: list[list[int]] = []
            yield from self._tell(note_of("all_to_all", 0), inputs.sizes, table)
            for rank in self._others:
                if (sent := table[rank][self._rank]) != outputs.sizes[rank]:
                    name = self._segment.peers[rank].rank
                    raise RuntimeError(f"rank {name} sends {sent} bytes, {outputs.sizes[rank]} are expected")
            longest = max(map(max, table))
        note = note_of("all_to_all", longest)
        me, width, sources, places = self._rank, self.share_bytes, inputs.addresses, outputs.addresses
        land = self._lander(sum(outputs.sizes))
        for start, stop in rounds(longest, width):
            yield from self._open()
            for rank in self._others:
                self._put(rank * width, sources[rank] + start, within(start, stop, inputs.sizes[rank]))
            self._post(note)
            land(places[me] + start, sources[me] + start, within(start, stop, inputs.sizes[me]))
            for rank in self._others:
                yield from self._met([rank], note)
                slot = self._slots[rank] + me * width
                land(places[rank] + start, slot, within(start, stop, outputs.sizes[rank]))

    def broadcast(self, span: Span, root: int) -> Steps:
        note, land = note_of("broadcast", span.nbytes, root=root), self._lander(span.nbytes)
        for start, stop in rounds(span.nbytes, self._segment.slot_bytes):
            yield from self._open()
            if self._rank == root:
                self._put(0, span.address + start, stop - start)
            self._post(note)
            if self._rank != root:
                yield from self._met([root], note)
                land(span.address + start, self._slots[root], stop - start)
            self._unmet = [rank for rank in self._others if rank != root], note

    def reduce(self, span: Span, root: int, kind: Kind) -> Steps:
        note = note_of("reduce", span.nbytes, kind, root, span.tensor.dtype)
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
            else:
                self._unmet = self._others, note

    def gather(self, outputs: Parts, source: Span, root: int) -> Steps:
        """`outputs` has a place for each rank's `source` on the root, and is empty elsewhere."""
        note = note_of("gather", source.nbytes, root=root)
        land = self._lander(sum(outputs.sizes))
        if self._rank == root:
            land(outputs.addresses[root], source.address, source.nbytes)
        for start, stop in rounds(source.nbytes, self._segment.slot_bytes):
            yield from self._open()
            if self._rank != root:
                self._put(0, source.address + start, stop - start)
            self._post(note)
            if self._rank == root:
                for rank in self._others:
                    yield from self._met([rank], note)
                    land(outputs.addresses[rank] + start, self._slots[rank], stop - start)
            else:
                self._unmet = self._others, note

    def scatter(self, out: Span, inputs: Parts, root: int) -> Steps:
        """`inputs` holds each rank's part on the root, and is empty elsewhere."""
        note = note_of("scatter", out.nbytes, root=root)
        width, land = self.share_bytes, self._lander(out.nbytes)
        if self._rank == root:
            land(out.address, inputs.addresses[root], out.nbytes)
        for start, stop in rounds(out.nbytes, width):
            yield from self._open()
            if self._rank == root:
                for rank in self._others:
                    self._put(rank * width, inputs.addresses[rank] + start, stop - start)
            self._post(note)
            if self._rank != root:
                yield from self._met([root], note)
                land(out.address + start, self._slots[root] + self._rank * width, stop - start)
            self._unmet = [rank for rank in self._others if rank != root], note

    def _tell(self, note: int, numbers: Sequence[int], table: list[list[int]]) -> Steps:
        """Fills `table` with the numbers of each rank."""
        size = len(numbers)
        yield from self._open()
        self._own(size, torch.int64).copy_(torch.tensor(numbers))
        self._post(note)
        yield from self._met(self._others, note)
        table += [self._view(rank, 0, size, torch.int64).tolist() for rank in range(self.size)]

    # The steps

    def _open(self) -> Steps:
        """Begins the next step; this rank's slot in it is free then."""
        if self._unmet is not None:
            ranks, note = self._unmet
            yield from self._met(ranks, note)
            self._unmet = None
        self._step += 1
        self._slots = self._places[self._step & 1]

    def _put(self, offset: int, address: int, size: int) -> None:
        """Copies data into this rank's slot."""
        self._writing.write(self._slot() + offset, address, size)

    def _slot(self) -> int:
        """The address of this rank's slot, to write into."""
        number = self._step & 1
        if number not in self._reserved:
            self._segment.reserve(self._segment.slot(self._rank, number), self._segment.slot_bytes)
            self._reserved.add(number)
        return self._slots[self._rank]

    def _post(self, note: int) -> None:
        """This rank has read all it needs of the last step, and what it puts out in this one is ready to be read."""
        step = self._step
        self._words[self._notes[step & 1][self._rank]] = note
        self._segment.set(self._posted[self._rank], step)

    def _met(self, ranks: Sequence[int], note: int) -> Steps:
        """Waits until those ranks have posted this step.

        Raises:
            RuntimeError: one of them is in another collective.
        """
        step, words, posted = self._step, self._words, self._posted
        notes = self._notes[step & 1]
        for rank in ranks:
            if words[posted[rank]] < step:
                yield Lack(posted[rank], step, rank)
            found = words[notes[rank]]
            if found != note:
                names = [peer.rank for peer in self._segment.peers]
                raise RuntimeError(
                    f"rank {names[rank]} has entered {read(found, names)}, not {read(note, names)}"
                )

    def _lander(self, result_bytes: int) -> Copy:
        """What copies into a result of so many bytes."""
        return stream if result_bytes >= self._stream_bytes else copy

    def _own(self, numel: int, dtype: torch.dtype) -> Tensor:
        """The beginning of this rank's slot, to write into."""
        return self._segment.view(self._slot() - self._segment.address, numel, dtype)

    def _view(self, rank: int, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """A part of a rank's slot."""
        return self._segment.view(self._slots[rank] - self._segment.address + offset, numel, dtype)

    def _views(self, offset: int, numel: int, dtype: torch.dtype) -> list[Tensor]:
        """The same part of every rank's slot."""
        key = (self._step & 1, offset, numel, dtype)
        views = self._parts.get(key)
        if views is None:
            if len(self._parts) >= MOST_VIEWS:
                self._parts.clear()
            views = self._parts[key] = [self._view(rank, offset, numel, dtype) for rank in self._ranks]
        return views.copy()


def _stretch(vector: Tensor, start: int, numel: int) -> Tensor:
    return vector if numel == vector.numel() else vector[start : start + numel]


def rounds(length: int, most: int) -> Iterable[tuple[int, int]]:
    """Start and stop of pieces of at most so much."""
    return ((0, length),) if 0 < length <= most else pairwise((*range(0, length, most), length))


def within(start: int, stop: int, length: int) -> int:
    """How much of start to stop lies within so much."""
    return max(0, min(stop, length) - start)
