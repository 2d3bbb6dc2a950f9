"""What the programs of `parallel.algorithm` send, message by message, and how long they take. Twin of
parallel/synchronise.py."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

from fivefold.ledger.hardware import Measured
from fivefold.ledger.job import Job
from fivefold.ledger.network import Wires, fabric
from fivefold.ledger.programs import catalogue, steps
from fivefold.ledger.programs.catalogue import Setting
from fivefold.ledger.programs.steps import Fabric, Program
from fivefold.ledger.traffic import Row
from fivefold.spec.synchronisation import PROGRAMS, Algorithm, Collective

PIECE_BYTES = 1 << 20
"""A double tree's half of a vector is cut into about so large pieces, MOST_PIECES at most."""
MOST_PIECES = 16


def program_of(
    algorithm: Algorithm, collective: Collective, size: int, ranks: int, local: int = 1
) -> Program:
    """The program that runs a collective of `size` bytes over `ranks` ranks, `local` of them on each host."""
    return _program(algorithm, collective, ranks, local, min(MOST_PIECES, max(1, size // (2 * PIECE_BYTES))))


@lru_cache(maxsize=256)
def _program(algorithm: Algorithm, collective: Collective, ranks: int, local: int, pieces: int) -> Program:
    name = PROGRAMS[algorithm][collective]
    if name != "double-tree":
        pieces = 1
    return catalogue.program(collective, name, Setting(ranks, local, pieces))


@lru_cache(maxsize=1024)
def _messages(program: Program, place: int) -> list[tuple[int, ...]]:
    return steps.messages(program, place)


def sent(program: Program, place: int, elements: int) -> list[int]:
    """Elements of every message that rank `place` sends for a vector of `elements`; empty ones are not sent."""
    sizes = [stop - start for start, stop in pairwise(steps.bounds(elements, program.chunks))]
    lengths = [sum(sizes[chunk] for chunk in chunks) for chunks in _messages(program, place)]
    return [length for length in lengths if length]


def program_row(
    job: Job,
    axis: str,
    collective: Collective,
    phase: str,
    *,
    vectors: Sequence[tuple[int, int]],
    itemsize: int,
    group: tuple[int, int],
    place: int,
) -> Row:
    """The messages of a program; nothing hides them, since compute waits.

    Args:
        vectors: (elements, how often a step) of what is reduced or gathered, all ranks' parts together.
        group: (ranks a host, hosts).
        place: the rank in the group whose messages are counted; what ranks send may differ.
    """
    local, hosts = group
    on, count, size, seconds = _fabric(job, local), 0, 0, 0.0
    for elements, times in vectors:
        program = program_of(job.stack.algorithm, collective, elements * itemsize, local * hosts, local)
        lengths = sent(program, place, elements)
        count += times * len(lengths)
        size += times * sum(lengths) * itemsize
        seconds += times * _seconds(program, elements * itemsize, on)
    text = f"what {job.stack.algorithm} sends for its {collective.replace('_', '-')}s"
    link = "between nodes" if hosts > 1 else "inside node"
    return Row(
        axis, "send", phase, count, size, size, seconds, seconds, link, text, _message(job.wires, hosts > 1)
    )


@lru_cache(maxsize=4096)
def _seconds(program: Program, size: float, on: Fabric) -> float:
    return steps.seconds(program, size, on)


def _fabric(job: Job, local: int) -> Fabric:
    """The links as messages see them: measured ones where there are. On CPUs the ranks of a host share its port; what
    was measured between hosts, all ranks at once, is then each rank's part of it."""
    on = job.wires
    near, far = _message(on, between=False), _message(on, between=True)
    return fabric(near.link if near else on.inside, far.link if far else on.between, local, on.shared)


def _message(on: Wires, between: bool) -> Measured | None:
    """What was measured of messages inside a host, or between hosts."""
    sends = [item for item in reversed(on.measured) if item.primitive == "send"]
    return next((item for item in sends if (item.local == 1 if between else item.hosts == 1)), None)
