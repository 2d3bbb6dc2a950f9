"""Context parallel trains what one process trains, with every zero stage, recomputation and experts, and sends
what the ledger says."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from fivefold.config.tree import Config
from fivefold.ledger.total import estimate
from fivefold.planner.jobs import job_of
from fivefold.spec.legal import resolve_config
from ranks import Ranks
from test_parity import check, check_replicas
from toy import SEQUENCE, reference, toy_config, train_on_ranks


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4, backend=None) as started:
        yield started


Account = dict[tuple[str, str, str], tuple[int, int]]
"""(axis, primitive, phase) → (calls, bytes)"""


def predicted(config: Config) -> Account:
    """The ledger of one step; experts in perfect balance, as they are on average over the ranks that share them."""
    found: Account = {}
    for row in estimate(dataclasses.replace(job_of(config), imbalance=1.0)).traffic:
        key = (row.axis, row.primitive, row.phase)
        calls, size = found.get(key, (0, 0))
        found[key] = calls + row.times, size + round(row.bytes_per_rank)
    return found


def measured(results: list[dict[str, Any]], step: int) -> list[Account]:
    """Of every rank; but the bytes of expert parallel depend on routing, so of these each has the mean."""
    found: list[Account] = [
        {
            (row.axis, row.primitive, row.phase): (row.count, row.bytes_per_rank)
            for row in result["rows"][step]
            if row.primitive != "recv"  # the sender counts
        }
        for result in results
    ]
    for key in [key for key in found[0] if key[0] == "ep"]:
        total = sum(account[key][1] for account in found)
        assert total % len(found) == 0
        for account in found:
            account[key] = account[key][0], total // len(found)
    return found


def train(ranks: Ranks, config: Config) -> dict[str, Any]:
    results = ranks.run(train_on_ranks, config, world_size=resolve_config(config).mesh.world_size)
    check_replicas(results)
    for step in range(config.run.steps):
        for number, account in enumerate(measured(results, step)):
            assert account == predicted(config), f"rank {number}, step {step}"
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
    {"cp": 3, "recompute": "elementwise", "sequence": 11},
    {"cp": 4, "zero": 1, "sequence": 9},
    {"cp": 2, "context": "ulysses", "sequence": 11},
    {"cp": 2, "recompute": "attention"},
    {"cp": 2, "context": "ulysses", "recompute": "attention", "zero": 1},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layouts_equal_one_process(ranks: Ranks, layout: dict[str, Any]) -> None:
    """Packed documents, KV heads shared by queries, labels masked very unevenly, accumulation."""
    layout = {"steps": 3, "dp_shard": 1, "global_batch": 8} | layout
    length = layout.pop("sequence", SEQUENCE)
    config = toy_config(**layout)
    config = replace(config, batch=replace(config.batch, sequence_length=length))
    check(train(ranks, config), reference(config), 1e-12)


@pytest.mark.parametrize("context", ["ring", "ulysses"])
def test_learned_positions_are_those_in_the_sequence(ranks: Ranks, context: str) -> None:
    config = toy_config(steps=2, dp_shard=1, global_batch=4, cp=2, context=context)
    model = replace(config.model, positions="learned", max_positions=16, tied=True, norm="layernorm")
    config = replace(config, model=model)
    check(train(ranks, config), reference(config), 1e-12)
