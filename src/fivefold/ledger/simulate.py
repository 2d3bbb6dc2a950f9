"""Simulates a pipeline schedule: the dependency graph with its true times, never a closed form.

A forward waits for the stage before, an input gradient for the stage after, each plus the time of the
message if it crosses ranks; a rank does its list in order. Under uneven stages, unequal F, B, W or slow links
no formula for the bubble is right; with even ones a test holds the simulation to the known formulas.
"""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from operator import le
from typing import NamedTuple

from fivefold.ledger.rounds import Growth, growth, trials, window
from fivefold.spec import schedules
from fivefold.spec.schedules import Action, Entry, Kind


class StageTimes(NamedTuple):
    """Seconds of one micro-batch on one stage."""

    forward: float
    input_grad: float
    weight_grad: float


class Timeline(NamedTuple):
    """One optimizer step's pipeline, in seconds from its start."""

    makespan: float
    busy: tuple[float, ...]  # per rank
    finished: tuple[float, ...]  # per rank: end of its last action
    peak_in_flight: tuple[float, ...]  # per rank, in units of `weights`
    actions: tuple[tuple[Action, ...], ...] = ()  # per rank, with `trace`
    starts: tuple[tuple[float, ...], ...] = ()  # of the actions

    def after(self, rounds: int, one_more: "Timeline") -> "Timeline":
        """`rounds` rounds later, each of which adds what one more round did."""

        def grown(now: float, then: float) -> float:
            return now + rounds * (then - now)

        return Timeline(
            grown(self.makespan, one_more.makespan),
            tuple(map(grown, self.busy, one_more.busy)),
            tuple(map(grown, self.finished, one_more.finished)),
            tuple(map(grown, self.peak_in_flight, one_more.peak_in_flight)),
        )

    def later(self, seconds: float, work: float) -> "Timeline":
        """Ended `seconds` later, with `work` times the work."""
        return Timeline(
            self.makespan + seconds,
            tuple(busy * work for busy in self.busy),
            tuple(end + seconds for end in self.finished),
            self.peak_in_flight,
        )

    @property
    def bubble(self) -> float:
        """Idle seconds of the busiest rank: what the pipeline costs beyond its slowest rank's work."""
        return max(0.0, self.makespan - max(self.busy))

    @property
    def idle(self) -> tuple[float, ...]:
        """Idle seconds of every rank within the makespan."""
        return tuple(self.makespan - busy for busy in self.busy)


def simulate(
    name: schedules.Name,
    ranks: int,
    microbatches: int,
    times: Sequence[StageTimes],
    *,
    message: float = 0.0,
    weights: Sequence[float] | None = None,
    trace: bool = False,
) -> Timeline:
    """Runs the schedule on stages with the given times (`ranks · chunks` of them).

    `message` is the seconds a tensor takes between neighbouring ranks; `weights` the size of one
    micro-batch's saved activations per stage (default 1 / chunks, so that in-flight counts are in
    rank-micro-batches), held from the forward until the last gradient that needs them. `trace` keeps every
    action's start.
    """
    chunks, rest = divmod(len(times), ranks)
    if rest or chunks != schedules.chunks_of(name, chunks):
        raise ValueError(f"{len(times)} stage times for schedule {name} on {ranks} ranks")
    sizes = (1.0 / chunks,) * len(times) if weights is None else tuple(weights)
    few = least_alike(ranks, microbatches)
    for fewer in () if trace else trials(name, ranks, microbatches, few):
        line, more = _settling(name, ranks, fewer, tuple(times), message, sizes)
        if more is not None:
            repeats, rest = divmod((microbatches - fewer) // ranks, more.rounds)
            if rest:
                fewer += rest * ranks
                line = _simulated(name, ranks, fewer, tuple(times), message, sizes, False)
            return line.later(repeats * more.seconds, microbatches / fewer)
    if trace or few == microbatches:
        return _simulated(name, ranks, microbatches, tuple(times), message, sizes, trace)
    one, two = (_simulated(name, ranks, m, tuple(times), message, sizes, False) for m in (few, few + ranks))
    return one.after((microbatches - few) // ranks, two)


def least_alike(ranks: int, microbatches: int) -> int:
    """Micro-batches to simulate in place of very many: as many but for whole rounds of one a rank, which by then
    are all alike."""
    enough = max(2048, ranks * (ranks + 1))
    return microbatches - max(0, microbatches - enough) // ranks * ranks


@lru_cache(maxsize=64)
def _simulated(
    name: schedules.Name,
    ranks: int,
    microbatches: int,
    times: tuple[StageTimes, ...],
    message: float,
    sizes: tuple[float, ...],
    trace: bool,
) -> Timeline:
    """Remembered: layouts that only divide their data-parallel ranks differently share a timeline."""
    line, work, starts = _played(name, ranks, microbatches, times, message, sizes, trace)
    if not trace:
        return line
    return line._replace(
        actions=tuple(tuple(map(Action._make, own)) for own in work), starts=tuple(map(tuple, starts))
    )


@lru_cache(maxsize=256)
def _settling(
    name: schedules.Name,
    ranks: int,
    microbatches: int,
    times: tuple[StageTimes, ...],
    message: float,
    sizes: tuple[float, ...],
) -> tuple[Timeline, Growth | None]:
    """The timeline of few micro-batches, and what further rounds add to it, if they repeat by its end."""
    line, _, starts = _played(name, ranks, microbatches, times, message, sizes, True)
    windows = [window(name, rank, ranks, microbatches, len(times) // ranks) for rank in range(ranks)]
    return line, growth(starts, windows, ranks)


def _played(
    name: schedules.Name,
    ranks: int,
    microbatches: int,
    times: tuple[StageTimes, ...],
    message: float,
    sizes: tuple[float, ...],
    trace: bool,
) -> tuple[Timeline, list[list[Entry]], list[list[float]]]:
    """(timeline, every rank's list, with `trace` the starts of its actions)."""
    work = _work(name, ranks, microbatches, len(times) // ranks)
    place = [schedules.rank_of_stage(name, stage, ranks) for stage in range(len(times))]
    clock, peak, starts = _run(work, _table(place, microbatches, times, message, sizes), microbatches, trace)
    busy = [0.0] * ranks
    for rank, own in zip(place, times, strict=True):
        busy[rank] += microbatches * sum(own)
    return Timeline(max(clock), tuple(busy), tuple(clock), tuple(peak)), work, starts


@lru_cache(maxsize=65536)
def most_in_flight(
    name: schedules.Name, ranks: int, microbatches: int, chunks: int, rank: int, splits: bool = True
) -> tuple[tuple[int, ...], ...]:
    """What `rank` holds at its fullest: micro-batches of each of its stages, every combination that no other
    exceeds in all. Times do not matter, only the order of its list; rounds after the fourth repeat. Unless a backward
    `splits` where the schedule does, it is over with its first half."""
    last = Kind.WEIGHT_GRAD if splits else Kind.INPUT_GRAD
    if name == "gpipe":
        return ((microbatches,),)
    rest = microbatches % ranks
    if not rest or name not in schedules.IN_ROUNDS:
        microbatches = min(microbatches, 4 * ranks + rest)
    own = schedules.stages_of_rank(name, rank, ranks, chunks)
    place = {stage: index for index, stage in enumerate(own)}
    held = [0] * len(own)
    found: set[tuple[int, ...]] = set()
    grown = False
    for kind, stage, _, _ in schedules.rank_entries(name, rank, ranks, microbatches, chunks):
        if kind == 0:
            held[place[stage]] += 1
            grown = True
        elif kind in (last, Kind.BACKWARD):
            if grown:
                found.add(tuple(held))
                grown = False
            held[place[stage]] -= 1
    if (most := tuple(map(max, zip(*found, strict=True)))) in found:
        return (most,)
    front: list[tuple[int, ...]] = []
    for one in sorted(found, key=sum, reverse=True):  # none is exceeded by one with a smaller sum
        if not any(all(map(le, one, two)) for two in front):
            front.append(one)
    return tuple(front)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pauses the collector of cycles, up to half of the time of what makes a million tuples and no cycle."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@lru_cache(maxsize=128)
@collector_paused()
def _work(name: schedules.Name, ranks: int, microbatches: int, chunks: int) -> list[list[Entry]]:
    """Every rank's list; no time changes it."""
    return schedules.entries(name, ranks, microbatches, chunks)


_Step = tuple[int, float, int, float, float]
"""What an action of one kind on one stage does: the row that it waits for in the table of end times (the row's first
index; a micro-batch is a column), the delay of the message that brings it, the row its own end goes to, seconds,
and activations kept from then on (negative: let go)."""


def _table(
    place: Sequence[int],
    microbatches: int,
    times: Sequence[StageTimes],
    message: float,
    sizes: Sequence[float],
) -> list[list[_Step]]:
    """Steps by kind and stage. Rows: the start of the step; forwards, then input gradients, of each stage. Nobody
    waits for a weight gradient."""
    last, m = len(times) - 1, microbatches
    found: list[list[_Step]] = [[] for _ in Kind]
    for stage, (forward, input_grad, weight_grad) in enumerate(times):
        down, up = (1 + stage) * m, (2 + last + stage) * m
        size = sizes[stage]
        # Where recomputation leaves weight gradients no part of their own, a backward is over with its first half.
        ends_early = not weight_grad
        from_before = message if stage and place[stage - 1] != place[stage] else 0.0
        from_after = message if stage < last and place[stage + 1] != place[stage] else 0.0
        needs = up + m if stage < last else down
        found[Kind.FORWARD].append((down - m, from_before, down, forward, size))
        found[Kind.INPUT_GRAD].append((needs, from_after, up, input_grad, -size if ends_early else 0.0))
        found[Kind.WEIGHT_GRAD].append((up, 0.0, up, weight_grad, 0.0 if ends_early else -size))
        found[Kind.BACKWARD].append((needs, from_after, up, input_grad + weight_grad, -size))
    return found


def _run(
    work: Sequence[Sequence[Entry]], table: Sequence[Sequence[_Step]], microbatches: int, trace: bool
) -> tuple[list[float], list[float], list[list[float]]]:
    """(end of every rank, its most activations, with `trace` starts of its actions): each rank in turn goes on until
    it waits for another. Raises RuntimeError if the lists wait for one another."""
    ends = [-1.0] * ((2 * len(table[0]) + 1) * microbatches)
    ends[:microbatches] = [0.0] * microbatches
    clock, held, peak = ([0.0] * len(work) for _ in range(3))
    done = [0] * len(work)
    weight_grad = Kind.WEIGHT_GRAD
    starts: list[list[float]] = [[] for _ in work]
    waiting = list(range(len(work)))
    while waiting:
        blocked = []
        progress = False
        for rank in waiting:
            own, begun = work[rank], starts[rank]
            position = done[rank]
            now, holds, most = clock[rank], held[rank], peak[rank]
            count = len(own)
            while position < count:
                kind, stage, microbatch, joined = own[position]
                needs, delay, makes, seconds, keeps = table[kind][stage]
                if kind is weight_grad:  # its input gradient came before
                    if trace:
                        begun.append(now)
                    now += seconds
                    holds += keeps
                    position += 1
                    continue
                start = ends[needs + microbatch]
                if start < 0.0:
                    break
                start += delay
                if now > start:
                    start = now
                if joined:  # a forward, and a backward that begins when it ends
                    kind, stage, other, _ = own[position + 1]
                    needs, delay, makes_two, seconds_two, lets_go = table[kind][stage]
                    if ends[needs + other] < 0.0:
                        break
                    start = max(start, ends[needs + other] + delay)
                    middle = start + seconds
                    now = middle + seconds_two
                    ends[makes + microbatch] = ends[makes_two + other] = now
                    if trace:
                        begun += (start, middle)
                    most = max(most, holds + keeps)
                    holds += keeps + lets_go
                    position += 2
                    continue
                now = ends[makes + microbatch] = start + seconds
                if trace:
                    begun.append(start)
                holds += keeps
                if holds > most:
                    most = holds
                position += 1
            progress = progress or position > done[rank]
            clock[rank], held[rank], peak[rank], done[rank] = now, holds, most, position
            if position < count:
                blocked.append(rank)
        if blocked and not progress:
            raise RuntimeError("the schedule's lists wait for one another")
        waiting = blocked
    return clock, peak, starts
