"""Collectives between the ranks of one segment, as operations of the engine.

All of them are made of steps, numbered alike on all ranks. In a step a rank puts data into its slot (`_open`, `_put`),
tells the others (`_post`), and reads what they have put out (`_met`, copy). Every rank posts every step, also one in
which it puts out nothing, and before it opens a step it has met all others in the last one: so they have read what it
put out in the step before that, whose slot is free again. Data longer than a slot pass in rounds.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from fivefold.collectives.shared_memory import moves
from fivefold.collectives.shared_memory.copying import LINE_BYTES, Writing, cache_bytes, copy, stream
from fivefold.collectives.shared_memory.cores import cores_of
from fivefold.collectives.shared_memory.engine import Lack, Steps
from fivefold.collectives.shared_memory.moves import Schedule, others, rounds, within
from fivefold.collectives.shared_memory.notes import note_of, read
from fivefold.collectives.shared_memory.reduction import Kind, reduce_into
from fivefold.collectives.shared_memory.segment import SLOTS, Segment
from fivefold.collectives.shared_memory.span import Parts, Span, only, shares

AT_ONCE_BYTES = 1 << 17  # up to here every rank reduces everything itself: one meeting instead of two
SHORT_BYTES = 1 << 16
MOST_VIEWS = 64


class Exchange:
    """The collectives of a segment."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._rank, self.size = segment.rank, segment.size
        self._ranks = range(self.size)
        self._others = others(self._rank, self.size)
        # Of a slot, for each rank.
        self.share_bytes = segment.slot_bytes // self.size // LINE_BYTES * LINE_BYTES
        # Between two ranks it copies no more than sharing out does, and saves a meeting at any size.
        self._at_once_bytes = min(segment.slot_bytes, segment.slot_bytes if self.size == 2 else AT_ONCE_BYTES)
        self._writing = Writing()
        # Results from here on are longer than the caches have room for, together with what is sent.
        cores = set[int]().union(*(cores_of(peer.pid) for peer in segment.peers))
        self._stream_bytes = cache_bytes(self.size, cores) // 2
        self._reserved = False
        self._step = 0
        self._unmet: tuple[Sequence[int], int] | None = None  # in the last step, and their note
        self._words = segment.words
        self._posted = [segment.posted(rank) for rank in range(self.size)]
        self._all_notes = [[segment.note(rank, step) for rank in self._ranks] for step in (0, 1)]
        self._places = [
            [segment.address + segment.slot(rank, step) for rank in self._ranks] for step in (0, 1)
        ]
        self._slots, self._notes = self._places[0], self._all_notes[0]  # in this step
        self._parts: dict[tuple[object, ...], list[Tensor]] = {}

    def barrier(self) -> Steps:
        note = note_of("barrier", 0)
        yield from self._open()
        self._post(note)
        yield from self._met(self._others, note)

    def all_reduce(self, span: Span, kind: Kind) -> Steps:
        note = note_of("all_reduce", span.nbytes, kind, dtype=span.tensor.dtype)
        if 0 < span.nbytes <= self._at_once_bytes:
            return self._all_reduce_at_once(span, kind, note)
        return self._all_reduce_in_rounds(span, kind, note)

    def _all_reduce_in_rounds(self, span: Span, kind: Kind, note: int) -> Steps:
        item = span.tensor.itemsize
        if self.size == 2:
            for start, stop in rounds(span.numel, self._at_once_bytes // item):
                yield from self._all_reduce_at_once(span.part(start, stop - start), kind, note)
            return
        together = self.share_bytes // item * self.size
        for start, stop in rounds(span.numel, together):
            yield from self._all_reduce_shared_out(span.part(start, stop - start), kind, note)

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
            self._put(rank * width, shared.address(rank), shared.sizes[rank])
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
            copy(shared.address(rank), self._slots[rank], shared.sizes[rank])

    def reduce_scatter(self, out: Span, inputs: Parts, kind: Kind) -> Steps:
        """`inputs` holds this rank's part for each rank, as long as that rank's `out`; its own may be `out`."""
        address, sizes = inputs.address, inputs.sizes
        longest = max(sizes)
        item, dtype = out.tensor.itemsize, out.tensor.dtype
        note = note_of("reduce_scatter", longest, kind, dtype=dtype)
        flat, width = out.vector(), self.share_bytes
        me, own = self._rank, address(self._rank)
        # A short part of one's own is copied, which takes less time than making a tensor of it: to where the sum will
        # be, or, from the third rank on, whose part is read after that has been written, into the slot. A longer one is
        # read where it is, if that is not where the sum will be.
        lands = me < 2 and sizes[me] <= SHORT_BYTES
        keeps = me >= 2 and (sizes[me] <= SHORT_BYTES or own == out.address)
        mine = flat if lands or keeps else inputs.span(me).vector()
        for start, stop in rounds(longest, width):
            yield from self._open()
            for rank in self._ranks if keeps else self._others:
                self._put(rank * width, address(rank) + start, within(start, stop, sizes[rank]))
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
        schedule = moves.all_gather(self._rank, self._segment.slot_bytes, outputs.sizes)
        return self._move(schedule, outputs, only(source))

    def all_to_all(self, outputs: Parts, inputs: Parts, *, even: bool) -> Steps:
        """`inputs[r]` goes to rank r, `outputs[r]` comes from it. `even`: all are equally long, on all ranks."""
        if not even:
            return self._all_to_all_uneven(outputs, inputs)
        sizes = inputs.sizes
        schedule = moves.all_to_all(self._rank, self.share_bytes, sizes, sizes, sizes[0])
        return self._move(schedule, outputs, inputs)

    def _all_to_all_uneven(self, outputs: Parts, inputs: Parts) -> Steps:
        table: list[list[int]] = []
        yield from self._tell(note_of("all_to_all", 0), inputs.sizes, table)
        for rank in self._others:
            if (sent := table[rank][self._rank]) != outputs.sizes[rank]:
                name = self._segment.peers[rank].rank
                raise RuntimeError(f"rank {name} sends {sent} bytes, {outputs.sizes[rank]} are expected")
        longest = max(map(max, table))
        yield from self._move(
            moves.all_to_all(self._rank, self.share_bytes, inputs.sizes, outputs.sizes, longest),
            outputs,
            inputs,
        )

    def broadcast(self, span: Span, root: int) -> Steps:
        here = only(span)
        schedule = moves.broadcast(self._rank, self.size, self._segment.slot_bytes, root, span.nbytes)
        return self._move(schedule, here, here)

    def gather(self, outputs: Parts, source: Span, root: int) -> Steps:
        """`outputs` has a place for each rank's `source` on the root, and is empty elsewhere."""
        schedule = moves.gather(self._rank, self.size, self._segment.slot_bytes, root, source.nbytes)
        return self._move(schedule, outputs, only(source))

    def scatter(self, out: Span, inputs: Parts, root: int) -> Steps:
        """`inputs` holds each rank's part on the root, and is empty elsewhere."""
        schedule = moves.scatter(self._rank, self.size, self.share_bytes, root, out.nbytes)
        return self._move(schedule, only(out), inputs)

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

    def _tell(self, note: int, numbers: Sequence[int], table: list[list[int]]) -> Steps:
        """Fills `table` with the numbers of each rank."""
        size = len(numbers)
        yield from self._open()
        self._own(size, torch.int64).copy_(torch.tensor(numbers))
        self._post(note)
        yield from self._met(self._others, note)
        table += [self._view(rank, 0, size, torch.int64).tolist() for rank in range(self.size)]

    # The steps

    def _move(self, schedule: Schedule, outputs: Parts, inputs: Parts) -> Steps:
        """What only moves data."""
        note, result_bytes, steps = schedule
        land = stream if result_bytes >= self._stream_bytes else copy
        words, posted, write = self._words, self._posted, self._writing.write
        sources, places = inputs.offsets, outputs.offsets
        for start, (puts, own, takes, unmet) in steps:
            source, place = inputs.base + start, outputs.base + start
            yield from self._open()
            number, slots, notes = self._step, self._slots, self._notes
            if puts:
                slot = self._slot()
                for part, there, size in puts:
                    write(slot + there, source + sources[part], size)
            self._post(note)
            for part, out, size in own:
                address, to = source + sources[part], place + places[out]
                if address != to:
                    land(to, address, size)
            for rank, out, there, size in takes:
                if words[posted[rank]] < number or words[notes[rank]] != note:
                    yield from self._wait((rank,), note, number)
                land(place + places[out], slots[rank] + there, size)
            if unmet:
                self._unmet = unmet, note

    def _open(self) -> Iterable[Lack]:
        """Begins the next step, in which this rank's slot is free; what has to be waited for before."""
        waits: Iterable[Lack] = ()
        if self._unmet is not None:
            waits, self._unmet = self._met(*self._unmet), None
        self._step = step = self._step + 1
        self._slots, self._notes = self._places[step & 1], self._all_notes[step & 1]
        return waits

    def _put(self, offset: int, address: int, size: int) -> None:
        """Copies data into this rank's slot."""
        self._writing.write(self._slot() + offset, address, size)

    def _slot(self) -> int:
        """The address of this rank's slot, to write into."""
        if not self._reserved:
            segment = self._segment
            segment.reserve(segment.slot(self._rank, 0), SLOTS * segment.slot_bytes)
            self._reserved = True
        return self._slots[self._rank]

    def _post(self, note: int) -> None:
        """This rank has read all it needs of the last step, and what it puts out in this one is ready to be read."""
        rank = self._rank
        self._words[self._notes[rank]] = note
        self._segment.set(self._posted[rank], self._step)

    def _met(self, ranks: Sequence[int], note: int) -> Iterable[Lack]:
        """What has to be waited for until those ranks have posted this step."""
        step, words, posted, notes = self._step, self._words, self._posted, self._notes
        for rank in ranks:
            if words[posted[rank]] < step or words[notes[rank]] != note:
                return self._wait(ranks, note, step)
        return ()

    def _wait(self, ranks: Sequence[int], note: int, step: int) -> Iterable[Lack]:
        """Waits until those ranks have posted that step.

        Raises:
            RuntimeError: one of them is in another collective.
        """
        for rank in ranks:
            if self._words[self._posted[rank]] < step:
                yield Lack(self._posted[rank], step, rank)
            if (found := self._words[self._all_notes[step & 1][rank]]) != note:
                names = [peer.rank for peer in self._segment.peers]
                raise RuntimeError(
                    f"rank {names[rank]} has entered {read(found, names)}, not {read(note, names)}"
                )

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
