"""The search: every layout of the space in effect, few of them in fact.

1. Costs of a layer depend only on its shape (tp, sp, cp, ep, micro-batch, recompute): computed once per shape.
2. Degrees and micro-batches form groups, a group's schedules and recompute modes series, a series' chunks points;
   each has a lower bound of its step (planner/bounds.py) and of its memory (planner/memory.py). Micro-batches too
   large for the degrees are not even costed. Best bound first the others are opened; what cannot fit, or cannot
   enter the ranking any more, never is.
3. A point whose memory passes gets the bound of its busiest rank working alone; what is still ahead of the ranking
   then, with the traffic and update of its best division of data-parallel ranks; what is ahead still is simulated,
   once for all divisions.
"""

import heapq
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from time import perf_counter
from typing import NamedTuple

from fivefold.ledger import pipeline, total
from fivefold.ledger.job import Job
from fivefold.ledger.pipeline import Costs, Stage, Works
from fivefold.ledger.shards import Share, contents, together
from fivefold.ledger.simulate import collector_paused
from fivefold.ledger.total import Closing
from fivefold.planner.bounds import End, Prices, alone, busiest, quick_bound, series_bound
from fivefold.planner.memory import MemoryBounds, held_bytes
from fivefold.planner.space import (
    Group,
    Point,
    Request,
    Series,
    Shape,
    data_layouts,
    job_of,
    ladders,
    points,
    series_of,
)
from fivefold.spec import schedules

SAME = 1e-3  # relative difference of steps below which layouts of one point share a line of the ranking


class Ranked(NamedTuple):
    """A line of the ranking: a layout that fits, its step, and those that are the same within 0.1 % and differ
    only in how the data-parallel ranks divide (zero, dp_replicate, dp_shard)."""

    seconds: float
    job: Job
    same: tuple[Job, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """The ranking, best first, and what the search did.

    Attributes:
        searched: points looked at.
        feasible: layouts found to fit on the way.
        simulated: points whose schedule was simulated.
        tightest: of the layouts that do not fit, the job that misses by the fewest bytes, and those bytes.
    """

    ranking: tuple[Ranked, ...]
    searched: int
    feasible: int
    simulated: int
    seconds: float
    tightest: tuple[Job, float] | None


class _Found:
    """What a search has found so far."""

    def __init__(self, keep: int) -> None:
        self.keep = keep
        self.best: list[Ranked] = []
        self.limit = float("inf")  # seconds at which a layout no longer enters the ranking
        self.searched = self.feasible = self.simulated = 0
        self.tightest: tuple[Job, float] | None = None

    def missed(self, request: Request, series: Series, missing: float) -> None:
        """A series none of whose layouts fits: what is named is one of them, its states split over the most ranks."""
        if self.tightest is not None and missing >= self.tightest[1]:
            return
        for point in points(request, series):
            if layouts := data_layouts(request, point):
                split = max(layouts, key=lambda own: (own[0], own[2]))
                self.tightest = job_of(request, point, *split), missing
                return

    def layout_missed(self, job: Job, missing: float) -> None:
        if self.tightest is None or missing < self.tightest[1]:
            self.tightest = job, missing

    def take(self, layouts: Sequence[tuple[float, Job]]) -> None:
        """Layouts of one point that fit."""
        for line in fold(layouts):
            if line.seconds < self.limit:
                self.best.append(line)
                self.best.sort(key=lambda ranked: ranked.seconds)
                del self.best[self.keep :]
                if len(self.best) == self.keep:
                    self.limit = self.best[-1].seconds

    def outcome(self, seconds: float) -> Outcome:
        return Outcome(tuple(self.best), self.searched, self.feasible, self.simulated, seconds, self.tightest)


def fold(layouts: Sequence[tuple[float, Job]]) -> list[Ranked]:
    """Lines of a ranking from layouts of one point, fastest first."""
    lines: list[Ranked] = []
    for seconds, job in sorted(layouts, key=lambda layout: layout[0]):
        if lines and seconds <= lines[-1].seconds * (1 + SAME):
            lines[-1] = lines[-1]._replace(same=(*lines[-1].same, job))
        else:
            lines.append(Ranked(seconds, job))
    return lines


class Costing:
    """Costs, prices and messages of shapes, and what follows ranks' pipelines, each computed once."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.closings: dict[tuple[object, ...], Closing] = {}
        self.known_ends: dict[tuple[object, ...], tuple[End, ...]] = {}
        self.known: dict[Shape, tuple[Costs, Prices]] = {}
        self.works: dict[Shape, Works] = {}
        self.memory = MemoryBounds(request)
        self.messages: dict[tuple[Shape, int], float] = {}

    def of(self, series: Series) -> tuple[Costs, Prices]:
        found = self.known.get(series.shape)
        if found is None:
            job = job_of(self.request, Point(series, 1))
            works = self.works.get(series.shape) or pipeline.works(job)
            found = self.known[series.shape] = Costs(*works, *pipeline.kept(job)), Prices.of(works)
        return found

    def prices(self, group: Group) -> Prices:
        """Of a group's cheapest recompute mode; what its layers keep is left for those that are opened."""
        shape = group.shape
        if shape not in self.works:
            self.works[shape] = pipeline.works(job_of(self.request, Point(Series(group, shape, "1f1b"), 1)))
        return Prices.of(self.works[shape])

    def message(self, point: Point) -> float:
        """Seconds of a message between stages."""
        if point.pp == 1:
            return 0.0
        key = (point.series.group.shape, point.pp)
        if key not in self.messages:
            self.messages[key] = pipeline.message_seconds(job_of(self.request, point))
        return self.messages[key]

    def tail(self, job: Job, built: list[Stage], rank: int) -> float:
        """Seconds that follow a rank's pipeline."""
        tail = total.tail(job, built, rank, self._closing(job, built, rank))
        return tail.late + tail.update

    def _closing(self, job: Job, built: list[Stage], rank: int) -> Closing:
        held = together(built[index].content for index in pipeline.own_stages(job, rank))
        mesh = job.pp, job.dp_replicate, job.dp_shard, job.cp, job.tp, job.ep
        key = (mesh, job.zero, job.sequence_parallel, held, job.microbatches if job.pp == 1 else 0)
        if key not in self.closings:
            share = pipeline.padded_share(job, built, rank)
            self.closings[key] = total.closing(job, built, rank, share)
        return self.closings[key]

    def ends(self, point: Point, rank: int) -> tuple[End, ...]:
        """What follows a rank's pipeline, for each division of the data-parallel ranks."""
        stages = contents(self.request.model, point.pp * point.chunks)
        own = schedules.stages_of_rank(point.schedule, rank, point.pp, point.chunks)
        held = together(stages[index] for index in own)
        degrees = point.series.group._replace(shape=point.shape._replace(micro_batch=0, recompute=""))
        key = (
            degrees if point.pp == 1 else degrees._replace(microbatches=0),
            held,
            point.schedule in schedules.SPLITS_BACKWARD,
        )
        if key not in self.known_ends:
            plain = job_of(self.request, point)
            built = pipeline.stages(plain, self.of(point.series)[0])
            self.known_ends[key] = tuple(
                End.of(job, self._closing(job, built, rank)) for job in divided(self.request, point, plain)
            )
        return self.known_ends[key]


def divided(request: Request, point: Point, plain: Job) -> list[Job]:
    """A point's layouts."""
    return [
        replace(plain, zero=zero, dp_replicate=replicate, dp_shard=shard)
        for zero, replicate, shard in data_layouts(request, point)
    ]


class Ended(NamedTuple):
    """A point whose bound includes what follows the pipeline."""

    point: Point


class Fitting(NamedTuple):
    """A point with the layouts of it that pass the test of memory; no layout's pipeline rank `rank` is through its
    micro-batches before `end`."""

    plain: Job
    cost: Costs
    built: list[Stage]
    layouts: tuple[Job, ...]
    end: float
    rank: int


class Bounded(NamedTuple):
    """A point whose layouts each have a bound of their step, traffic and update after the pipeline included."""

    fitting: Fitting
    layouts: tuple[tuple[float, Job], ...]


def search(request: Request, keep: int = 10) -> Outcome:
    """The `keep` fastest lines of layouts that fit, best bound first."""
    start = perf_counter()
    with collector_paused():
        found = _searched(request, keep)
    return found.outcome(perf_counter() - start)


def _searched(request: Request, keep: int) -> _Found:
    costing, found = Costing(request), _Found(keep)
    queue: list[tuple[float, int, Group | Series | Point | Ended | Fitting | Bounded]] = []
    order = count()
    for group in possible(request, costing):
        queue.append((series_bound(group, costing.prices(group), request.model), next(order), group))
    heapq.heapify(queue)
    while queue:
        bound, _, item = heapq.heappop(queue)
        if bound >= found.limit:
            break
        if isinstance(item, Bounded):
            found.take(_simulated(item, found))
            continue
        for tighter, opened in _open(request, item, costing, found):
            if max(bound, tighter) < found.limit:
                heapq.heappush(queue, (max(bound, tighter), next(order), opened))
    return found


def possible(request: Request, costing: Costing) -> Iterator[Group]:
    """The groups without those of which one micro-batch of one layer does not fit: larger micro-batches with the same
    degrees fit no better. The smallest always stays: what is missing is found on the way."""
    memory = float(request.hardware.device.memory)
    for ladder in ladders(request):
        many = bisect_right(
            ladder.micro_batches, memory, lo=1, key=lambda micro: costing.memory.of_group(ladder.group(micro))
        )
        yield from ladder._replace(micro_batches=ladder.micro_batches[:many]).groups()


def _open(
    request: Request, item: Group | Series | Point | Ended | Fitting, costing: Costing, found: _Found
) -> Iterator[tuple[float, Series | Point | Ended | Fitting | Bounded]]:
    """What an item consists of, each with its bound; what cannot fit is left out."""
    if isinstance(item, Group):
        for series in series_of(request, item):
            missing = costing.memory.of_series(series) - request.hardware.device.memory
            if missing <= 0:
                yield series_bound(item, costing.of(series)[1], request.model), series
            else:
                found.missed(request, series, missing)
    elif isinstance(item, Series):
        prices = costing.of(item)[1]
        for point in points(request, item):
            found.searched += 1
            yield quick_bound(point, prices, request.model, costing.message(point))[0].seconds, point
    elif isinstance(item, Point):
        yield from end_bound(request, item, costing)
    elif isinstance(item, Ended):
        yield from _fitting(request, item.point, costing, found)
    else:
        yield _bounded(item, costing)


def end_bound(request: Request, point: Point, costing: Costing) -> Iterator[tuple[float, Ended]]:
    """The point with the busiest rank's own work, and what follows it in the best division of its data-parallel
    ranks."""
    quick = quick_bound(point, costing.of(point.series)[1], request.model, costing.message(point))
    bounds = [
        [one.seconds + end.least(one.forward, one.backward) for end in costing.ends(point, one.rank)]
        for one in quick
    ]
    if bounds[0]:
        yield min(map(max, zip(*bounds, strict=True))), Ended(point)


def _fitting(
    request: Request, point: Point, costing: Costing, found: _Found
) -> Iterator[tuple[float, Fitting]]:
    """The point, if some of its layouts may fit. Memory of the first two ranks and of the last is known from the order
    of their work alone, and so is the traffic after the pipeline."""
    cost = costing.of(point.series)[0]
    plain = job_of(request, point)
    built = pipeline.stages(plain, cost)
    held = _held_by_ends(plain, built)
    shares = {rank: pipeline.rank_share(plain, built, rank) for rank in held}
    layouts = []
    too_large: set[int] = set()  # zero stages that do not fit on the most shards fit on no fewer
    for job in divided(request, point, plain):
        if job.zero in too_large:
            continue
        missing = _missing(job, cost, shares, held)
        if missing > 0:
            too_large.add(job.zero)
            found.layout_missed(job, missing)
            continue
        found.feasible += 1
        layouts.append(job)
    if not layouts:
        return
    end, rank = _end(plain, built, busiest(built, point))
    yield end + plain.physics.step, Fitting(plain, cost, built, tuple(layouts), end, rank)


def _end(job: Job, built: list[Stage], rank: int) -> tuple[float, int]:
    """The end of the pipeline of `rank`, or of the first rank, working alone: (seconds, rank) of the later one."""
    times = [stage.times for stage in built]
    ends = alone(job.schedule, job.pp, job.microbatches, times, pipeline.message_seconds(job), rank)
    return max((ends.own, rank), (ends.first, 0))


def _bounded(fitting: Fitting, costing: Costing) -> tuple[float, Bounded]:
    """The point with bounds that include what follows the pipeline. Where backward is split a rank's weight
    gradients lag by its number, so the second rank, with the fewest to fill its waits, may be through later than
    the busiest."""
    job = fitting.plain
    end, rank = fitting.end, fitting.rank
    if job.pp > 1 and job.schedule in schedules.SPLITS_BACKWARD:
        end, rank = max((end, rank), _end(job, fitting.built, 1))
    layouts = [
        (end + job.physics.step + costing.tail(one, fitting.built, rank), one) for one in fitting.layouts
    ]
    return min(bound for bound, _ in layouts), Bounded(fitting, tuple(layouts))


def _simulated(bounded: Bounded, found: _Found) -> list[tuple[float, Job]]:
    """Seconds of the layouts of a point that fit: on every rank, too, which the order of their work tells."""
    fitting = bounded.fitting
    held = {rank: held_bytes(fitting.plain, fitting.built, rank) for rank in range(fitting.plain.pp)}
    fits = []
    for bound, job in bounded.layouts:
        if bound >= found.limit * (1 + SAME):
            continue
        exact = pipeline.shares(job, fitting.built)
        missing = _missing(job, fitting.cost, dict(enumerate(exact)), held)
        if missing > 0:
            found.layout_missed(job, missing)
        else:
            fits.append((job, exact))
    if not fits:
        return []
    found.simulated += 1
    line = pipeline.timeline(fitting.plain, fitting.built)
    return [
        (total.slowest(job, fitting.built, line, exact)[0] + job.physics.step, job) for job, exact in fits
    ]


def _held_by_ends(job: Job, built: list[Stage]) -> dict[int, float]:
    """Bytes of activations in flight on the first two pipeline ranks and on the last."""
    return {rank: held_bytes(job, built, rank) for rank in {0, min(1, job.pp - 1), job.pp - 1}}


def least_excess(job: Job) -> tuple[float, int]:
    """(bytes, pipeline rank): by how much the fullest of the first two ranks and the last exceeds the device, from
    the order of their work alone; not positive where all three fit."""
    cost = pipeline.costs(job)
    built = pipeline.stages(job, cost)
    held = _held_by_ends(job, built)
    shares = {rank: pipeline.padded_share(job, built, rank) for rank in held}
    return max((_missing(job, cost, shares, {rank: size}), rank) for rank, size in held.items())


def _missing(job: Job, cost: Costs, shares: Mapping[int, Share], held: Mapping[int, float]) -> float:
    """Bytes by which the fullest of the ranks in `held` exceeds the device; negative where all fit."""
    spare = total.transient(job)
    peak = max(total.memory(job, cost, size, rank, shares[rank], spare).peak for rank, size in held.items())
    return peak - job.hardware.device.memory
