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

from fivefold.spec import schedules
from fivefold.spec.schedules import Action, Kind


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
    work = _work(name, ranks, microbatches, len(times) // ranks)
    clock, peak, starts = _run(work, microbatches, times, message, sizes)
    busy = [0.0] * ranks
    for stage, own in enumerate(times):
        busy[schedules.rank_of_stage(name, stage, ranks)] += microbatches * sum(own)
    actions = schedules.actions(name, ranks, microbatches, len(times) // ranks) if trace else []
    return Timeline(
        makespan=max(clock),
        busy=tuple(busy),
        finished=tuple(clock),
        peak_in_flight=tuple(peak),
        actions=tuple(map(tuple, actions)),
        starts=tuple(map(tuple, starts)) if trace else (),
    )


@lru_cache(maxsize=65536)
def held_at_once(
    name: schedules.Name, ranks: int, microbatches: int, chunks: int, rank: int, splits: bool = True
) -> tuple[tuple[int, ...], ...]:
    """What `rank` holds at its fullest: micro-batches of each of its stages, every combination that no other
    exceeds in all. Times do not matter, only the order of its list; rounds after the fourth repeat. Unless a backward
    `splits` where the schedule does, it is over with its first half."""
    last = Kind.WEIGHT_GRAD if splits else Kind.INPUT_GRAD
    if name == "gpipe":
        return ((microbatches,),)
    if microbatches % ranks == 0:
        microbatches = min(microbatches, 4 * ranks)
    microbatches = least_alike(ranks, microbatches)
    own = schedules.stages_of_rank(name, rank, ranks, chunks)
    place = {stage: index for index, stage in enumerate(own)}
    held = [0] * len(own)
    found: set[tuple[int, ...]] = set()
    grown = False
    for kind, stage, _, _ in schedules.rank_actions(name, rank, ranks, microbatches, chunks):
        if kind == 0:
            held[place[stage]] += 1
            grown = True
        elif kind in (last, Kind.BACKWARD):
            if grown:
                found.add(tuple(held))
                grown = False
            held[place[stage]] -= 1
    front: list[tuple[int, ...]] = []
    for one in sorted(found, key=sum, reverse=True):  # none is exceeded by one with a smaller sum
        if not any(all(map(le, one, two)) for two in front):
            front.append(one)
    return tuple(front)


_Step = tuple[int, int, int, bool, int, bool]
"""An action: kind, stage, what it needs and whether that comes from another rank, what it makes, joined to the next.

What is needed and made are indices into one table of end times: 0 is the start of the step, then come the ends of
forwards by (stage, micro-batch), then of input gradients, then what nobody waits for.
"""


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
def _work(name: schedules.Name, ranks: int, microbatches: int, chunks: int) -> tuple[list[_Step], ...]:
    """Every rank's list; no time changes it."""
    lists = schedules.actions(name, ranks, microbatches, chunks)
    place = [schedules.rank_of_stage(name, stage, ranks) for stage in range(ranks * chunks)]
    return tuple(_steps(own, rank, place, microbatches) for rank, own in enumerate(lists))


def _steps(own: Sequence[Action], rank: int, place: Sequence[int], microbatches: int) -> list[_Step]:
    gradients, last = len(place) * microbatches, len(place) - 1
    from_before = [stage > 0 and place[stage - 1] != rank for stage in range(len(place))]
    from_after = [stage < last and place[stage + 1] != rank for stage in range(len(place))]
    found: list[_Step] = []
    for kind, stage, microbatch, joined in own:
        forward = 1 + stage * microbatches + microbatch
        backward = forward + gradients
        if kind is Kind.FORWARD:
            needs = forward - microbatches if stage else 0
            found.append((0, stage, needs, from_before[stage], forward, joined))
        elif kind is Kind.WEIGHT_GRAD:
            found.append((2, stage, backward, False, 2 * gradients + 1, joined))
        else:
            needs = backward + microbatches if stage < last else forward
            found.append((int(kind), stage, needs, from_after[stage], backward, joined))
    return found


def _run(
    work: Sequence[Sequence[_Step]],
    microbatches: int,
    times: Sequence[StageTimes],
    message: float,
    sizes: Sequence[float],
) -> tuple[list[float], list[float], list[list[float]]]:
    """(end of every rank, its most activations, starts of its actions): each rank in turn goes on until it waits
    for another. Raises RuntimeError if the lists wait for one another."""
    durations = [(t.forward, t.input_grad, t.weight_grad, t.input_grad + t.weight_grad) for t in times]
    # Where recomputation leaves weight gradients no part of their own, a backward is over with its first half.
    last = [Kind.WEIGHT_GRAD if t.weight_grad else Kind.INPUT_GRAD for t in times]
    backward = Kind.BACKWARD
    ends = [-1.0] * (2 * len(times) * microbatches + 2)
    ends[0] = 0.0
    clock, held, peak = ([0.0] * len(work) for _ in range(3))
    starts: list[list[float]] = [[] for _ in work]
    waiting = list(range(len(work)))
    while waiting:
        blocked = []
        progress = False
        for rank in waiting:
            own, begun = work[rank], starts[rank]
            position = first = len(begun)  # one start an action
            now, holds, most = clock[rank], held[rank], peak[rank]
            count = len(own)
            while position < count:
                kind, stage, needs, crosses, makes, joined = own[position]
                start = ends[needs]
                if start < 0.0:
                    break
                if crosses:
                    start += message
                if now > start:
                    start = now
                if joined:  # a forward, and a backward that begins when it ends
                    kind_two, stage_two, needs_two, crosses_two, makes_two, _ = own[position + 1]
                    if ends[needs_two] < 0.0:
                        break
                    start = max(start, ends[needs_two] + (message if crosses_two else 0.0))
                    middle = start + durations[stage][kind]
                    now = middle + durations[stage_two][kind_two]
                    ends[makes] = ends[makes_two] = now
                    begun += (start, middle)
                    most = max(most, holds + sizes[stage])
                    holds += sizes[stage] - sizes[stage_two]
                    position += 2
                    continue
                now = ends[makes] = start + durations[stage][kind]
                begun.append(start)
                if kind == 0:
                    holds += sizes[stage]
                    if holds > most:
                        most = holds
                elif kind == backward or kind == last[stage]:
                    holds -= sizes[stage]
                position += 1
            clock[rank], held[rank], peak[rank] = now, holds, most
            progress = progress or position > first
            if position < count:
                blocked.append(rank)
        if blocked and not progress:
            raise RuntimeError("the schedule's lists wait for one another")
        waiting = blocked
    return clock, peak, starts
