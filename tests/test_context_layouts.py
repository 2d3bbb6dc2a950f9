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
from test_parity import check, check_replicas, worst_by_kind
from toy import reference, toy_config, train_on_ranks


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4, backend=None) as started:
        yield started


Account = dict[tuple[str, str, str], tuple[int, float]]
"""(axis, primitive, phase) → (calls, bytes)"""


def predicted(config: Config) -> Account:
    """The ledger of one step; experts in perfect balance, as they are on average over the ranks that share them."""
    found: Account = {}
    for row in estimate(dataclasses.replace(job_of(config), imbalance=1.0)).traffic:
        key = (row.axis, row.primitive, row.phase)
        calls, size = found.get(key, (0, 0))
        found[key] = calls + row.times, size + row.bytes_per_rank
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
        for account in found:
            account[key] = account[key][0], total / len(found)
    return found


def train(ranks: Ranks, config: Config) -> dict[str, Any]:
    world_size = resolve_config(config).mesh.world_size
    results = ranks.run(train_on_ranks, config, world_size=world_size, timeout=300)
    check_replicas(results)
    expected = predicted(config)
    for step in range(config.run.steps):
        first, *others = measured(results, step)
        assert first.keys() == expected.keys()
        for key, (calls, size) in expected.items():
            assert first[key] == (calls, pytest.approx(size, rel=1e-12)), f"{key}, step {step}"
            for other in others:  # the first rank holds the most where a sequence or a shard is uneven
                assert other[key][0] == calls
                assert other[key][1] <= size * (1 + 1e-12)
    return results[0]


QUICK: list[dict[str, Any]] = [
    {"cp": 2, "zero": 1, "recompute": "attention"},
    {"cp": 2, "dp_shard": 2, "zero": 3, "recompute": "full"},
    {"cp": 2, "dp_replicate": 2, "zero": 2, "context": "ulysses", "recompute": "elementwise"},
    {"cp": 3, "recompute": "elementwise", "sequence": 11},
    {"cp": 2, "tp": 2, "zero": 2, "sequence_parallel": True, "sequence": 11},
]
MORE: list[dict[str, Any]] = [
    {"cp": 2},
    {"cp": 4, "zero": 2, "micro_batch": 2},
    {"cp": 4, "zero": 1, "sequence": 9},
    {"cp": 2, "dp_shard": 2, "zero": 3},
    {"cp": 2, "dp_replicate": 2, "zero": 3, "context": "ulysses"},
    {"cp": 2, "dp_replicate": 2, "micro_batch": 2},
    {"cp": 2, "zero": 3, "recompute": "full"},
    {"cp": 2, "context": "ulysses", "sequence": 11},
    {"cp": 2, "context": "ulysses", "recompute": "attention", "zero": 1},
    {"cp": 2, "tp": 2, "context": "ulysses"},
]
LAYOUTS = [*QUICK, *(pytest.param(layout, marks=pytest.mark.full) for layout in MORE)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layouts_equal_one_process(ranks: Ranks, layout: dict[str, Any]) -> None:
    """Packed documents, KV heads shared by queries, labels masked very unevenly, accumulation."""
    config = toy_config(**{"steps": 2, "dp_shard": 1, "global_batch": 8} | layout)
    check(train(ranks, config), reference(config), 1e-12)


@pytest.mark.parametrize("context", ["ring", "ulysses"])
def test_learned_positions_are_those_in_the_sequence(ranks: Ranks, context: str) -> None:
    config = toy_config(steps=2, dp_shard=1, global_batch=4, cp=2, context=context)
    model = replace(config.model, positions="learned", max_positions=16, tied=True, norm="layernorm")
    config = replace(config, model=model)
    check(train(ranks, config), reference(config), 1e-12)


@pytest.mark.full
def test_ulysses_in_half_precision_differs_no_more_than_a_permutation_does(ranks: Ranks) -> None:
    """At most 3 × what one process shows when the rows of its micro-batches change places."""
    alone = toy_config(dtype="bf16", global_batch=8, micro_batch=2)
    expected = ranks.run(train_on_ranks, alone, world_size=1, timeout=300)[0]
    others = [
        worst_by_kind(ranks.run(train_on_ranks, alone, seed, world_size=1, timeout=300)[0], expected)
        for seed in (1, 2, 3)
    ]
    for name, error in worst_by_kind(train(ranks, in_bf16("ulysses")), expected).items():
        assert error <= 3 * max(other[name] for other in others), f"{name}: {error:.1e}"


@pytest.mark.full
def test_the_ring_in_half_precision_is_as_close_to_float64_as_one_process(ranks: Ranks) -> None:
    """And no more than half of that farther. What changes when rows change places, the rule elsewhere, is less than
    rounding: the ring joins its pieces in float32, where one process rounds."""
    alone = toy_config(dtype="bf16", global_batch=8, micro_batch=2)
    exact = reference(replace(alone, precision=replace(alone.precision, dtype="float64")))
    rounding = worst_by_kind(ranks.run(train_on_ranks, alone, world_size=1, timeout=300)[0], exact)
    for name, error in worst_by_kind(train(ranks, in_bf16("ring")), exact).items():
        assert error <= 1.5 * rounding[name], f"{name}: {error:.1e}"


def in_bf16(context: str) -> Config:
    return toy_config(dtype="bf16", global_batch=8, micro_batch=2, dp_shard=1, cp=2, zero=1, context=context)


def test_dropout_is_that_of_the_whole_sequence(ranks: Ranks) -> None:
    config = toy_config(steps=2, dp_shard=1, global_batch=4, cp=2, zero=1)
    config = replace(config, model=replace(config.model, dropout=0.2))
    check(train(ranks, config), reference(config), 1e-12)
