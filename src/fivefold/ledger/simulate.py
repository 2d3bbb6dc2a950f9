"""Simulates a pipeline schedule: the dependency graph with its true times, never a closed form.

A forward waits for the stage before, an input gradient for the stage after, each plus the time of the
message if it crosses ranks; a rank does its list in order. Under uneven stages, unequal F, B, W or slow links
no formula for the bubble is right; with even ones a test holds the simulation to the known formulas.
"""

from collections.abc import Sequence
from typing import NamedTuple

from fivefold.spec import schedules
from fivefold.spec.schedules import Action, Kind

_UNKNOWN = 1e300  # seconds: later than any time


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
    actions: tuple[tuple[Action, ...], ...]
    starts: tuple[tuple[float, ...], ...]

    @property
    def bubble(self) -> float:
        """Idle seconds of the busiest rank: what the pipeline costs beyond its slowest rank's work."""
        return self.makespan - max(self.busy)

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
) -> Timeline:
    """Runs the schedule on stages with the given times (`ranks · chunks` of them).

    `message` is the seconds a tensor takes between neighbouring ranks; `weights` the size of one
    micro-batch's saved activations per stage (default 1 / chunks, so that in-flight counts are in
    rank-micro-batches). They are held from the forward until the last gradient that needs them.
    """
    chunks, rest = divmod(len(times), ranks)
    if rest or chunks != schedules.chunks_of(name, chunks):
        raise ValueError(f"{len(times)} stage times for schedule {name} on {ranks} ranks")
    work = schedules.actions(name, ranks, microbatches, chunks)
    place = [schedules.rank_of_stage(name, stage, ranks) for stage in range(len(times))]
    starts = _run(work, place, microbatches, times, message)
    sizes = [1.0 / chunks] * len(times) if weights is None else list(weights)
    busy = tuple(sum(_duration(action, times) for action in own) for own in work)
    finished = tuple(start[-1] + _duration(own[-1], times) for own, start in zip(work, starts, strict=True))
    return Timeline(
        makespan=max(finished),
        busy=busy,
        finished=finished,
        peak_in_flight=tuple(_peak(own, sizes) for own in work),
        actions=tuple(tuple(own) for own in work),
        starts=tuple(tuple(start) for start in starts),
    )


def _duration(action: Action, times: Sequence[StageTimes]) -> float:
    stage = times[action.stage]
    if action.kind is Kind.BACKWARD:
        return stage.input_grad + stage.weight_grad
    return stage[action.kind]


def _run(
    work: Sequence[Sequence[Action]],
    place: Sequence[int],
    microbatches: int,
    times: Sequence[StageTimes],
    message: float,
) -> list[list[float]]:
    """Start time of every action; raises RuntimeError if the lists wait for one another."""
    last = len(place) - 1
    durations = [(t.forward, t.input_grad, t.weight_grad, t.input_grad + t.weight_grad) for t in times]
    down = [message if s and place[s] != place[s - 1] else 0.0 for s in range(last + 1)]
    up = [message if s < last and place[s] != place[s + 1] else 0.0 for s in range(last + 1)]
    forward_end = [_UNKNOWN] * (len(place) * microbatches)
    grad_end = [_UNKNOWN] * (len(place) * microbatches)

    def ready(kind: int, stage: int, key: int) -> float:
        if kind == 0:
            return forward_end[key - microbatches] + down[stage] if stage else 0.0
        if kind == 2:
            return grad_end[key]
        return grad_end[key + microbatches] + up[stage] if stage < last else forward_end[key]

    starts: list[list[float]] = [[] for _ in work]
    clock = [0.0] * len(work)
    done = [0] * len(work)
    progress = True
    while progress:
        progress = False
        for rank, own in enumerate(work):
            now, begun, position = clock[rank], starts[rank], done[rank]
            while position < len(own):
                kind, stage, m, joined = own[position]
                key = stage * microbatches + m
                start = max(now, ready(kind, stage, key))
                now_end = start + durations[stage][kind]
                second = -1
                if joined:
                    kind2, stage2, m2, _ = own[position + 1]
                    second = stage2 * microbatches + m2
                    delay = max(0.0, ready(kind2, stage2, second) - start)
                    start, now_end = start + delay, now_end + delay
                if start >= _UNKNOWN:
                    break
                begun.append(start)
                if joined:
                    begun.append(now_end)
                    now_end += durations[stage2][kind2]
                    grad_end[second] = now_end
                if kind == 0:
                    forward_end[key] = now_end
                elif kind != 2:
                    grad_end[key] = now_end
                now = now_end
                position += 1 + joined
                progress = True
            clock[rank], done[rank] = now, position
    if any(position < len(own) for position, own in zip(done, work, strict=True)):
        raise RuntimeError("the schedule's lists wait for one another")
    return starts


def _peak(own: Sequence[Action], sizes: Sequence[float]) -> float:
    """Largest sum of activations a rank holds at once."""
    held = peak = 0.0
    for kind, stage, _, _ in own:
        if kind is Kind.FORWARD:
            held += sizes[stage]
            peak = max(peak, held)
        elif kind is not Kind.INPUT_GRAD:
            held -= sizes[stage]
    return peak
