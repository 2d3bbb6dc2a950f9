"""The layout table: how each parameter is distributed over the axes (pattern → axis → split, or owned by experts).

Used by the trainer, checkpoints, the planner and verify. An axis that a row does not name replicates the parameter.
Two axes treat all parameters alike and have no rows: pp assigns layers to stages (`spec.stages`), and ZeRO shards
rows (dim 0) over dp_shard × cp, unevenly if they do not divide.
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from fivefold.config.model import Model

Axis = Literal["pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"]
Unit = Literal["heads", "KV heads", "columns", "vocabulary rows", "experts"]


@dataclass(frozen=True, slots=True)
class Split:
    """Tensor dim `dim` is split into equal runs of whole `unit`s, one per rank of the axis.

    Attributes:
        uneven: units that the ranks do not divide are allowed; the last runs are shorter or empty (the vocabulary).
        replicable: with more ranks than units, ranks / units ranks hold each unit (KV heads).
    """

    dim: int
    unit: Unit
    uneven: bool = False
    replicable: bool = False


@dataclass(frozen=True, slots=True)
class Owned:
    """Each rank of the axis holds whole `unit`s along `dim` that no other rank holds (experts)."""

    dim: int
    unit: Unit


Placement = Split | Owned
Row = tuple[str, dict[Axis, Placement]]

_DENSE: tuple[Row, ...] = (
    ("embedding.weight", {"tp": Split(0, "vocabulary rows", uneven=True)}),
    ("head.weight", {"tp": Split(0, "vocabulary rows", uneven=True)}),
    ("*.feed_forward.gate.*", {"tp": Split(0, "columns")}),
    ("*.feed_forward.up.*", {"tp": Split(0, "columns")}),
    ("*.feed_forward.down.weight", {"tp": Split(1, "columns")}),
)
_ATTENTION: tuple[Row, ...] = (
    ("*.attention.query.*", {"tp": Split(0, "heads")}),
    ("*.attention.key.*", {"tp": Split(0, "KV heads", replicable=True)}),
    ("*.attention.value.*", {"tp": Split(0, "KV heads", replicable=True)}),
    ("*.attention.output.weight", {"tp": Split(1, "heads")}),
)
_LATENT: tuple[Row, ...] = (
    ("*.attention.query.*", {"tp": Split(0, "heads")}),
    ("*.attention.query_up.*", {"tp": Split(0, "heads")}),
    ("*.attention.kv_up.*", {"tp": Split(0, "heads")}),
    ("*.attention.output.weight", {"tp": Split(1, "heads")}),
)
_EXPERTS: tuple[Row, ...] = (
    ("*.experts.gate.weight", {"ep": Owned(0, "experts"), "tp": Split(1, "columns")}),
    ("*.experts.up.weight", {"ep": Owned(0, "experts"), "tp": Split(1, "columns")}),
    ("*.experts.down.weight", {"ep": Owned(0, "experts"), "tp": Split(2, "columns")}),
    ("*.experts.shared.gate.*", {"tp": Split(0, "columns")}),
    ("*.experts.shared.up.*", {"tp": Split(0, "columns")}),
    ("*.experts.shared.down.weight", {"tp": Split(1, "columns")}),
)


def table(model: Model) -> tuple[Row, ...]:
    """The table of a model; the first pattern that matches a parameter's name applies."""
    attention = _LATENT if model.latent.kv_rank else _ATTENTION
    return attention + _DENSE + (_EXPERTS if model.experts.count else ())


def placements(model: Model, name: str) -> dict[Axis, Placement]:
    """The placement of the parameter `name` on each axis; an absent axis replicates it."""
    return next((axes for pattern, axes in table(model) if fnmatchcase(name, pattern)), {})


_COMPUTED_IN_PART: tuple[tuple[str, bool], ...] = (  # pattern; whether only with sequence parallel
    ("*.attention.*norm.*", False),  # of heads, or of what latent attention compresses to
    ("*.attention.*_down.*", False),
    ("*.attention.output.bias", False),
    ("*.down.bias", False),
    ("*.router.weight", False),
    ("*.shared_gate.weight", False),
    ("*norm.*", True),
    ("positions.weight", True),
)
"""Parameters that tp replicates, but of whose gradient each rank computes a part: those inside regions, and with
sequence parallel those between regions, where a rank sees only its run of tokens."""


def gradient_ranks(model: Model, name: str, tp: int, sequence_parallel: bool) -> int:
    """The number of neighbouring tp ranks that hold the same part of the parameter and each compute a part of its
    gradient, which must be summed over them. 1 if each rank computes all of it."""
    split = placements(model, name).get("tp")
    if split is not None:
        replicas = tp // model.kv_heads if isinstance(split, Split) and split.replicable else 1
        return max(1, replicas)
    in_part = next(
        (
            only_sp <= sequence_parallel
            for pattern, only_sp in _COMPUTED_IN_PART
            if fnmatchcase(name, pattern)
        ),
        False,
    )
    return tp if in_part else 1
