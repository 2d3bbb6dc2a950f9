"""What a rank copies in each step of the collectives that only move data. Made once for all calls that are alike."""

from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from fivefold.collectives.shared_memory.notes import note_of

Sizes: TypeAlias = tuple[int, ...]
"""Bytes of each rank's part."""
_keep = lru_cache(maxsize=256)


class Moves(NamedTuple):
    """The copies of one step. Parts are numbered as in the call's inputs and outputs; sizes and places are in bytes.

    puts: into this rank's slot: a part of the inputs, where in the slot, how many.
    own: within this rank: a part of the inputs, one of the outputs, how many.
    takes: out of the slots: the rank, a part of the outputs, where in the slot, how many.
    unmet: the ranks that this one meets only before the next step.
    """

    puts: tuple[tuple[int, int, int], ...] = ()
    own: tuple[tuple[int, int, int], ...] = ()
    takes: tuple[tuple[int, int, int, int], ...] = ()
    unmet: tuple[int, ...] = ()


class Schedule(NamedTuple):
    """The steps of a call, each with where in the parts it begins; what the ranks tell each other of the call."""

    note: int
    result_bytes: int
    steps: tuple[tuple[int, Moves], ...]


@_keep
def all_gather(me: int, slot: int, sizes: Sizes) -> Schedule:
    """`slot`: its length. `sizes`: of all ranks' parts."""
    peers = others(me, len(sizes))

    def step(start: int, stop: int) -> Moves:
        size = within(start, stop, sizes[me])
        takes = ((rank, rank, 0, within(start, stop, sizes[rank])) for rank in peers)
        return Moves(((0, 0, size),), ((0, me, size),), tuple(takes))

    longest = max(sizes)
    return Schedule(note_of("all_gather", longest), sum(sizes), _steps(longest, slot, step))


@_keep
def all_to_all(me: int, width: int, sent: Sizes, received: Sizes, longest: int) -> Schedule:
    """`width`: the room for each rank's part in a slot. `longest`: of all ranks' parts."""
    peers = others(me, len(sent))

    def step(start: int, stop: int) -> Moves:
        puts = ((rank, rank * width, within(start, stop, sent[rank])) for rank in peers)
        takes = ((rank, rank, me * width, within(start, stop, received[rank])) for rank in peers)
        return Moves(tuple(puts), ((me, me, within(start, stop, sent[me])),), tuple(takes))

    return Schedule(note_of("all_to_all", longest), sum(received), _steps(longest, width, step))


@_keep
def broadcast(me: int, ranks: int, slot: int, root: int, size: int) -> Schedule:
    unmet = _but(root, others(me, ranks))

    def step(start: int, stop: int) -> Moves:
        if me == root:
            return Moves(puts=((0, 0, stop - start),), unmet=unmet)
        return Moves(takes=((root, 0, 0, stop - start),), unmet=unmet)

    return Schedule(note_of("broadcast", size, root=root), size, _steps(size, slot, step))


@_keep
def gather(me: int, ranks: int, slot: int, root: int, size: int) -> Schedule:
    peers = others(me, ranks)

    def step(start: int, stop: int) -> Moves:
        if me != root:
            return Moves(puts=((0, 0, stop - start),), unmet=peers)
        takes = ((rank, rank, 0, stop - start) for rank in peers)
        return Moves(own=((0, me, stop - start),), takes=tuple(takes))

    return Schedule(note_of("gather", size, root=root), size * ranks, _steps(size, slot, step))


@_keep
def scatter(me: int, ranks: int, width: int, root: int, size: int) -> Schedule:
    """`width`: the room for each rank's part in a slot."""
    peers = others(me, ranks)

    def step(start: int, stop: int) -> Moves:
        if me != root:
            return Moves(takes=((root, 0, me * width, stop - start),), unmet=_but(root, peers))
        puts = ((rank, rank * width, stop - start) for rank in peers)
        return Moves(tuple(puts), ((me, 0, stop - start),), unmet=peers)

    return Schedule(note_of("scatter", size, root=root), size, _steps(size, width, step))


def others(me: int, ranks: int) -> tuple[int, ...]:
    """The other ranks; each of them begins with another."""
    return tuple((me + i) % ranks for i in range(1, ranks))


def rounds(length: int, most: int) -> Iterable[tuple[int, int]]:
    """Start and stop of pieces of at most so much."""
    return pairwise((*range(0, length, most), length))


def within(start: int, stop: int, length: int) -> int:
    """How much of start to stop lies within so much."""
    return max(0, min(stop, length) - start)


def _steps(length: int, most: int, step: Callable[[int, int], Moves]) -> tuple[tuple[int, Moves], ...]:
    """A step for each round; those that are alike are one."""
    known: dict[Moves, Moves] = {}
    moves = ((start, step(start, stop)) for start, stop in rounds(length, most))
    return tuple((start, known.setdefault(found, found)) for start, found in moves)


def _but(one: int, ranks: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(rank for rank in ranks if rank != one)
