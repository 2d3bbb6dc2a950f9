"""The programs of each `parallel.algorithm`: one for every collective of data parallel that it supports."""

from collections.abc import Mapping
from typing import Literal

Algorithm = Literal[
    "backend", "ring", "halving-doubling", "recursive-doubling", "double-tree", "hierarchical"
]
Collective = Literal["all_reduce", "reduce_scatter", "all_gather"]

PROGRAMS: Mapping[Algorithm, Mapping[Collective, str]] = {
    "ring": {"all_reduce": "ring", "reduce_scatter": "ring", "all_gather": "ring"},
    "halving-doubling": {
        "all_reduce": "halving-doubling",
        "reduce_scatter": "halving",
        "all_gather": "doubling",
    },
    "recursive-doubling": {"all_reduce": "recursive-doubling"},
    "double-tree": {"all_reduce": "double-tree"},
    "hierarchical": {"all_reduce": "hierarchical"},
}
"""Programs by their names in `ledger.programs.catalogue`; "backend" has none."""


def serves(algorithm: Algorithm, zero: int) -> bool:
    """Whether the algorithm has the collectives of a ZeRO stage: all-reduce (0), else reduce-scatter and all-gather."""
    return algorithm == "backend" or zero == 0 or "reduce_scatter" in PROGRAMS[algorithm]


def can_sum(algorithm: Algorithm, method: str, zero: int, ranks: int, replicas: int, is_apart: bool) -> bool:
    """Whether gradients can be summed by the program or compressed by the method; `spec.legal` explains a refusal.

    Args:
        ranks: that hold a gradient before it is split, replicas: that hold the same shard of it.
        is_apart: whether two stages hold one tied parameter.
    """
    if algorithm != "backend" and (
        method != "none" or not serves(algorithm, zero) or (not zero and ranks == 1)
    ):
        return False
    if method == "none":
        return True
    return (replicas if zero else ranks) > 1 and not (zero and method == "powersgd") and not is_apart
