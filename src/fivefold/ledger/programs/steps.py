"""What a collective program is: rounds of simultaneous transfers of chunks. Its cost, drawing and execution derive.

The data of a collective is cut into chunks, as equal as possible. In one round every transfer happens at once; a
rank sends and receives at the same time (full duplex) but its transfers in one direction share its link. So a
round costs α + β · (most bytes any rank sends or receives), and a program the sum of its rounds (α-β model;
Hockney 1994, Thakur 2005).

What a rank starts with and must end with follows from the primitive (`starts`, `ends`). The chunks of an
all-to-all are numbered source · ranks + target; those of all others are parts of one vector, chunk r being rank
r's own in a reduce-scatter or all-gather.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple


class Transfer(NamedTuple):
    """`source` sends one chunk to `target`, which adds it to its own (`reduce`) or overwrites."""

    source: int
    target: int
    chunk: int
    reduce: bool


@dataclass(frozen=True, slots=True)
class Program:
    """A collective over `ranks` ranks: `rounds(i)` are the transfers of round i, each pair at most one message."""

    name: str
    primitive: str
    ranks: int
    chunks: int
    length: int
    rounds: Callable[[int], Sequence[Transfer]]
    uniform: bool = False  # every round has the same pairs and loads each alike: round 0 stands for all
    root: int = 0  # of a broadcast

    def __iter__(self) -> Iterator[Sequence[Transfer]]:
        return (self.rounds(index) for index in range(self.length))

    @property
    def parts(self) -> int:
        """Chunks that make up the bytes a collective is said to have (what one rank gives to an all-to-all)."""
        return self.ranks if self.primitive == "all_to_all" else self.chunks

    def starts(self, rank: int) -> range:
        """The chunks a rank holds at first."""
        if self.primitive == "all_gather":
            return range(rank, rank + 1)
        if self.primitive == "all_to_all":
            return range(rank * self.ranks, (rank + 1) * self.ranks)
        held = self.primitive != "broadcast" or rank == self.root
        return range(self.chunks if held else 0)

    def ends(self, rank: int) -> range:
        """The chunks a rank must hold at last, reduced over all ranks where the primitive reduces."""
        if self.primitive == "reduce_scatter":
            return range(rank, rank + 1)
        if self.primitive == "all_to_all":
            return range(rank, self.chunks, self.ranks)
        return range(self.chunks)


class Link(NamedTuple):
    """Seconds a message costs, and bytes/s of one rank in one direction; beyond `knee` bytes, at another rate
    (a message that no cache holds)."""

    latency: float
    bandwidth: float
    knee: float = inf
    far_bandwidth: float = inf

    def seconds(self, size: float) -> float:
        """Time of a message of `size` bytes."""
        near = self.latency + min(size, self.knee) / self.bandwidth
        return near + (size - self.knee) / self.far_bandwidth if size > self.knee else near


class Fabric(NamedTuple):
    """Hosts of `local` ranks each, consecutive: one link inside a host, another between hosts.

    `shared`: the ranks of a host share one port to the others; else each has its own.
    """

    inside: Link
    between: Link
    local: int
    shared: bool = False


def bounds(length: int, parts: int) -> list[int]:
    """Where `length` elements are cut into `parts`, as equal as possible: parts + 1 places."""
    return [length * part // parts for part in range(parts + 1)]


def messages(program: Program, rank: int) -> list[tuple[int, ...]]:
    """The chunks of each message that a rank sends: all for one target in a round go together."""
    found: list[tuple[int, ...]] = []
    for round_ in program:
        targets: dict[int, list[int]] = {}
        for transfer in round_:
            if transfer.source == rank:
                targets.setdefault(transfer.target, []).append(transfer.chunk)
        found += map(tuple, targets.values())
    return found


class Load(NamedTuple):
    """Most chunks that one rank sends, or receives, in a round: over its link inside the host, and to other hosts.
    Where the ranks of a host share its port, those of one host together."""

    inside: int
    between: int


def loads(program: Program, local: int = 0, shared: bool = False) -> Counter[Load]:
    """How many rounds load the links how much, `local` consecutive ranks on each host; 0 = all on one.

    A program's time on any links follows from it: `loaded_seconds`.
    """
    if program.uniform and program.length:
        return Counter({_load(program.rounds(0), local, shared): program.length})
    return Counter(_load(round_, local, shared) for round_ in program)


def loaded_seconds(rounds: Mapping[Load, int], chunk: float, on: Link | Fabric) -> float:
    """Time of rounds with chunks of `chunk` bytes. Links of both kinds work at once: a round lasts as long as the
    slower of the two."""
    near, far = (on, on) if isinstance(on, Link) else (on.inside, on.between)
    return sum(
        times
        * max((link.seconds(n * chunk) for n, link in zip(load, (near, far), strict=True) if n), default=0.0)
        for load, times in rounds.items()
    )


def seconds(program: Program, size: float, on: Link | Fabric) -> float:
    """Time of the program on `size` bytes, by its own rounds."""
    found = loads(program) if isinstance(on, Link) else loads(program, on.local, on.shared)
    return loaded_seconds(found, size / program.parts, on)


def _load(round_: Sequence[Transfer], local: int, shared: bool) -> Load:
    if not local:
        return Load(_most(round_), 0)
    crossing = [t for t in round_ if t.source // local != t.target // local]
    inside = [t for t in round_ if t.source // local == t.target // local]
    if shared:
        crossing = [t._replace(source=t.source // local, target=t.target // local) for t in crossing]
    return Load(_most(inside), _most(crossing))


def _most(transfers: Sequence[Transfer]) -> int:
    """Most chunks that one source sends, or one target receives."""
    sent = Counter(transfer.source for transfer in transfers)
    received = Counter(transfer.target for transfer in transfers)
    return max((*sent.values(), *received.values()), default=0)


def run(program: Program, values: Sequence[Sequence[float]]) -> list[dict[int, float]]:
    """Carries the program out on numbers, one a chunk: for drawings and tests.

    `values[rank]` are those of the chunks it starts with, in order; returned is what each rank holds at last.

    Raises:
        KeyError: a rank sends, or reduces into, a chunk it does not hold: the program is wrong.
    """
    held = [dict(zip(program.starts(rank), own, strict=True)) for rank, own in enumerate(values)]
    for round_ in program:
        step(held, round_)
    return held


def step(held: Sequence[dict[int, float]], round_: Sequence[Transfer]) -> None:
    """One round of `run`, in place: what is sent is what was held before the round."""
    sent = [(transfer, held[transfer.source][transfer.chunk]) for transfer in round_]
    for transfer, value in sent:
        own = held[transfer.target]
        own[transfer.chunk] = own[transfer.chunk] + value if transfer.reduce else value


def joined(name: str, primitive: str, first: Program, second: Program) -> Program:
    """One program after another on the same chunks."""

    def rounds(index: int) -> Sequence[Transfer]:
        return first.rounds(index) if index < first.length else second.rounds(index - first.length)

    uniform = first.uniform and second.uniform
    return replace(
        first,
        name=name,
        primitive=primitive,
        length=first.length + second.length,
        rounds=rounds,
        uniform=uniform,
        root=first.root,
    )


def backwards(name: str, gather: Program) -> Program:
    """The reduce-scatter that an all-gather becomes when time and every arrow are turned round.

    In an all-gather each rank receives each chunk once, along a tree; turned round, the chunk's sums flow up it.
    """

    def rounds(index: int) -> list[Transfer]:
        return [Transfer(t.target, t.source, t.chunk, True) for t in gather.rounds(gather.length - 1 - index)]

    return replace(gather, name=name, primitive="reduce_scatter", rounds=rounds)
