"""Bounds of memory in the search: bytes that no layout of a group or series stays below."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from operator import mul
from typing import NamedTuple

from fivefold.config.model import Model
from fivefold.ledger import activations, pipeline
from fivefold.ledger.job import Job
from fivefold.ledger.physics import Physics
from fivefold.ledger.pipeline import Kept, Stage
from fivefold.ledger.shards import StageContent, contents, parts, together
from fivefold.ledger.simulate import most_in_flight
from fivefold.planner.space import Group, Point, Request, Series, Shape, job_of
from fivefold.spec import schedules
from fivefold.spec.stages import most_stages


class FirstRank(NamedTuple):
    """What the first pipeline rank holds: stages of which as many micro-batches are in flight as `in_flight` says, and
    those of which one is at the same time."""

    filled: StageContent
    single: StageContent


NOTHING = StageContent(0, 0, first=False, last=False)


class MemoryBounds:
    """Bytes that the groups and series of a request need at least."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.is_cpu = request.hardware.device.is_cpu
        self.physics = Physics()
        self._least: dict[Shape, float] = {}
        self._kept: dict[Shape, Kept] = {}
        self._shares: dict[tuple[int, ...], float] = {}
        self._firsts: dict[tuple[object, ...], list[tuple[float, FirstRank]]] = {}

    def of_group(self, group: Group) -> float:
        """Of the fullest rank under every schedule and recompute mode: an even share of the states, split as far as
        they go, and what every rank with a layer holds of one micro-batch: backward needs all that a layer keeps, and
        where attention is recomputed that is least. It never falls as the micro-batch grows: each part of it is a
        multiple of the micro-batch, or the same for all."""
        shape = group.shape
        key = shape.tp, shape.ep, shape.cp, group.pp, group.data_parallel
        if key not in self._shares:
            whole = contents(self.request.model, 1)[0]
            if group.pp > 1:  # ranks without a layer may hold the ends
                whole = whole._replace(first=False, last=False)
            self._shares[key] = _states(self.request, group, whole, "1f1b") / group.pp
        if shape not in self._least:
            self._least[shape] = _least_kept(_job(self.request, group, "attention"))
        return self._peak(self._shares[key], self._least[shape])

    def of_series(self, series: Series) -> float:
        """Of the first pipeline rank, with the chunks with which it holds least."""
        group, name = series.group, series.schedule
        shape = group.shape
        key = shape.tp, shape.ep, shape.cp, group.pp, group.data_parallel, name
        if key not in self._firsts:
            ranks = first_ranks(self.request.model, name, group.pp, self.request.fixed.get("chunks", 0))
            self._firsts[key] = [(_states(self.request, group, together(rank), name), rank) for rank in ranks]
        kept = self._kept.get(series.shape)
        if kept is None:
            kept = self._kept[series.shape] = pipeline.kept(_job(self.request, group, series.shape.recompute))
        many = in_flight(name, group.pp, group.microbatches)
        return min(
            (
                self._peak(states, many * _saved(filled, kept) + _saved(single, kept) + kept.live)
                for states, (filled, single) in self._firsts[key]
            ),
            default=0.0,
        )

    def _peak(self, states: float, active: float) -> float:
        """As `total.memory` adds them up, with nothing in buffers."""
        reserved = 1 + self.physics.fragmentation
        if self.is_cpu:
            return (states + active) * reserved
        return states + active * reserved + self.physics.context_bytes


def _job(request: Request, group: Group, recompute: str) -> Job:
    return job_of(request, Point(Series(group, group.shape._replace(recompute=recompute), "1f1b"), 1))


def _least_kept(job: Job) -> float:
    experts = job.model.experts
    kinds = [True, False] if experts.count and experts.dense_layers else [bool(experts.count)]
    return min(activations.kept(job, expert).total for expert in kinds)


def in_flight(name: schedules.Name, pp: int, microbatches: int) -> int:
    """Micro-batches that the first rank holds of every `FirstRank.filled` stage at one time, at least."""
    if name == "gpipe":
        return microbatches
    return min(microbatches, 2 * pp - 1 if name in schedules.V_SHAPED and pp > 1 else pp)


@lru_cache(maxsize=1024)
def first_ranks(model: Model, name: schedules.Name, pp: int, chunks: int = 0) -> tuple[FirstRank, ...]:
    """The first rank with each number of chunks that the schedule can have (`chunks` alone, unless 0), without
    repetition."""
    if pp == 1:
        return (FirstRank(contents(model, 1)[0], NOTHING),)
    if name in schedules.V_SHAPED:
        stages = contents(model, 2 * pp)
        return (FirstRank(stages[0], stages[-1]),)
    numbers = [1]
    if name in ("interleaved", "interleaved_zb"):
        numbers = [n for n in range(2, most_stages(model) // pp + 1) if chunks in (0, n)]
    return tuple({FirstRank(together(contents(model, pp * n)[::pp]), NOTHING) for n in numbers})


def _saved(content: StageContent, kept: Kept) -> float:
    return content.dense_layers * kept.dense + content.expert_layers * kept.expert


def _states(request: Request, group: Group, held: StageContent, name: schedules.Name) -> float:
    """Least bytes of the states of what is held. A pipeline keeps gradients whole, and parameters as matmuls read them
    (gathered under zero 3, where backward is not split); all else is split over every data-parallel rank."""
    shape, stack, model = group.shape, request.stack, request.model
    part = parts(model, shape.tp, shape.ep, shape.tp)
    dense = held.dense_layers * part.dense_layer.dense + held.expert_layers * part.expert_layer.dense
    if held.first:
        dense += part.embedding.dense
    if held.last and not (model.tied and held.first):
        dense += part.head.dense
    expert = held.expert_layers * part.expert_layer.expert
    spread = group.data_parallel * shape.cp
    fewest = dense / spread + expert / max(1, spread // shape.ep)
    moments = stack.moments - stack.spared_moments  # as if all were matrices
    if group.pp == 1:
        return (stack.master + stack.gradient + moments) * fewest
    read = stack.compute_copy or stack.master
    if stack.shard_apart or name not in schedules.SPLITS_BACKWARD:
        read = min(read, stack.gather)
    return (stack.gradient + read) * (dense + expert) + moments * fewest


def held_bytes(job: Job, built: Sequence[Stage], rank: int) -> float:
    """Bytes of activations in flight on a rank at its fullest, from the order of its work alone."""
    own = schedules.stages_of_rank(job.schedule, rank, job.pp, job.chunks)
    saved = [built[index].saved for index in own]
    if job.pp == 1:
        return sum(saved)
    splits = any(stage.times.weight_grad for stage in built)
    together = most_in_flight(job.schedule, job.pp, job.microbatches, job.chunks, rank, splits)
    sizes: Iterator[float] = (sum(map(mul, counts, saved)) for counts in together)
    return max(sizes)
