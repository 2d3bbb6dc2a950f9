"""The search: every layout of the space in effect, few of them in fact.

1. Costs of a layer depend only on its shape (tp, sp, cp, ep, micro-batch, recompute): computed once per
shape. 2. Degrees and micro-batches form groups, a group's schedules and recompute modes series, a series'
chunks
   points; each has a lower bound of its step and of its memory (planner/bounds.py). Best bound first they are
   opened; what cannot fit, or cannot enter the ranking any more, never is.
3. A point whose memory passes is simulated once for all divisions of its data-parallel ranks.
"""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from time import perf_counter
from typing import NamedTuple

from fivefold.ledger import pipeline, total
from fivefold.ledger.job import Job
from fivefold.ledger.pipeline import Costs
from fivefold.ledger.shards import Share
from fivefold.ledger.total import Ledger
from fivefold.planner.bounds import Prices, held_bytes, quick_bound, series_bound, series_memory, tight_bound
from fivefold.planner.space import Group, Point, Series, Shape, Wish, data_layouts, groups, points, series_of
from fivefold.spec import schedules


class Ranked(NamedTuple):
    """A layout that fits, and its step."""

    seconds: float
    job: Job


@dataclass(frozen=True)
class Outcome:
    """The ranking, best first, and what the search did.

    Attributes:
        searched: layouts in the space.
        simulated: points whose schedule was simulated.
        tightest: of the layouts that do not fit, the job that misses by the fewest bytes, and those bytes.
    """

    ranking: tuple[Ranked, ...]
    searched: int
    feasible: int
    simulated: int
    seconds: float
    tightest: tuple[Job, float] | None


def job_of(wish: Wish, point: Point, zero: int = 0, replicate: int = 0, shard: int = 1) -> Job:
    """The job of a point with its data-parallel ranks divided."""
    shape = point.shape
    return Job(
        model=wish.model,
        hardware=wish.hardware,
        micro_batch=shape.micro_batch,
        microbatches=point.microbatches,
        sequence_length=wish.sequence_length,
        pp=point.pp,
        dp_replicate=replicate or point.data_parallel,
        dp_shard=shard,
        cp=shape.cp,
        tp=shape.tp,
        ep=shape.ep,
        zero=zero,
        sequence_parallel=shape.sequence_parallel,
        context=wish.context,  # type: ignore[arg-type]
        schedule=point.schedule,
        chunks=point.chunks,
        recompute=shape.recompute,  # type: ignore[arg-type]
        precision=wish.precision,
        itemsize=wish.itemsize,
        stack=wish.stack,
        imbalance=1.2 if shape.ep > 1 else 1.0,
    )


class _Found:
    """What a search has found so far."""

    def __init__(self, keep: int) -> None:
        self.keep = keep
        self.best: list[Ranked] = []
        self.limit = float("inf")  # seconds at which a layout no longer enters the ranking
        self.searched = self.feasible = self.simulated = 0
        self.tightest: tuple[Job, float] | None = None

    def missed(self, job: Job, missing: float) -> None:
        if self.tightest is None or missing < self.tightest[1]:
            self.tightest = (job, missing)

    def take(self, job: Job, seconds: float, missing: float) -> None:
        if missing > 0:
            self.missed(job, missing)
            return
        if seconds < self.limit:
            self.best.append(Ranked(seconds, job))
            self.best.sort(key=lambda ranked: ranked.seconds)
            del self.best[self.keep :]
            if len(self.best) == self.keep:
                self.limit = self.best[-1].seconds

    def outcome(self, seconds: float) -> Outcome:
        return Outcome(tuple(self.best), self.searched, self.feasible, self.simulated, seconds, self.tightest)


class _Costing:
    """Costs, prices and messages of shapes, each computed once."""

    def __init__(self, wish: Wish) -> None:
        self.wish = wish
        self.known: dict[tuple[Shape, bool], tuple[Costs, Prices]] = {}
        self.messages: dict[tuple[Shape, int], float] = {}

    def of(self, series: Series) -> tuple[Costs, Prices]:
        # A split backward recomputes twice, so its costs are its own.
        split = series.group.pp > 1 and series.schedule in schedules.SPLITS_BACKWARD
        found = self.known.get((series.shape, split))
        if found is None:
            cost = pipeline.costs(job_of(self.wish, Point(series, 1)))
            found = self.known[series.shape, split] = (cost, Prices.of(cost))
        return found

    def message(self, point: Point) -> float:
        """Seconds of a message between stages."""
        if point.pp == 1:
            return 0.0
        key = (point.series.group.shape, point.pp)
        if key not in self.messages:
            self.messages[key] = pipeline.message_seconds(job_of(self.wish, point))
        return self.messages[key]


class Bounded(NamedTuple):
    """A point with its tight bound."""

    point: Point


def search(wish: Wish, keep: int = 10) -> Outcome:
    """The `keep` fastest layouts that fit, best bound first: groups open into series, series into points,
    points
    get a tight bound, and what is still ahead of the ranking then is simulated."""
    start = perf_counter()
    costing, found = _Costing(wish), _Found(keep)
    queue: list[tuple[float, int, Group | Series | Point | Bounded]] = []
    order = count()
    for group in groups(wish):
        prices = costing.of(Series(group, group.shape, "1f1b"))[1]
        queue.append((series_bound(group, prices, wish.model), next(order), group))
    heapq.heapify(queue)
    while queue:
        bound, _, item = heapq.heappop(queue)
        if bound >= found.limit:
            break
        if isinstance(item, Bounded):
            point = item.point
            for job, seconds, missing in _layouts(wish, point, costing.of(point.series)[0], bound, found):
                found.take(job, seconds, missing)
            continue
        for tighter, opened in _open(wish, item, costing, found):
            if max(bound, tighter) < found.limit:
                heapq.heappush(queue, (max(bound, tighter), next(order), opened))
    return found.outcome(perf_counter() - start)


def _open(
    wish: Wish, item: Group | Series | Point, costing: _Costing, found: _Found
) -> Iterator[tuple[float, Series | Point | Bounded]]:
    """What an item consists of, each with its bound; what cannot fit is left out."""
    if isinstance(item, Group):
        for series in series_of(wish, item):
            cost, prices = costing.of(series)
            missing = series_memory(wish, series, cost) - wish.hardware.device.memory
            if missing > 0:
                found.missed(job_of(wish, Point(series, schedules.chunks_of(series.schedule, 2))), missing)
            else:
                yield series_bound(item, prices, wish.model), series
    elif isinstance(item, Series):
        prices = costing.of(item)[1]
        for point in points(wish, item):
            found.searched += 1
            yield quick_bound(point, prices, wish.model, costing.message(point)), point
    else:
        prices = costing.of(item.series)[1]
        yield tight_bound(item, prices, wish.model, costing.message(item)), Bounded(item)


def _layouts(
    wish: Wish, point: Point, cost: Costs, bound: float, found: _Found
) -> Iterator[tuple[Job, float, float]]:
    """(job, seconds, bytes missing) for every division of the data-parallel ranks of a point.

    Memory of the first two ranks and of the last is known from the order of their work alone, and so is the
    traffic after the pipeline; only where a division passes and may rank is the schedule simulated.
    """
    plain = job_of(wish, point)
    built = pipeline.stages(plain, cost)
    shares = [pipeline.rank_share(plain, built, rank) for rank in range(plain.pp)]
    ends = {rank: held_bytes(point, built, rank) for rank in {0, min(1, plain.pp - 1), plain.pp - 1}}
    light = min(range(plain.pp), key=lambda rank: shares[rank].total)
    jobs = []
    too_large: set[int] = set()  # zero stages that do not fit on the most shards fit on no fewer
    for zero, replicate, shard in data_layouts(wish, point):
        if zero in too_large:
            continue
        job = replace(plain, zero=zero, dp_replicate=replicate, dp_shard=shard)
        missing = _missing(job, cost, shares, ends)
        if missing > 0:
            too_large.add(zero)
            yield job, 0.0, missing
            continue
        found.feasible += 1
        tail = total.tail(job, built, light, shares[light])
        if bound + tail.late + tail.update < found.limit:
            jobs.append(job)
    if not jobs:
        return
    found.simulated += 1
    line = pipeline.timeline(plain, built)
    everywhere = dict(enumerate(line.peak_in_flight))
    for job in jobs:
        exact = pipeline.shares(job, built)
        missing = _missing(job, cost, exact, everywhere)
        end = total.slowest(job, built, line, exact)[0] if missing <= 0 else 0.0
        yield job, end + job.physics.step, missing


def _missing(job: Job, cost: Costs, shares: Sequence[Share], held: Mapping[int, float]) -> float:
    """Bytes by which the fullest of the ranks in `held` exceeds the device; negative where all fit."""
    spare = total.transient(job)
    peak = max(total.memory(job, cost, size, rank, shares[rank], spare).peak for rank, size in held.items())
    return peak - job.hardware.device.memory


def ledger_of(ranked: Ranked) -> Ledger:
    """The whole ledger of a ranked layout."""
    return total.estimate(ranked.job)
