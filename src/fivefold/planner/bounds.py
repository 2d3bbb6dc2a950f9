"""Bounds of the search: seconds that no layout of a group, series or point beats."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from fivefold.config.model import Model
from fivefold.ledger.job import Job
from fivefold.ledger.layer import Work
from fivefold.ledger.physics import Physics
from fivefold.ledger.pipeline import Stage
from fivefold.ledger.rounds import Growth, growth, trials, window
from fivefold.ledger.shards import contents
from fivefold.ledger.simulate import StageTimes, least_alike
from fivefold.ledger.total import Closing
from fivefold.planner.space import Group, Point
from fivefold.spec import schedules
from fivefold.spec.schedules import Entry, Kind


class RankContent(NamedTuple):
    """Layers and ends of one pipeline rank."""

    dense: int
    expert: int
    first: int
    last: int


@dataclass(frozen=True)
class Contents:
    """What the pipeline ranks hold, as far as bounds of the step need it.

    Attributes:
        first: of the first rank.
        distinct: of every rank, without repetition.
        paths: (number, content, all stages ahead of the rank's first one together) of the last rank with each
            content: the one that a micro-batch reaches latest.
    """

    first: RankContent
    distinct: tuple[RankContent, ...]
    paths: tuple[tuple[int, RankContent, RankContent], ...]


@lru_cache(maxsize=4096)
def rank_contents(model: Model, name: schedules.Name, pp: int, chunks: int) -> Contents:
    """Contents of every pipeline rank."""
    stages = contents(model, pp * chunks)
    ranks: list[list[int]] = [[0, 0, 0, 0] for _ in range(pp)]
    ahead = [[0, 0, 0, 0]]
    for index, stage in enumerate(stages):
        rank = schedules.rank_of_stage(name, index, pp)
        for position, amount in enumerate(stage):
            ranks[rank][position] += int(amount)
        ahead.append([sofar + int(amount) for sofar, amount in zip(ahead[-1], stage, strict=True)])
    latest = {RankContent(*own): rank for rank, own in enumerate(ranks)}
    paths = tuple((rank, own, RankContent(*ahead[rank])) for own, rank in latest.items())
    return Contents(RankContent(*ranks[0]), tuple(latest), paths)


class Prices(NamedTuple):
    """Seconds of one micro-batch: (dense layer, expert layer, embedding, head), by pass."""

    forward: tuple[float, ...]
    both: tuple[float, ...]

    @staticmethod
    def of(works: Sequence[Work | None]) -> "Prices":
        times = [work.times if work else StageTimes(0.0, 0.0, 0.0) for work in works]
        return Prices(tuple(t.forward for t in times), tuple(sum(t) for t in times))


def _cost(content: RankContent, each: Sequence[float]) -> float:
    a, b, c, d = content
    return a * each[0] + b * each[1] + c * each[2] + d * each[3]


def series_bound(group: Group, prices: Prices, model: Model) -> float:
    """An even share of all work, whatever the schedule."""
    whole = rank_contents(model, "1f1b", 1, 1).distinct[0]
    return group.microbatches * _cost(whole, prices.both) / group.pp + Physics().step


class Through(NamedTuple):
    """Seconds before which a rank is not through its micro-batches, and its seconds of one of them."""

    seconds: float
    rank: int
    forward: float
    backward: float


def quick_bound(point: Point, prices: Prices, model: Model, message: float) -> tuple[Through, ...]:
    """No step of this point is faster than any rank's work with what must pass before it starts, and after it
    ends (where backward is split, weight gradients may be done while others wait). Of the rank with the most of it:
    its own end, and the later one of the first rank, where gradients go back to that."""
    held = rank_contents(model, point.schedule, point.pp, point.chunks)
    split = point.schedule in schedules.SPLITS_BACKWARD
    each = prices.forward if split else prices.both
    hops = message if split else 2 * message
    m, step = point.microbatches, Physics().step
    seconds, rank, own, ahead = max(
        (m * _cost(own, prices.both) + _cost(ahead, each) + rank * hops, rank, own, ahead)
        for rank, own, ahead in held.paths
    )

    def through(seconds: float, rank: int, own: RankContent) -> Through:
        forward = _cost(own, prices.forward)
        return Through(seconds + step, rank, forward, _cost(own, prices.both) - forward)

    if split or rank == 0:
        return (through(seconds, rank, own),)
    ended = m * _cost(own, prices.both) + _cost(ahead, prices.forward) + rank * message
    return through(seconds, 0, held.first), through(ended, rank, own)


class End(NamedTuple):
    """Seconds of what follows a rank's pipeline, by what may hide it: one backward, half of one, one forward (in each
    micro-batch, with `windows`), nothing."""

    under_backward: float
    under_half: float
    under_forward: float
    bare: float
    windows: float
    shown: float

    @staticmethod
    def of(job: Job, close: Closing) -> "End":
        hidden = {"gradient": 0.0, "backward": 0.0, "forward": 0.0}
        bare = close.update + sum(item.exposed_seconds for item in close.others)
        for item in close.data:
            overlaps = (
                job.stack.overlap_gradients if item.phase == "gradient" else job.stack.overlap_parameters
            )
            if overlaps:
                hidden["forward" if item.phase == "optimizer" else item.phase] += item.seconds
            else:
                bare += item.exposed_seconds
        windows = job.microbatches if job.zero >= 2 and job.pp == 1 else 1
        reach = windows * job.physics.gradient_window
        return End(
            hidden["gradient"], hidden["backward"], hidden["forward"], bare, reach, job.physics.sharing
        )

    def least(self, forward: float, backward: float) -> float:
        """What remains of it if all is hidden that may be."""
        hidden = min(self.under_backward, self.windows * backward)
        hidden += min(self.under_half, self.windows * backward / 2)
        hidden += min(self.under_forward, self.windows * forward)
        whole = self.under_backward + self.under_half + self.under_forward
        return self.bare + whole - (1 - self.shown) * hidden


def busiest(built: Sequence[Stage], point: Point) -> int:
    """The last of the pipeline ranks with the most work."""
    work = [0.0] * point.pp
    for index, stage in enumerate(built):
        work[schedules.rank_of_stage(point.schedule, index, point.pp)] += sum(stage.times)
    most = max(work)
    return max(rank for rank, own in enumerate(work) if own >= most * (1 - 1e-9))


class Ends(NamedTuple):
    """Seconds before which a rank, and the pipeline's first rank, are not through."""

    own: float
    first: float


def alone(
    name: schedules.Name,
    ranks: int,
    microbatches: int,
    times: Sequence[StageTimes],
    message: float,
    rank: int,
) -> Ends:
    """The ends of `rank` and of the first rank if all others did any number of actions at once: then nothing
    ends later than in truth. `rank` does its list in order; what it sends comes back after the stages between,
    without a queue. One rank's work instead of all ranks', and within a few percent of the simulation.
    """
    few = least_alike(ranks, microbatches)
    for fewer in trials(name, ranks, microbatches, few):
        ends, more = _settling(name, ranks, fewer, times, message, rank)
        if more is not None:
            repeats, rest = divmod((microbatches - fewer) // ranks, more.rounds)
            if rest:
                ends = _alone(name, ranks, fewer + rest * ranks, times, message, rank)
            later = repeats * more.seconds
            return Ends(ends.own + later, ends.first + later)
    one = _alone(name, ranks, few, times, message, rank)
    if few == microbatches:
        return one
    two, rounds = _alone(name, ranks, few + ranks, times, message, rank), (microbatches - few) // ranks
    return Ends(one.own + rounds * (two.own - one.own), one.first + rounds * (two.first - one.first))


def _settling(
    name: schedules.Name,
    ranks: int,
    microbatches: int,
    times: Sequence[StageTimes],
    message: float,
    rank: int,
) -> tuple[Ends, Growth | None]:
    """The ends with few micro-batches, and what further rounds add to them, if they repeat by then."""
    starts: list[float] = []
    ends = _alone(name, ranks, microbatches, times, message, rank, starts)
    return ends, growth([starts], [window(name, rank, ranks, microbatches, len(times) // ranks)], ranks)


def _alone(
    name: schedules.Name,
    ranks: int,
    microbatches: int,
    times: Sequence[StageTimes],
    message: float,
    rank: int,
    starts: list[float] | None = None,
) -> Ends:
    """As `alone`, each micro-batch by itself; the starts of the rank's actions are appended to `starts`."""
    split = name in schedules.SPLITS_BACKWARD
    place = [schedules.rank_of_stage(name, stage, ranks) for stage in range(len(times))]
    hops = [0.0, *(message * (a != b) for a, b in pairwise(place))]
    forward = list(accumulate((t.forward for t in times), initial=0.0))
    back = [t.input_grad if split else t.input_grad + t.weight_grad for t in times]
    backward = list(accumulate(back, initial=0.0))
    crossed = list(accumulate(hops))  # seconds of messages from stage 0 to each
    own = schedules.stages_of_rank(name, rank, ranks, len(times) // ranks)
    down: dict[int, tuple[int, float]] = {}  # the own stage before, seconds from its end to the input of this
    up: dict[int, tuple[int, float]] = {}
    for before, stage in zip((-1, *own), own, strict=False):
        down[stage] = before, forward[stage] - forward[before + 1] + crossed[stage] - crossed[max(before, 0)]
    for stage, after in zip(own, (*own[1:], -1), strict=True):
        end = after if after >= 0 else len(times)
        delay = backward[end] - backward[stage + 1] + crossed[min(end, len(times) - 1)] - crossed[stage]
        if after < 0:
            delay += forward[end] - forward[stage + 1] + crossed[-1] - crossed[stage]
        up[stage] = after, delay
    work = schedules.rank_entries(name, rank, ranks, microbatches, len(times) // ranks)
    clock, returned = _through(work, times, down, up, starts)
    return Ends(clock, returned + backward[own[0]] + crossed[own[0]] if rank else clock)


def _through(
    work: Sequence[Entry],
    times: Sequence[StageTimes],
    down: dict[int, tuple[int, float]],
    up: dict[int, tuple[int, float]],
    starts: list[float] | None,
) -> tuple[float, float]:
    """(end of a rank's list, end of the last gradient it sends to the stage before its first)."""
    durations = [(t.forward, t.input_grad, t.weight_grad, t.input_grad + t.weight_grad) for t in times]
    forwards: dict[tuple[int, int], float] = {}
    gradients: dict[tuple[int, int], float] = {}
    clock = returned = 0.0
    begun = [] if starts is None else starts
    waiting: list[Entry] = []  # joined to the next
    first = min(down)
    is_forward, is_weight = Kind.FORWARD, Kind.WEIGHT_GRAD
    for entry in work:
        kind, stage, microbatch, joined = entry
        if kind is is_weight:  # its input gradient came before
            begun.append(clock)
            clock += durations[stage][kind]
            continue
        if kind is is_forward:
            before, delay = down[stage]
            ready = delay + (forwards[before, microbatch] if before >= 0 else 0.0)
        else:
            after, delay = up[stage]
            ready = delay + (gradients[after, microbatch] if after >= 0 else forwards[stage, microbatch])
        if ready > clock:
            clock = ready
        begun.append(clock)
        if joined:
            waiting.append(entry)
            continue
        together = (entry, *waiting) if waiting else (entry,)
        for kind, stage, _, _ in together:
            clock += durations[stage][kind]
        for kind, stage, microbatch, _ in together:
            if kind is is_forward:
                forwards[stage, microbatch] = clock
            else:
                gradients[stage, microbatch] = clock
                returned = clock if stage == first else returned
        waiting.clear()
    return clock, returned
