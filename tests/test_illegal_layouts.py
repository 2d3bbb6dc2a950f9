"""Combinations of axes that cannot be are refused, with what is legal beside them, and that is taken."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from fivefold.config.errors import ConfigError
from fivefold.config.load import load
from fivefold.spec.legal import check_trainable, resolve_config


class Illegal(NamedTuple):
    """Overrides, words of the one line that refuses them, and overrides beside them that are legal."""

    sets: str
    says: tuple[str, ...]
    legal: tuple[str, ...]
    preset: str = "quickstart"


MOE = "quickstart-moe"
CASES = [
    Illegal("tp=3", ("tp = 3", "8 heads", "nearest legal: 2 or 4"), ("tp=2", "tp=4")),
    Illegal("tp=16", ("tp = 16", "nearest legal: 8"), ("tp=8",)),
    Illegal("tp=1 sequence_parallel=true", ("but tp = 1",), ("tp=2 sequence_parallel=true",)),
    Illegal(
        "cp=3 context=ulysses",
        ("cp = 3", "nearest legal: 2 or 4"),
        ("cp=2 context=ulysses", "cp=3 context=ring"),
    ),
    Illegal("cp=16 context=ulysses", ("cp = 16", "nearest legal: 8"), ("cp=8 context=ulysses",)),
    Illegal(
        "tp=4 cp=4 context=ulysses",
        ("cp = 4", "2 heads on each of tp 4 ranks", "nearest legal: 2"),
        ("tp=4 cp=2 context=ulysses", "tp=4 cp=4 context=ring"),
    ),
    Illegal("cp=512", ("cp = 512", "at most batch.sequence_length = 256"), ("cp=256",)),
    Illegal("zero=1", ("zero = 1", "nothing to split over"), ("dp_shard=2 zero=1", "cp=2 zero=1")),
    Illegal("dp_replicate=2 zero=3", ("zero = 3", "dp_shard ≥ 2"), ("dp_replicate=2 dp_shard=2 zero=3",)),
    Illegal("tp=2 pp=2 zero=2", ("zero = 2", "nothing to split over"), ("tp=2 pp=2 dp_shard=2 zero=2",)),
    Illegal("dp_shard=2 zero=1 ep=2", ("ep = 2", "no experts", "ep = 1"), ("dp_shard=2 zero=1",)),
    Illegal("dp_shard=4 zero=1 ep=3", ("ep = 3", "nearest legal: 2 or 4"), ("dp_shard=4 zero=1 ep=4",), MOE),
    Illegal("dp_replicate=2 ep=2", ("ep = 2", "dp_shard × cp = 1"), ("dp_shard=2 zero=1 ep=2",), MOE),
    Illegal("tp=2 ep=2", ("ep = 2", "dp_shard × cp = 1"), ("tp=2 cp=2 ep=2",), MOE),
    Illegal(
        "dp_shard=16 zero=1 ep=16",
        ("ep = 16", "8 experts", "nearest legal: 8"),
        ("dp_shard=16 zero=1 ep=8",),
        MOE,
    ),
    Illegal("pp=7", ("pp × chunks = 7 × 1", "at most 6"), ("pp=6",)),
    Illegal("pp=4 schedule=zbv", ("4 × 2", "at most 6"), ("pp=3 schedule=zbv",)),
    Illegal("pp=1 chunks=2", ("chunks = 2", "pp = 1"), ("pp=1 chunks=1",)),
    Illegal("pp=2 chunks=2", ("chunks = 2", "schedule 1f1b has 1"), ("pp=2 chunks=2 schedule=interleaved",)),
    Illegal(
        "dp_replicate=2 tp=2 compression=powersgd zero=1",
        ("zero = 1",),
        ("dp_replicate=2 tp=2 compression=powersgd zero=0",),
    ),
    Illegal(
        "dp_shard=2 zero=1 algorithm=double-tree",
        ("double-tree with zero = 1", "no reduce-scatter", "ring or halving-doubling"),
        ("dp_shard=2 zero=1 algorithm=halving-doubling", "dp_replicate=2 algorithm=double-tree"),
    ),
    Illegal(
        "tp=2 algorithm=ring", ("there is one", "dp_replicate ≥ 2"), ("tp=2 dp_replicate=2 algorithm=ring",)
    ),
    Illegal(
        "dp_replicate=2 algorithm=ring compression=int8",
        ("collectives of their own", "compression = none"),
        ("dp_replicate=2 algorithm=ring", "dp_replicate=2 compression=int8"),
    ),
    Illegal(
        "pp=2 dp_replicate=2 compression=int8", ("tied", "pp = 2"), ("pp=1 dp_replicate=2 compression=int8",)
    ),
]


def resolved(preset: str, sets: str) -> None:
    degrees = {"dp_replicate": "1", "dp_shard": "1"} | dict(word.split("=") for word in sets.split())
    overrides = [f"parallel.{key}={value}" for key, value in degrees.items()]
    check_trainable(resolve_config(load(preset, [*overrides, "batch.global_batch=256"])))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.preset} {case.sets}")
def test_refused_with_legal_neighbours(case: Illegal) -> None:
    with pytest.raises(ConfigError) as refusal:
        resolved(case.preset, case.sets)
    line = str(refusal.value)
    assert "\n" not in line
    assert all(words in line for words in case.says), line
    for sets in case.legal:
        resolved(case.preset, sets)


SCHEDULES = [("interleaved", 5, "4 or 6"), ("dualpipev", 3, "4"), ("zb_h1", 7, "6 or 8")]


@pytest.mark.parametrize(("schedule", "micro_batches", "nearest"), SCHEDULES)
def test_schedules_refuse_micro_batches(schedule: str, micro_batches: int, nearest: str) -> None:
    """The neighbours named are taken."""
    chunks = 2 if schedule == "interleaved" else 1
    parallel = ["pp=2", "dp_replicate=1", f"schedule={schedule}", f"chunks={chunks}"]
    overrides = [*(f"parallel.{each}" for each in parallel), "batch.micro_batch=1"]
    with pytest.raises(ConfigError, match=f"nearest legal: {nearest}$"):
        resolve_config(load("quickstart", [*overrides, f"batch.global_batch={micro_batches}"]))
    for legal in nearest.split(" or "):
        resolve_config(load("quickstart", [*overrides, f"batch.global_batch={legal}"]))
