"""Every program by the primitive it serves and the name users give it."""

from collections.abc import Callable
from dataclasses import dataclass

from fivefold.config.errors import BadInput, did_you_mean
from fivefold.ledger.programs import broadcast, doubling, exchange, halving, hierarchical, ring, tree
from fivefold.ledger.programs.steps import Fabric, Link, Program


@dataclass(frozen=True, slots=True)
class Setting:
    """What a program is built for.

    Attributes:
        ranks: of the group.
        local: ranks a host; consecutive ranks share a host.
        pieces: into how many a double tree cuts each half of the vector.
        root: of a broadcast.
    """

    ranks: int
    local: int = 1
    pieces: int = 1
    root: int = 0


Factory = Callable[[Setting], Program]

PROGRAMS: dict[str, dict[str, Factory]] = {
    "all_reduce": {
        "ring": lambda s: ring.all_reduce(s.ranks),
        "halving-doubling": lambda s: halving.all_reduce(s.ranks),
        "recursive-doubling": lambda s: halving.doubling_all_reduce(s.ranks),
        "double-tree": lambda s: tree.all_reduce(s.ranks, s.pieces),
        "hierarchical": lambda s: hierarchical.all_reduce(s.ranks, s.local),
    },
    "all_gather": {
        "ring": lambda s: ring.all_gather(s.ranks),
        "doubling": lambda s: doubling.all_gather(s.ranks),
    },
    "reduce_scatter": {
        "ring": lambda s: ring.reduce_scatter(s.ranks),
        "halving": lambda s: doubling.reduce_scatter(s.ranks),
    },
    "all_to_all": {
        "pairwise": lambda s: exchange.pairwise(s.ranks),
        "two-hop": lambda s: exchange.two_hop(s.ranks, s.local),
    },
    "broadcast": {
        "binomial": lambda s: broadcast.binomial(s.ranks, s.root),
        "scatter-all-gather": lambda s: broadcast.scatter_all_gather(s.ranks, s.root),
    },
}
PRIMITIVES = tuple(PROGRAMS)
TWO_LEVEL = frozenset({"hierarchical", "two-hop"})


def algorithms(primitive: str) -> tuple[str, ...]:
    """The names of a primitive's programs."""
    return tuple(PROGRAMS[primitive])


def program(primitive: str, algorithm: str, setting: Setting) -> Program:
    """The program of that name.

    Raises:
        BadInput: no such primitive or algorithm, or hosts that the ranks do not fill.
    """
    if primitive not in PROGRAMS:
        raise BadInput(f'"{primitive}": unknown primitive; {did_you_mean(primitive, PROGRAMS)}')
    if algorithm not in PROGRAMS[primitive]:
        hint = did_you_mean(algorithm, PROGRAMS[primitive])
        raise BadInput(f'"{algorithm}": unknown algorithm for {primitive}; {hint}')
    if algorithm in TWO_LEVEL and setting.ranks % setting.local:
        raise BadInput(
            f"{algorithm}: {setting.ranks} ranks do not fill hosts of {setting.local}; "
            f"give a divisor of {setting.ranks}"
        )
    return PROGRAMS[primitive][algorithm](setting)


def best_pieces(ranks: int, size: float, on: Link | Fabric) -> int:
    """The pieces of a double tree for `size` bytes."""
    return tree.best_pieces(ranks, size, on if isinstance(on, Link) else on.between) if ranks > 1 else 1
