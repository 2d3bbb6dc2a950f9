"""What a pipeline sends in a step equals the ledger's rows, to the byte, on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from fivefold.collectives.record import Row
from fivefold.config.model import Experts
from fivefold.config.tree import Config
from fivefold.ledger.total import traffic_of
from fivefold.planner.jobs import job_of
from fivefold.spec.legal import resolve_config
from ranks import Ranks
from toy import MODEL, toy_config, train_on_ranks

DEEP = replace(MODEL, layers=4)
TIED = replace(DEEP, tied=True, positions="learned", max_positions=16)
MOE = replace(DEEP, experts=Experts(count=4, top_k=2, ffn=16, router_bias=True))

LAYOUTS: list[dict[str, Any]] = [
    {"pp": 2, "schedule": "gpipe"},
    {"pp": 2, "schedule": "interleaved", "chunks": 2, "recompute": "full"},
    {"pp": 4, "schedule": "1f1b"},
    {"pp": 2, "schedule": "zbv", "dp_replicate": 2},
    {"pp": 2, "schedule": "1f1b", "dp_shard": 2, "zero": 1},
    {"pp": 2, "schedule": "dualpipev", "dp_shard": 2, "zero": 2},
    {"pp": 2, "schedule": "interleaved_zb", "chunks": 2, "dp_shard": 2, "zero": 3},
    {"pp": 4, "schedule": "zb_h1"},
]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4, backend=None) as started:
        yield started


Rows = dict[tuple[str, str, str], tuple[int, int]]


def predicted_rows(config: Config, pp_rank: int) -> Rows:
    """Count and bytes by axis, primitive and phase (dense parameters and experts are one)."""
    found: Rows = {}
    for row in traffic_of(job_of(config), pp_rank):
        key = row.axis, row.primitive, row.phase
        count, size = found.get(key, (0, 0))
        found[key] = count + row.times, size + round(row.bytes_per_rank)
    return {key: row for key, row in found.items() if row[0]}


def measured_rows(rows: list[Row]) -> Rows:
    """The same of what was recorded. A message counts where it is sent."""
    return {
        (r.axis, r.primitive, r.phase): (r.count, r.bytes_per_rank) for r in rows if r.primitive != "recv"
    }


@pytest.mark.parametrize("name", ["tied", "experts"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(map(str, layout.values())))
def test_recorded_rows_equal_the_ledgers(ranks: Ranks, layout: dict[str, Any], name: str) -> None:
    dtype = "bf16" if layout["pp"] == 4 else "float32"
    config = toy_config(global_batch=16, steps=2, dtype=dtype, **layout)
    config = replace(config, model={"tied": TIED, "experts": MOE}[name])
    mesh = resolve_config(config).mesh
    found = ranks.run(train_on_ranks, config, world_size=mesh.world_size)
    for rank, results in enumerate(found):
        predicted = predicted_rows(config, mesh.coordinates(rank)["pp"])
        for step, rows in enumerate(results["rows"], start=1):
            assert measured_rows(rows) == predicted, f"rank {rank}, step {step}"


def test_every_boundary_is_crossed_once_by_each_micro_batch_in_each_direction(ranks: Ranks) -> None:
    """Also in the first step: shapes are known, so nothing is exchanged to learn them and nothing computed twice."""
    config = toy_config(global_batch=6, steps=1, pp=3, schedule="1f1b")
    config = replace(config, model=DEEP)
    sent = [
        {(row.primitive, row.phase): row.count for row in found["rows"][0] if row.axis == "pp"}
        for found in ranks.run(train_on_ranks, config, world_size=3)
    ]
    down, up = (
        {("send", "forward"): 6, ("recv", "backward"): 6},
        {("recv", "forward"): 6, ("send", "backward"): 6},
    )
    assert sent == [down, down | up, up]
