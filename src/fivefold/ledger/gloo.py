"""What gloo's own collectives send, as programs, and how long they take: for the ledger and for `comm bench` alike.

Gloo knows no hosts: its rings go through the ranks in order, so two messages of a round cross a host's port, one in and
one out. Its reduce-scatter takes as long as its all-reduce on a slow link, and up to 1.35 times as long inside a host
(docs/shared-memory.md); it is priced as one.
"""

from functools import lru_cache

from fivefold.ledger.programs import catalogue
from fivefold.ledger.programs.catalogue import Setting
from fivefold.ledger.programs.steps import Fabric, Link, Load, loaded_seconds, loads

GLOO_PROGRAMS = {
    "all_reduce": ("all_reduce", "ring"),
    "all_gather": ("all_gather", "ring"),
    "reduce_scatter": ("all_reduce", "ring"),
    "all_to_all": ("all_to_all", "pairwise"),
    "broadcast": ("broadcast", "binomial"),
}
"""Primitive → the primitive and name of the program that is gloo's."""


def seconds(primitive: str, size: float, ranks: int, on: Link | Fabric) -> float:
    """Time of gloo's collective on `size` bytes, as the ledger counts them, over `ranks` ranks in the hosts' order."""
    local, shared = (0, False) if isinstance(on, Link) else (on.local, on.shared)
    parts, rounds = _shape(primitive, ranks, local, shared)
    return loaded_seconds(dict(rounds), size / parts, on)


@lru_cache(maxsize=1024)
def _shape(primitive: str, ranks: int, local: int, shared: bool) -> tuple[int, tuple[tuple[Load, int], ...]]:
    """Into how many chunks the bytes are cut, and how many rounds load the links how much."""
    made = catalogue.program(*GLOO_PROGRAMS[primitive], Setting(ranks))
    return made.parts, tuple(loads(made, local, shared).items())
