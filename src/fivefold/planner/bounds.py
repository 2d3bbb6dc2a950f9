"""Bounds of the search: seconds no layout of a point beats, bytes none stays below."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from fivefold.config.tree import Model
from fivefold.ledger.physics import Physics
from fivefold.ledger.pipeline import Costs, Stage
from fivefold.ledger.shards import contents, parts
from fivefold.ledger.simulate import held_at_once
from fivefold.planner.space import Group, Point, Series, Wish
from fivefold.spec import schedules


class RankContent(NamedTuple):
    """Layers and ends of one pipeline rank."""

    dense: int
    expert: int
    first: int
    last: int


@dataclass(frozen=True)
class Contents:
    """What the pipeline ranks hold.

    Attributes:
        ranks: of every rank.
        distinct: without repetition.
        after: for every stage of the first rank, all from there to the end together, and the messages
        between. before: the stages ahead of the last rank's first one, together.
    """

    ranks: tuple[RankContent, ...]
    distinct: tuple[RankContent, ...]
    before: RankContent
    after: tuple[tuple[RankContent, int], ...]


@lru_cache(maxsize=4096)
def rank_contents(model: Model, name: schedules.Name, pp: int, chunks: int) -> Contents:
    """Contents of every pipeline rank."""
    stages = contents(model, pp * chunks)
    ranks: list[list[int]] = [[0, 0, 0, 0] for _ in range(pp)]
    for index, stage in enumerate(stages):
        rank = schedules.rank_of_stage(name, index, pp)
        for position, amount in enumerate(stage):
            ranks[rank][position] += int(amount)
    before = RankContent(*(sum(int(stage[i]) for stage in stages[: pp - 1]) for i in range(4)))
    after = []
    place = [schedules.rank_of_stage(name, index, pp) for index in range(len(stages))]
    for index in (i for i in range(len(stages)) if place[i] == 0):
        rest = RankContent(*(sum(int(stage[i]) for stage in stages[index:]) for i in range(4)))
        crossings = sum(place[i] != place[i + 1] for i in range(index, len(stages) - 1))
        after.append((rest, crossings))
    own = tuple(RankContent(*amounts) for amounts in ranks)
    return Contents(own, tuple(dict.fromkeys(own)), before, tuple(after))


class Prices(NamedTuple):
    """Seconds of one micro-batch: (dense layer, expert layer, embedding, head), by pass."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    inputs: tuple[float, ...]  # of `backward`, the input gradients
    both: tuple[float, ...]

    @staticmethod
    def of(cost: Costs) -> "Prices":
        works = (cost.dense, cost.expert, cost.first, cost.last)
        times = [work.times if work else None for work in works]
        forward = [t.forward if t else 0.0 for t in times]
        backward = [t.input_grad + t.weight_grad if t else 0.0 for t in times]
        inputs = tuple(t.input_grad if t else 0.0 for t in times)
        both = tuple(f + b for f, b in zip(forward, backward, strict=True))
        return Prices(tuple(forward), tuple(backward), inputs, both)


def _cost(content: RankContent, each: Sequence[float]) -> float:
    a, b, c, d = content
    return a * each[0] + b * each[1] + c * each[2] + d * each[3]


def series_bound(group: Group, prices: Prices, model: Model) -> float:
    """An even share of all work, whatever the schedule."""
    whole = rank_contents(model, "1f1b", 1, 1).ranks[0]
    return group.microbatches * _cost(whole, prices.both) / group.pp + Physics().step


def series_memory(wish: Wish, series: Series, cost: Costs) -> float:
    """Bytes of an even share: states split as far as they go, and the schedule's micro-batches in flight."""
    group, p = series.group, series.group.pp
    whole = rank_contents(wish.model, "1f1b", 1, 1).ranks[0]
    saved = (whole.dense * cost.saved_dense + whole.expert * cost.saved_expert) / p
    held = group.microbatches if series.schedule == "gpipe" else min(group.microbatches, p)
    return _states(wish, series, whole, p) + cost.live + saved * held + Physics().context_bytes


def _states(wish: Wish, series: Series, whole: RankContent, p: int) -> float:
    """Least bytes of states of the fullest of p ranks: a pipeline keeps gradients whole and parameters whole,
    or gathered where backward is not split; all else over every data-parallel rank."""
    shape, stack, group = series.shape, wish.stack, series.group
    part = parts(wish.model, shape.tp, shape.ep, shape.tp)
    spread = group.data_parallel * shape.cp
    dense = (whole.dense * part.dense_layer.dense + whole.expert * part.expert_layer.dense) / p
    expert = whole.expert * part.expert_layer.expert / p
    if p == 1:
        dense += part.embedding.dense
    fewest = dense / spread + expert / max(1, spread // shape.ep)
    if p == 1:
        return (stack.master + stack.gradient + stack.moments) * fewest
    split = series.schedule in schedules.SPLITS_BACKWARD
    read = stack.master if split else min(stack.master, stack.gather)
    return (stack.gradient + read) * (dense + expert) + stack.moments * fewest


def quick_bound(point: Point, prices: Prices, model: Model, message: float) -> float:
    """No step of this point is faster than any rank's work, or the last rank's work with what must pass
    before
    it starts, and after it ends (where backward is split, weight gradients may be done while others wait)."""
    held = rank_contents(model, point.schedule, point.pp, point.chunks)
    p, m = point.pp, point.microbatches
    busy = max(_cost(rank, prices.both) for rank in held.distinct)
    step = Physics().step
    if p == 1:
        return m * busy + step
    hops = (p - 1) * message
    split = point.schedule in schedules.SPLITS_BACKWARD
    ahead = _cost(held.before, prices.forward) + hops
    if not split:
        ahead = _cost(held.before, prices.both) + 2 * hops
    return max(m * busy, m * _cost(held.ranks[-1], prices.both) + ahead) + step


def tight_bound(point: Point, prices: Prices, model: Model, message: float) -> float:
    """Little's law on the first rank: a micro-batch stays on a stage at least for the way down and up from
    there, and no more are ever held at once than the schedule's order allows."""
    quick = quick_bound(point, prices, model, message)
    if point.pp == 1:
        return quick
    held = rank_contents(model, point.schedule, point.pp, point.chunks)
    split = point.schedule in schedules.SPLITS_BACKWARD
    backward = prices.inputs if split else prices.backward
    way = [f + b for f, b in zip(prices.forward, backward, strict=True)]
    together = held_at_once(point.schedule, point.pp, point.microbatches, point.chunks, 0)
    stays = sum(_cost(after, way) + 2 * crossings * message for after, crossings in held.after)
    most = max(sum(counts) for counts in together)
    return max(quick, point.microbatches * stays / most + Physics().step)


def held_bytes(point: Point, built: Sequence[Stage], rank: int) -> float:
    """Bytes of activations in flight on a rank at its fullest, from the order of its work alone."""
    own = schedules.stages_of_rank(point.schedule, rank, point.pp, point.chunks)
    saved = [built[index].saved for index in own]
    if point.pp == 1:
        return sum(saved)
    together = held_at_once(point.schedule, point.pp, point.microbatches, point.chunks, rank)
    return max(sum(n * size for n, size in zip(counts, saved, strict=True)) for counts in together)
