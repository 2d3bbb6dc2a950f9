"""Pipeline schedules as data: for every rank, the ordered list of what it computes.

The lists are those of `torch.distributed.pipelining` (2.13), so that what the planner simulates is what the
trainer runs; a test compares them action by action. Sources: GPipe (Huang 2019), 1F1B (Narayanan 2019),
interleaved 1F1B (Narayanan 2021), zero bubble ZB-H1 and ZB-V (Qi 2023, 2024), DualPipeV (DeepSeek, 2025).
"""

from collections.abc import Iterator
from enum import IntEnum
from itertools import chain, count
from typing import Literal, NamedTuple

Name = Literal["gpipe", "1f1b", "interleaved", "zb_h1", "interleaved_zb", "zbv", "dualpipev"]

SPLITS_BACKWARD: frozenset[Name] = frozenset({"zb_h1", "interleaved_zb", "zbv", "dualpipev"})
V_SHAPED: frozenset[Name] = frozenset({"zbv", "dualpipev"})
IN_ROUNDS: frozenset[Name] = frozenset({"interleaved", "zb_h1", "interleaved_zb"})


class Kind(IntEnum):
    """What one action computes for one micro-batch on one stage."""

    FORWARD = 0
    INPUT_GRAD = 1
    WEIGHT_GRAD = 2
    BACKWARD = 3  # both gradients at once


class Action(NamedTuple):
    """One piece of work of one rank; `stage` counts over the whole model, 0 … ranks·chunks − 1.

    `joined` to the next action (DualPipeV's overlapped pairs): the two run as one, and their results leave
    together when both are done.
    """

    kind: Kind
    stage: int
    microbatch: int
    joined: bool = False


Entry = tuple[Kind, int, int, bool]
"""An action as a plain tuple, in a fifth of the time: searches make millions."""


def chunks_of(name: Name, chunks: int) -> int:
    """Stages per rank: the schedule's own number where it has one (1, or 2 for the V shapes)."""
    if name in V_SHAPED:
        return 2
    return chunks if name in ("interleaved", "interleaved_zb") else 1


def rank_of_stage(name: Name, stage: int, ranks: int) -> int:
    """The pipeline rank that holds a stage: round robin, or down and up again for the V shapes."""
    if name in V_SHAPED and stage >= ranks:
        return 2 * ranks - 1 - stage
    return stage % ranks


def stages_of_rank(name: Name, rank: int, ranks: int, chunks: int) -> tuple[int, ...]:
    """The stages one rank holds, in the order of the model."""
    if name in V_SHAPED:
        return (rank, 2 * ranks - 1 - rank)
    return tuple(range(rank, ranks * chunks_of(name, chunks), ranks))


def is_legal(name: Name, ranks: int, microbatches: int) -> bool:
    """Whether the schedule exists for that number of micro-batches.

    Interleaved and zero-bubble schedules work in rounds of equal size, m divisible by max(1, m // ranks);
    DualPipeV fills both directions, m ≥ 2·ranks. The rest accept every m (1F1B with m < ranks is GPipe).
    """
    if microbatches < 1:
        return False
    if name in IN_ROUNDS:
        return microbatches % max(1, microbatches // ranks) == 0
    return name != "dualpipev" or microbatches >= 2 * ranks


def are_legal(name: Name, ranks: int, counts: range) -> bool:
    """`is_legal` of every number of micro-batches of an ascending range. From ranks² on rounds are equal where ranks
    divide the number, so two such numbers stand for all of them."""
    few = max(0, -(-(ranks * ranks - counts.start) // counts.step)) if counts else 0
    return all(is_legal(name, ranks, count) for count in counts[: few + 2])


def nearest_legal(name: Name, ranks: int, microbatches: int) -> tuple[int, ...]:
    """The legal numbers of micro-batches next below and next above (itself alone when legal)."""
    if is_legal(name, ranks, microbatches):
        return (microbatches,)
    below = next((m for m in range(microbatches - 1, 0, -1) if is_legal(name, ranks, m)), None)
    above = microbatches + 1
    while not is_legal(name, ranks, above):
        above += 1
    return (above,) if below is None else (below, above)


def actions(name: Name, ranks: int, microbatches: int, chunks: int = 1) -> list[list[Action]]:
    """The ordered work of every rank. Raises ValueError with the nearest legal values."""
    return [list(map(Action._make, own)) for own in entries(name, ranks, microbatches, chunks)]


def entries(name: Name, ranks: int, microbatches: int, chunks: int = 1) -> list[list[Entry]]:
    """As `actions`."""
    if not is_legal(name, ranks, microbatches):
        legal = " or ".join(str(m) for m in nearest_legal(name, ranks, microbatches))
        raise ValueError(
            f"schedule {name} on {ranks} pipeline ranks cannot run {microbatches} micro-batches; "
            f"nearest legal: {legal}"
        )
    return [rank_entries(name, rank, ranks, microbatches, chunks) for rank in range(ranks)]


def rank_entries(name: Name, rank: int, ranks: int, microbatches: int, chunks: int) -> list[Entry]:
    """The ordered work of one rank (of a legal number of micro-batches)."""
    if name == "gpipe":
        kinds = (Kind.FORWARD, Kind.BACKWARD)
        return [(kind, rank, m, False) for kind in kinds for m in range(microbatches)]
    if name == "1f1b":
        return _one_f_one_b(rank, ranks, microbatches)
    if name in IN_ROUNDS:
        return _in_rounds(rank, ranks, microbatches, chunks_of(name, chunks), name != "interleaved")
    if name == "zbv":
        return _zbv(rank, ranks, microbatches)
    return _dualpipev(rank, ranks, microbatches)


def _one_f_one_b(rank: int, ranks: int, microbatches: int) -> list[Entry]:
    """Warm up with as many forwards as ranks follow, then alternate, then drain."""
    warmup = min(ranks - 1 - rank, microbatches)
    forwards: list[Entry] = [(Kind.FORWARD, rank, m, False) for m in range(microbatches)]
    backwards: list[Entry] = [(Kind.BACKWARD, rank, m, False) for m in range(microbatches)]
    alternating = _in_turns(forwards[warmup:], backwards)
    return [*forwards[:warmup], *alternating, *backwards[microbatches - warmup :]]


def _in_rounds(rank: int, ranks: int, microbatches: int, chunks: int, split: bool) -> list[Entry]:
    """Interleaved 1F1B and, with the backward split, ZB-H1 (one chunk) and interleaved zero bubble.

    Chunks take turns every `per_round` micro-batches. With the split, a rank's weight gradients lag its input
    gradients by `rank` actions: that lag fills the bubble.
    """
    per_round = microbatches // max(1, microbatches // ranks)
    total = microbatches * chunks
    hop = 1 if split else 2  # forwards in flight per hop to the last rank
    warmup = min((chunks - 1) * per_round + hop * (ranks - 1 - rank), total)
    places = [
        (chunk * ranks + rank, m)
        for first in range(0, microbatches, per_round)
        for chunk in range(chunks)
        for m in range(first, first + per_round)
    ]  # (stage, micro-batch) of forwards in order; backward takes the chunks from the last
    top = (chunks - 1) * ranks + 2 * rank
    kind = Kind.INPUT_GRAD if split else Kind.BACKWARD
    forwards: list[Entry] = [(Kind.FORWARD, stage, m, False) for stage, m in places]
    backwards: list[Entry] = [(kind, top - stage, m, False) for stage, m in places]
    rest = total - warmup
    if not split:
        return [*forwards[:warmup], *_in_turns(forwards[warmup:], backwards), *backwards[rest:]]
    weights: list[Entry] = [(Kind.WEIGHT_GRAD, top - stage, m, False) for stage, m in places]
    lag = min(rank, total)
    alone, late = min(rest, lag), max(rest, lag)
    return [
        *forwards[:warmup],
        *_in_turns(forwards[warmup : warmup + alone], backwards),
        *backwards[alone:lag],
        *_in_turns(forwards[warmup + lag :], backwards[lag:], weights),
        *_in_turns(backwards[late:], weights[late - lag :]),
        *weights[total - lag :],
    ]


def _in_turns(*lists: list[Entry]) -> Iterator[Entry]:
    """One entry of each list in turn, as long as every list has one."""
    return chain.from_iterable(zip(*lists, strict=False))


def _zbv(rank: int, ranks: int, microbatches: int) -> list[Entry]:
    """ZB-V: two chunks down and up the ranks; written for m ≥ 2·ranks − 1 and cut to fewer."""
    down, up = rank, 2 * ranks - 1 - rank
    steps = max(2 * ranks - 1, microbatches)
    f, b, w = ([(kind, down), (kind, up)] for kind in (Kind.FORWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD))
    behind = ranks - rank
    plan = [f[0]] * (2 * behind - 1) + [f[1], f[0]] * rank + [f[1], b[1], w[1]] * behind
    started = 2 * behind - 1 + rank  # forwards down so far
    plan += [f[0], b[0], w[0], f[1], b[1], w[1]] * (steps - started)
    plan += [b[0], w[0], f[1], b[1], w[1]] * (started - ranks)
    plan += [b[0], b[1]] * rank + [b[0], w[0]] * behind + [w[1]] * rank + [w[0]] * rank
    numbers = {item: count() for item in (*f, *b, *w)}
    work = [(*item, next(numbers[item]), False) for item in plan]
    return work if steps == microbatches else [entry for entry in work if entry[2] < microbatches]


def _dualpipev(rank: int, ranks: int, microbatches: int) -> list[Entry]:
    """DualPipeV's eight steps; its overlapped pairs are listed forward first, joined to the backward."""
    down, up = rank, 2 * ranks - 1 - rank
    done = {(kind, stage): 0 for kind in (0, 1) for stage in (down, up)}
    work: list[Entry] = []
    pending: list[Entry] = []  # weight gradients whose input gradient is done
    behind = ranks - rank - 1

    def forward(stage: int, joined: bool = False) -> None:
        m = done[0, stage]
        done[0, stage] = m + 1
        work.append((Kind.FORWARD, stage, m, joined))

    def backward(stage: int, split: bool = False) -> None:
        m = done[1, stage]
        done[1, stage] = m + 1
        work.append((Kind.INPUT_GRAD if split else Kind.BACKWARD, stage, m, False))
        if split:
            pending.append((Kind.WEIGHT_GRAD, stage, m, False))

    def weight() -> None:
        if pending:
            work.append(pending.pop(0))

    for _ in range(2 * behind):
        forward(down)
    for _ in range(rank + 1):
        forward(down)
        forward(up)
    for _ in range(behind):
        backward(up, split=True)
        weight()
        forward(up)
    for i in range(microbatches - 2 * ranks + rank + 1):
        forward(down, joined=i > 0 or behind > 0)
        backward(up)
        forward(up, joined=True)
        backward(down)
    for _ in range(behind):
        backward(up)
        forward(up, joined=True)
        backward(down)
    half = (rank + 1) // 2
    for i in range(rank + 1):  # the second half uses zero bubble
        backward(up, split=i > half or (i == half and rank % 2 == 1))
        backward(down, split=i >= half)
    for _ in range(behind):
        weight()
        backward(down, split=True)
    for _ in range(rank + 1):
        weight()
    return work
