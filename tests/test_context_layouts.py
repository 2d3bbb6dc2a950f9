"""Context parallel trains what one process trains, with every zero stage, recomputation and experts, and sends
what the ledger says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from fivefold.collectives.record import Row
from fivefold.config.tree import Config
from fivefold.ledger.total import estimate
from fivefold.planner.jobs import job_of
from fivefold.spec.legal import resolve_config
from ranks import Ranks
from test_experts import VARIANTS, with_experts
from test_parity import check, check_replicas
from toy import MODEL, reference, toy_config, train_on_ranks


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4, backend=None) as started:
        yield started


def expected_rows(config: Config) -> list[Row]:
    """The ledger's account of one step."""
    traffic = estimate(job_of(config)).traffic
    return sorted(
        Row(row.axis, row.primitive, row.phase, row.times, round(row.bytes_per_rank)) for row in traffic
    )


def measured(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row.primitive != "recv"]  # the sender counts


def train(ranks: Ranks, config: Config, traffic: bool = True) -> dict[str, Any]:
    results = ranks.run(train_on_ranks, config, world_size=resolve_config(config).mesh.world_size)
    check_replicas(results)
    if traffic:
        for number, result in enumerate(results):
            for rows in result["rows"]:
                assert measured(rows) == expected_rows(config), f"rank {number}"
    return results[0]


LAYOUTS: list[dict[str, Any]] = [
    {"cp": 2},
    {"cp": 2, "zero": 1},
    {"cp": 4, "zero": 2, "micro_batch": 2},
    {"cp": 2, "dp_shard": 2, "zero": 3},
    {"cp": 2, "dp_replicate": 2, "dp_shard": 1, "zero": 3, "context": "ulysses"},
    {"cp": 2, "dp_replicate": 2, "dp_shard": 1, "micro_batch": 2},
    {"cp": 2, "zero": 2, "context": "ulysses", "recompute": "elementwise"},
    {"cp": 2, "zero": 3, "recompute": "full"},
    {"cp": 3, "recompute": "elementwise"},
    {"cp": 2, "recompute": "attention"},
    {"cp": 2, "context": "ulysses", "recompute": "attention", "zero": 1},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layouts_equal_one_process(ranks: Ranks, layout: dict[str, Any]) -> None:
    """Packed documents, KV heads shared by queries, labels masked very unevenly, accumulation."""
    config = toy_config(**{"steps": 3, "dp_shard": 1, "global_batch": 8} | layout)
    check(train(ranks, config), reference(config), 1e-12)
