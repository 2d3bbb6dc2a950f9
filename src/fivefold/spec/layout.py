"""The layout table: parameter pattern → axis → split, replicate or owned.

Read by the trainer, the checkpoint, the planner and the verifier. An axis that a row does not name
replicates the parameter. Two axes have one rule for every parameter and no rows: pp gives each layer to a
stage (`spec.stages`), and dp_shard × cp splits rows (dim 0), unevenly where they do not divide, of what
`parallel.zero` names.
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from fivefold.config.model import Model

Axis = Literal["pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"]
Unit = Literal["heads", "KV heads", "columns", "vocabulary rows", "experts"]


@dataclass(frozen=True, slots=True)
class Split:
    """Tensor dim `dim` is cut into equal runs of whole `unit`s, one run a rank of the axis.

    Attributes:
        uneven: units that do not divide make the last runs shorter, or empty (the vocabulary), instead of refused.
        replicable: with more ranks than units each unit is held by ranks / units ranks (KV heads).
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
    """The rows that hold for a model's family; the first pattern that matches a parameter's name counts."""
    attention = _LATENT if model.latent.kv_rank else _ATTENTION
    return attention + _DENSE + (_EXPERTS if model.experts.count else ())


def placements(model: Model, name: str) -> dict[Axis, Placement]:
    """How each axis divides the parameter called `name`; an axis that is absent replicates it."""
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
"""Parameters that tp replicates and of whose gradient each of its ranks computes a part: those inside of regions, and
with sequence parallel those between them, where a rank sees only its run of tokens."""


def gradient_ranks(model: Model, name: str, tp: int, sequence_parallel: bool) -> int:
    """How many neighbouring ranks of tp hold the same part of the parameter and each compute a part of its gradient:
    their sum is the gradient. 1 where each rank computes all of it."""
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
