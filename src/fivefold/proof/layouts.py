"""Every legal layout of a number of ranks, and a subset that covers every pair of choices."""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import combinations, product

from msgspec.structs import asdict, replace

from fivefold.config.errors import ConfigError
from fivefold.config.tree import Batch, Config, Parallel
from fivefold.planner.space import RECOMPUTE, SCHEDULES, divisors
from fivefold.spec.legal import check_trainable, resolve_config
from fivefold.spec.schedules import chunks_of, is_legal
from fivefold.spec.synchronisation import PROGRAMS, Algorithm, serves

MOST_ACCUMULATION = 64


def every_layout(config: Config, ranks: int) -> list[Config]:
    """`config` in every layout of exactly `ranks` ranks that its model allows.

    Mesh, zero, sequence parallel, schedule, context kind and expert degree are all combined; recompute, the number
    of micro-batches and what carries out the collectives of data parallel take turns over them.
    """
    found: list[Config] = []
    of_stage = Counter[int]()  # layouts by zero stage, those with one data rank left out
    for parallel in _candidates(config.parallel, ranks, bool(config.model.experts.count)):
        turn = len(found)
        algorithm = _algorithm(parallel, of_stage[parallel.zero])
        taken = replace(parallel, recompute=RECOMPUTE[turn % 4], algorithm=algorithm)
        laid_out = _with_batch(taken, config, 1 + turn // 4 % 3)
        try:
            check_trainable(resolve_config(laid_out, ranks))
        except ConfigError:
            continue
        found.append(laid_out)
        of_stage[parallel.zero] += not _is_alone(parallel)
    return found


def _algorithm(parallel: Parallel, turn: int) -> Algorithm:
    """In every other turn one of the programs that serve the layout."""
    if _is_alone(parallel) or turn % 2 == 0:
        return "backend"
    programs = [name for name in PROGRAMS if serves(name, parallel.zero)]
    return programs[turn // 2 % len(programs)]


def _is_alone(parallel: Parallel) -> bool:
    """Whether there is one data rank."""
    return parallel.zero == 0 and parallel.dp_replicate * parallel.cp == 1


def covering(layouts: Iterable[Config]) -> list[Config]:
    """A pairwise covering: few of `layouts` in which every pair of choices occurs that occurs in any of them. Greedy:
    the layout with the most new pairs first."""
    left = [(layout, _pairs(layout)) for layout in layouts]
    wanted = set().union(*(pairs for _, pairs in left)) if left else set()
    chosen: list[Config] = []
    while wanted:
        layout, pairs = max(left, key=lambda item: len(item[1] & wanted))
        chosen.append(layout)
        wanted -= pairs
    return chosen


def _pairs(config: Config) -> frozenset[tuple[tuple[str, object], tuple[str, object]]]:
    choices = asdict(config.parallel)
    programs = ("zero", choices["zero"]), ("algorithm", choices.pop("algorithm"))  # what a program must serve
    choices["accumulation"] = min(3, resolve_config(config).batch.accumulation)
    return frozenset([*combinations(choices.items(), 2), programs])


def _candidates(base: Parallel, ranks: int, has_experts: bool) -> Iterator[Parallel]:
    for pp, dp_replicate, dp_shard, cp in product(divisors(ranks), repeat=4):
        taken = pp * dp_replicate * dp_shard * cp
        if ranks % taken:
            continue
        shards, tp = dp_shard * cp, ranks // taken
        for zero, (schedule, chunks), sequence_parallel, context, ep in product(
            range(4 if shards > 1 else 1),
            _schedules(pp),
            (False, True) if tp > 1 else (False,),
            ("ring", "ulysses") if cp > 1 else (base.context,),
            divisors(shards) if has_experts else [1],
        ):
            if zero == 0 and dp_shard > 1:  # means the same as replicas
                continue
            yield Parallel(
                pp=pp,
                dp_replicate=dp_replicate,
                dp_shard=dp_shard,
                cp=cp,
                tp=tp,
                ep=ep,
                zero=zero,  # type: ignore[arg-type]
                sequence_parallel=sequence_parallel,
                context=context,
                schedule=schedule,  # type: ignore[arg-type]
                chunks=chunks,
                backend=base.backend,
            )


def _schedules(pp: int) -> list[tuple[str, int]]:
    if pp == 1:
        return [("1f1b", 1)]
    return [(name, 2 if name.startswith("interleaved") else 1) for name in SCHEDULES]


def _with_batch(parallel: Parallel, config: Config, wanted: int) -> Config:
    """A batch of at least `wanted` micro-batches a replica, as few as the schedule allows."""
    accumulation = next(
        count
        for count in range(wanted, MOST_ACCUMULATION)
        if parallel.pp == 1 or is_legal(parallel.schedule, parallel.pp, count)
    )
    micro_batch = min(config.batch.micro_batch, 2)
    replicas = parallel.dp_replicate * parallel.dp_shard
    batch = Batch(
        global_batch=accumulation * micro_batch * replicas,
        micro_batch=micro_batch,
        sequence_length=config.batch.sequence_length,
    )
    chunks = chunks_of(parallel.schedule, parallel.chunks) if parallel.pp > 1 else 1
    return replace(config, parallel=replace(parallel, chunks=chunks), batch=batch)
