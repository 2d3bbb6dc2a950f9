"""Simulates a pipeline schedule: the dependency graph with its true times, never a closed form.

A forward waits for the stage before, an input gradient for the stage after, each plus the time of the
message if it crosses ranks; a rank does its list in order. Under uneven stages, unequal F, B, W or slow links
no formula for the bubble is right; with even ones a test holds the simulation to the known formulas.
"""

from collections.abc import Sequence
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
    sizes = [1.0 / chunks] * len(times) if weights is None else list(weights)
    order = _order(name, ranks, microbatches, chunks)
    clock, peak, starts = _run(order, ranks, microbatches, times, message, sizes)
    place = [schedules.rank_of_stage(name, stage, ranks) for stage in range(len(times))]
    busy = [0.0] * ranks
    for stage, rank in enumerate(place):
        busy[rank] += microbatches * sum(times[stage])
    traced: list[list[tuple[Action, float]]] = [[] for _ in range(ranks)]
    if trace:
        for step, start in zip(order, starts, strict=True):
            traced[step.rank].append((step.action, start))
            if step.partner:
                own = times[step.action.stage][step.action.kind]
                traced[step.rank].append((step.partner.action, start + own))
    return Timeline(
        makespan=max(clock),
        busy=tuple(busy),
        finished=tuple(clock),
        peak_in_flight=tuple(peak),
        actions=tuple(tuple(action for action, _ in own) for own in traced) if trace else (),
        starts=tuple(tuple(start for _, start in own) for own in traced) if trace else (),
    )


@lru_cache(maxsize=65536)
def held_at_once(
    name: schedules.Name, ranks: int, microbatches: int, chunks: int, rank: int, splits: bool = True
) -> tuple[tuple[int, ...], ...]:
    """What `rank` holds at its fullest: micro-batches of each of its stages, every combination that no other
    exceeds in all. Times do not matter, only the order of its list; rounds after the fourth repeat. Unless a backward
    `splits` where the schedule does, it is over with its first half."""
    last = Kind.WEIGHT_GRAD if splits else Kind.INPUT_GRAD
    if microbatches % ranks == 0 and name != "gpipe":
        microbatches = min(microbatches, 4 * ranks)
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


class _Step(NamedTuple):
    """An action with the results it needs and makes, as indices into one table of end times."""

    rank: int
    kind: int
    stage: int
    needs: int  # 0 is always there
    crosses: bool  # what it needs comes from another rank
    makes: int
    action: Action
    partner: "_Step | None"  # the action joined to it


@lru_cache(maxsize=128)
def _order(name: schedules.Name, ranks: int, microbatches: int, chunks: int) -> tuple[_Step, ...]:
    """All actions in an order in which each follows what it needs; no time changes it.

    Raises RuntimeError if the ranks' lists wait for one another.
    """
    work = schedules.actions(name, ranks, microbatches, chunks)
    place = [schedules.rank_of_stage(name, stage, ranks) for stage in range(ranks * chunks)]
    known = bytearray(2 * len(place) * microbatches + 2)
    known[0] = 1
    queues = [[_step(action, rank, place, microbatches) for action in own] for rank, own in enumerate(work)]
    found: list[_Step] = []
    done = [0] * ranks
    progress = True
    while progress:
        progress = False
        for rank, own in enumerate(queues):
            start = position = done[rank]
            end = len(own)
            while position < end:
                step = own[position]
                if not known[step[3]]:  # needs
                    break
                if step[6][3]:  # joined to the next
                    partner = own[position + 1]
                    if not known[partner[3]]:
                        break
                    known[partner[5]] = 1
                    step = step._replace(partner=partner)
                    position += 1
                known[step[5]] = 1  # makes
                found.append(step)
                position += 1
            done[rank] = position
            progress = progress or position > start
    if any(end < len(own) for end, own in zip(done, queues, strict=True)):
        raise RuntimeError("the schedule's lists wait for one another")
    return tuple(found)


def _step(action: Action, rank: int, place: Sequence[int], microbatches: int) -> _Step:
    """Table: 0 nothing, then ends of forwards by (stage, micro-batch), then of input gradients, then waste."""
    kind, stage, m, _ = action
    gradients = len(place) * microbatches
    forward = 1 + stage * microbatches + m
    if kind is Kind.FORWARD:
        needs, other, makes = (forward - microbatches, stage - 1, forward) if stage else (0, stage, forward)
    elif kind is Kind.WEIGHT_GRAD:
        needs, other, makes = forward + gradients, stage, 2 * gradients + 1
    elif stage < len(place) - 1:
        needs, other, makes = forward + gradients + microbatches, stage + 1, forward + gradients
    else:
        needs, other, makes = forward, stage, forward + gradients
    fields = (rank, int(kind), stage, needs, place[other] != rank, makes, action, None)
    return tuple.__new__(_Step, fields)


def _run(
    order: Sequence[_Step],
    ranks: int,
    microbatches: int,
    times: Sequence[StageTimes],
    message: float,
    sizes: Sequence[float],
) -> tuple[list[float], list[float], list[float]]:
    """(end of every rank, its most activations, start of every step) in one pass over the order."""
    durations = [(t.forward, t.input_grad, t.weight_grad, t.input_grad + t.weight_grad) for t in times]
    # Where recomputation leaves weight gradients no part of their own, a backward is over with its first half.
    last = [Kind.WEIGHT_GRAD if t.weight_grad else Kind.INPUT_GRAD for t in times]
    ends = [0.0] * (2 * len(times) * microbatches + 2)
    clock, held, peak = [0.0] * ranks, [0.0] * ranks, [0.0] * ranks
    starts = []
    for rank, kind, stage, needs, crosses, makes, _, partner in order:
        start = ends[needs] + message if crosses else ends[needs]
        if clock[rank] > start:
            start = clock[rank]
        if partner is not None:
            start = max(start, ends[partner.needs] + (message if partner.crosses else 0.0))
            held[rank] += sizes[stage]
            peak[rank] = max(peak[rank], held[rank])
            held[rank] -= sizes[partner.stage]
            end = start + durations[stage][kind] + durations[partner.stage][partner.kind]
            ends[partner.makes] = end
        else:
            end = start + durations[stage][kind]
            if kind == 0:
                held[rank] += sizes[stage]
                if held[rank] > peak[rank]:
                    peak[rank] = held[rank]
            elif kind in (last[stage], Kind.BACKWARD):
                held[rank] -= sizes[stage]
        starts.append(start)
        ends[makes] = end
        clock[rank] = end
    return clock, peak, starts
