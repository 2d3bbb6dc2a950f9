"""What a collective program is: rounds of simultaneous transfers of chunks, and its cost on a link.

A rank's vector is cut into `chunks` equal parts. In one round every transfer happens at once; a rank sends
and receives at the same time (full duplex) but its transfers in one direction share its link. So a round
costs α + β · (most bytes any rank sends or receives), and a program the sum of its rounds (α-β model;
Hockney 1994, Thakur 2005). `repeat` compresses rounds that differ only in who holds which chunk.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple


class Transfer(NamedTuple):
    """`source` sends one chunk to `target`, which adds it to its own (`reduce`) or overwrites."""

    source: int
    target: int
    chunk: int
    reduce: bool


class Program(NamedTuple):
    """A collective over `ranks` ranks: `rounds(i)` are the transfers of round i."""

    name: str
    ranks: int
    chunks: int
    length: int
    rounds: Callable[[int], Sequence[Transfer]]
    uniform: bool = False  # every round loads the busiest link alike: round 0 stands for all

    def __iter__(self) -> Iterator[Sequence[Transfer]]:  # type: ignore[override]
        return (self.rounds(index) for index in range(self.length))


class Link(NamedTuple):
    """Seconds a message costs, and bytes/s of one rank in one direction."""

    latency: float
    bandwidth: float


def busiest(round_: Sequence[Transfer]) -> int:
    """Most chunks that one rank sends, or receives, in a round."""
    sent = Counter(transfer.source for transfer in round_)
    received = Counter(transfer.target for transfer in round_)
    return max((*sent.values(), *received.values()), default=0)


def seconds(program: Program, size: float, link: Link) -> float:
    """Time of the program on a vector of `size` bytes, by its own rounds."""
    chunk = size / program.chunks / link.bandwidth
    if program.uniform:
        return program.length * (link.latency + busiest(program.rounds(0)) * chunk)
    return sum(link.latency + busiest(round_) * chunk for round_ in program)


def run(program: Program, values: Sequence[Sequence[float]]) -> list[list[float]]:
    """Carries the program out on lists (one number a chunk): for tests and drawings."""
    held = [list(own) for own in values]
    for round_ in program:
        sent = [(transfer, held[transfer.source][transfer.chunk]) for transfer in round_]
        for transfer, value in sent:
            own = held[transfer.target]
            own[transfer.chunk] = own[transfer.chunk] + value if transfer.reduce else value
    return held
