"""The space of layouts: which axes are free, and every legal combination of those that shape a micro-batch."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from operator import mul
from typing import Any, NamedTuple

from fivefold.config.errors import ConfigError
from fivefold.config.model import Model
from fivefold.config.tree import Parallel
from fivefold.ledger.hardware import Hardware
from fivefold.ledger.job import Job, Stack
from fivefold.spec import schedules
from fivefold.spec.legal import check_layout
from fivefold.spec.mesh import Mesh
from fivefold.spec.stages import most_stages
from fivefold.spec.synchronisation import can_sum

RECOMPUTE = ("none", "attention", "elementwise", "full")
SCHEDULES: tuple[schedules.Name, ...] = (
    "gpipe",
    "1f1b",
    "interleaved",
    "zb_h1",
    "interleaved_zb",
    "zbv",
    "dualpipev",
)


@dataclass(frozen=True)
class Request:
    """What is to be planned: a model on a cluster with a batch; `fixed` holds axes that may not move.

    Keys of `fixed`: those of `[parallel]`, and "micro_batch". `smaller` are the batches of a ramp up to
    `global_batch`: a layout must carry them too, its step is that of the last.
    """

    model: Model
    hardware: Hardware
    global_batch: int
    sequence_length: int
    precision: str
    itemsize: int
    stack: Stack
    fixed: Mapping[str, Any] = field(default_factory=dict)
    context: str = "ring"
    smaller: range = range(0)

    def carries(self, unit: int) -> bool:
        """Whether micro-batches of `unit` sequences over all replicas make up every batch."""
        return all(batch % unit == 0 for batch in (self.global_batch, *self.smaller[:2]))

    def can_run(self, schedule: schedules.Name, pp: int, unit: int) -> bool:
        """Whether the schedule exists for the micro-batches of every batch, each a multiple of `unit`."""
        smaller = self.smaller
        counts = range(smaller.start // unit, smaller.stop // unit, max(1, smaller.step // unit))
        last = self.global_batch // unit
        return schedules.is_legal(schedule, pp, last) and schedules.are_legal(schedule, pp, counts)

    def allows(self, key: str, value: Any) -> bool:
        return key not in self.fixed or self.fixed[key] == value


class Shape(NamedTuple):
    """What a layer's micro-batch on one rank depends on."""

    tp: int
    sequence_parallel: bool
    cp: int
    ep: int
    micro_batch: int
    recompute: str


class Group(NamedTuple):
    """Degrees and a micro-batch; `recompute` in the shape is the cheapest mode allowed."""

    shape: Shape
    pp: int
    data_parallel: int
    microbatches: int


class Ladder(NamedTuple):
    """Degrees, and all micro-batches that divide the batch with them, in ascending order; `least` is the group of the
    smallest."""

    least: Group
    micro_batches: tuple[int, ...]

    def group(self, micro: int) -> Group:
        shape, share = self.least.shape, self.least.shape.micro_batch * self.least.microbatches
        return self.least._replace(shape=shape._replace(micro_batch=micro), microbatches=share // micro)

    def groups(self) -> Iterator[Group]:
        return map(self.group, self.micro_batches)


class Series(NamedTuple):
    """A group under one schedule and recompute mode."""

    group: Group
    shape: Shape
    schedule: schedules.Name


class Point(NamedTuple):
    """A layout up to the choice of zero and of how data-parallel ranks divide into shards and replicas."""

    series: Series
    chunks: int

    @property
    def shape(self) -> Shape:
        return self.series.shape

    @property
    def schedule(self) -> schedules.Name:
        return self.series.schedule

    @property
    def pp(self) -> int:
        return self.series.group.pp

    @property
    def data_parallel(self) -> int:
        return self.series.group.data_parallel

    @property
    def microbatches(self) -> int:
        return self.series.group.microbatches


MOST = 1 << 31
"""Devices and sequences of a batch whose divisors are looked for."""


def check_size(what: str, number: int) -> None:
    """Refuses a number of devices or sequences whose divisors would take minutes."""
    if number > MOST:
        raise ConfigError(f"{what} = {number}: expected at most {MOST}")


@lru_cache(maxsize=1024)
def divisors(number: int) -> tuple[int, ...]:
    """In ascending order."""
    found, rest, prime = [1], number, 2
    while rest > 1:
        if prime * prime > rest:
            prime = rest
        powers = [1]
        while rest % prime == 0:
            rest //= prime
            powers.append(powers[-1] * prime)
        if len(powers) > 1:
            found = [divisor * power for divisor in found for power in powers]
        prime += 1
    return tuple(sorted(found))


def legal_tp(request: Request) -> list[int]:
    """Tensor-parallel degrees the model divides by, inside a node unless one outside is fixed."""
    limit = request.hardware.devices if "tp" in request.fixed else request.hardware.node.devices
    return [
        tp
        for tp in divisors(request.hardware.devices)
        if tp <= limit and request.allows("tp", tp) and is_legal(request.model, Mesh(tp=tp), Parallel(tp=tp))
    ]


def _legal_cp(request: Request, cp: int, tp: int) -> bool:
    """Ulysses deals out heads; a ring takes any degree."""
    if cp == 1 or request.context == "ring":
        return True
    return is_legal(request.model, Mesh(cp=cp, tp=tp), Parallel(cp=cp, tp=tp, context="ulysses"))


def legal_ep(request: Request, ranks: int) -> list[int]:
    """Expert-parallel degrees over `ranks` = data_parallel · cp."""
    count = request.model.experts.count
    if not count:
        return [1] if request.allows("ep", 1) else []
    return [ep for ep in divisors(count) if ranks % ep == 0 and request.allows("ep", ep)]


def is_legal(model: Model, mesh: Mesh, parallel: Parallel) -> bool:
    """Whether the layout table serves the degrees."""
    try:
        check_layout(model, parallel, mesh)
    except ConfigError:
        return False
    return True


def modes(request: Request) -> list[str]:
    """Recompute modes, the one that keeps least last."""
    return [mode for mode in RECOMPUTE if request.allows("recompute", mode)]


def series_of(request: Request, group: Group) -> Iterator[Series]:
    """Every schedule that exists for the group's micro-batches, with every recompute mode. Without a pipeline
    all schedules are one, as `jobs.job_of` has it."""
    names: list[schedules.Name]
    if group.pp == 1:
        names = ["1f1b"]
    else:
        names = [
            name
            for name in SCHEDULES
            if request.allows("schedule", name)
            and request.can_run(name, group.pp, request.global_batch // group.microbatches)
            and group.pp * schedules.chunks_of(name, 2) <= most_stages(request.model)
        ]
    for name in names:
        for mode in modes(request):
            yield Series(group, group.shape._replace(recompute=mode), name)


def points(request: Request, series: Series) -> Iterator[Point]:
    """Every number of chunks the schedule can have."""
    pp, fixed = series.group.pp, request.fixed.get("chunks", 0)
    if pp == 1 or series.schedule not in ("interleaved", "interleaved_zb"):
        own = 1 if pp == 1 else schedules.chunks_of(series.schedule, 1)
        if fixed in (0, 1, own):
            yield Point(series, own)
        return
    for chunks in range(2, most_stages(request.model) // pp + 1):
        if fixed in (0, chunks):
            yield Point(series, chunks)


def groups(request: Request) -> Iterator[Group]:
    """Every legal choice of degrees whose product is the cluster, and of micro-batches that divide the batch."""
    for ladder in ladders(request):
        yield from ladder.groups()


def ladders(request: Request) -> Iterator[Ladder]:
    """Every legal choice of degrees with which some micro-batch divides the batch."""
    world = request.hardware.devices
    cheapest = modes(request)[0]
    for tp in legal_tp(request):
        sequence = [
            s for s in ((False, True) if tp > 1 else (False,)) if request.allows("sequence_parallel", s)
        ]
        for pp in _allowed(request, "pp", divisors(world // tp)):
            if pp > most_stages(request.model):
                continue
            for cp in _allowed(request, "cp", divisors(world // tp // pp)):
                replicas = world // tp // pp // cp
                if cp > request.sequence_length or not _legal_cp(request, cp, tp):
                    continue
                micros = _micro_batches(request, replicas)
                for ep in legal_ep(request, replicas * cp) if micros else ():
                    for sp in sequence:
                        shape = Shape(tp, sp, cp, ep, micros[0], cheapest)
                        share = request.global_batch // replicas
                        yield Ladder(Group(shape, pp, replicas, share // micros[0]), micros)


def _micro_batches(request: Request, replicas: int) -> tuple[int, ...]:
    """Micro-batches of which every batch is a multiple over the replicas, in ascending order."""
    if not request.carries(replicas):
        return ()
    micros = divisors(request.global_batch // replicas)
    return tuple(
        micro
        for micro in micros
        if request.allows("micro_batch", micro) and request.carries(replicas * micro)
    )


def job_of(request: Request, point: Point, zero: int = 0, replicate: int = 0, shard: int = 1) -> Job:
    """The job of a point with its data-parallel ranks divided."""
    shape = point.shape
    return Job(
        model=request.model,
        hardware=request.hardware,
        micro_batch=shape.micro_batch,
        microbatches=point.microbatches,
        sequence_length=request.sequence_length,
        pp=point.pp,
        dp_replicate=replicate or point.data_parallel,
        dp_shard=shard,
        cp=shape.cp,
        tp=shape.tp,
        ep=shape.ep,
        zero=zero,
        sequence_parallel=shape.sequence_parallel,
        context=request.context,  # type: ignore[arg-type]
        schedule=point.schedule,
        chunks=point.chunks,
        recompute=shape.recompute,  # type: ignore[arg-type]
        precision=request.precision,
        itemsize=request.itemsize,
        stack=request.stack,
        imbalance=1.2 if shape.ep > 1 else 1.0,
    )


def nearest_batches(request: Request) -> list[int]:
    """Global batches next to the requested one that some degrees allow: at most one below and one above; none where
    no degrees are legal at all."""
    world, micro, least = request.hardware.devices, request.fixed.get("micro_batch", 1), set()
    for tp in legal_tp(request):
        for pp in _allowed(request, "pp", divisors(world // tp)):
            if pp <= most_stages(request.model):
                for cp in _allowed(request, "cp", divisors(world // tp // pp)):
                    if cp <= request.sequence_length and _legal_cp(request, cp, tp):
                        least.add(world // tp // pp // cp * micro)
    batch = request.global_batch
    below = max((batch // each * each for each in least), default=0)
    above = min((-(-batch // each) * each for each in least), default=0)
    return [found for found in dict.fromkeys((below, above)) if found]


def _allowed(request: Request, key: str, values: Iterable[int]) -> list[int]:
    return [value for value in values if request.allows(key, value)]


def data_layouts(request: Request, point: Point) -> list[tuple[int, int, int]]:
    """(zero, dp_replicate, dp_shard) for a point, for each zero the most shards first."""
    dp, cp, ep = point.data_parallel, point.shape.cp, point.shape.ep
    is_apart = request.model.tied and point.pp > 1

    def sums(zero: int, replicas: int) -> bool:
        method = request.stack.compression.method
        return can_sum(request.stack.algorithm, method, zero, dp * cp, replicas, is_apart)

    found = []
    shards = request.fixed.get("dp_shard", 1)
    divides = shards in (1, dp) and dp // shards % request.fixed.get("dp_replicate", 1) == 0
    if "dp_shard" in request.fixed:
        divides = divides and request.allows("dp_replicate", dp // shards)
    if request.allows("zero", 0) and (ep == 1 or cp % ep == 0) and divides and sums(0, dp):
        found.append((0, dp, 1))  # as many replicas times shards, which are one
    for zero in (1, 2, 3):
        if not request.allows("zero", zero):
            continue
        if zero == 3 and point.pp > 1 and point.schedule in schedules.SPLITS_BACKWARD:
            continue  # torch runs a split backward only on gathered parameters: zero 3 would be zero 2
        for shard in reversed(divisors(dp)):
            legal = shard * cp > 1 and shard * cp % ep == 0 and sums(zero, dp // shard)
            if legal and request.allows("dp_shard", shard) and request.allows("dp_replicate", dp // shard):
                found.append((zero, dp // shard, shard))
    return found


def size(request: Request) -> int:
    """How many layouts the space has."""
    count = 0
    ways: dict[tuple[int, int], tuple[int, int]] = {}  # of a number of micro-batches
    sums: dict[tuple[int, int], tuple[int, int]] = {}  # of all numbers of micro-batches
    lengths: dict[tuple[int, str], int] = {}
    # divisions of the data-parallel ranks of each
    splits: dict[tuple[int, int, int, bool], tuple[int, int]] = {}
    for ladder in ladders(request):
        group = ladder.least
        pipe = group.pp, group.data_parallel
        data = group.data_parallel, group.shape.cp, group.shape.ep, group.pp > 1
        if pipe not in sums:
            for step in ladder.groups():
                if (step.pp, step.microbatches) not in ways:
                    ways[step.pp, step.microbatches] = _ways(request, step, lengths)
            each = [ways[step.pp, step.microbatches] for step in ladder.groups()]
            sums[pipe] = sum(whole for whole, _ in each), sum(halves for _, halves in each)
        if data not in splits:
            splits[data] = (
                len(data_layouts(request, Point(Series(group, group.shape, "1f1b"), 1))),
                len(data_layouts(request, Point(Series(group, group.shape, "zb_h1"), 1))),
            )
        count += sum(map(mul, sums[pipe], splits[data]))
    return count


def _ways(request: Request, group: Group, lengths: dict[tuple[int, str], int]) -> tuple[int, int]:
    """Points with a whole backward, and with a split one. `lengths` remembers how many a schedule has in each mode."""
    whole = halves = 0
    for series in series_of(request, group):
        key = group.pp, series.schedule
        if key not in lengths:
            lengths[key] = sum(1 for _ in points(request, series))
        if group.pp > 1 and series.schedule in schedules.SPLITS_BACKWARD:
            halves += lengths[key]
        else:
            whole += lengths[key]
    return whole, halves
