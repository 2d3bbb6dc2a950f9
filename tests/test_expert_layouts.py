"""Expert parallel trains what one process trains, with context parallel and every zero stage, and sends what the
ledger says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from fivefold.config.tree import Config
from fivefold.nn.experts import Experts
from fivefold.spec.legal import resolve_config
from fivefold.trainer.batches import held_out_share
from ranks import Ranks
from test_context_layouts import train
from test_experts import VARIANTS, with_experts
from test_parity import check
from toy import CPU, global_batch, reference, start_group, stepper_on, toy_config


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4, backend=None) as started:
        yield started


OPTIONS = VARIANTS | {"without auxiliary loss": replace(VARIANTS["softmax"], auxiliary_loss=0.0)}


def moe_config(name: str, **layout: Any) -> Config:
    config = toy_config(**{"steps": 2, "dp_shard": 1, "global_batch": 8} | layout)
    options = OPTIONS[name]
    if name != "biased":
        options = replace(options, count=4)
    return replace(config, model=with_experts(options))


QUICK: list[tuple[str, dict[str, Any]]] = [
    ("biased", {"cp": 2}),
    ("softmax", {"cp": 2, "ep": 2, "recompute": "full"}),
    ("shared", {"dp_shard": 2, "cp": 2, "ep": 4, "zero": 3}),
    ("softmax", {"dp_replicate": 2, "dp_shard": 2, "ep": 2, "zero": 3, "micro_batch": 2}),
    (
        "shared behind a gate",
        {"cp": 2, "tp": 2, "ep": 2, "zero": 3, "sequence_parallel": True, "recompute": "full"},
    ),
]
MORE: list[tuple[str, dict[str, Any]]] = [
    ("shared", {"cp": 2, "zero": 3, "recompute": "full", "micro_batch": 2}),
    ("softmax", {"cp": 3, "recompute": "elementwise", "global_batch": 4}),
    ("shared behind a gate", {"cp": 2, "ep": 2, "zero": 1}),
    ("softmax", {"dp_shard": 2, "ep": 2, "zero": 2, "recompute": "elementwise"}),
    ("without auxiliary loss", {"dp_shard": 4, "ep": 4, "zero": 2}),
    ("sigmoid, scaled", {"dp_shard": 4, "ep": 2, "zero": 3}),
    ("softmax", {"dp_shard": 4, "ep": 4, "zero": 1, "micro_batch": 2}),
    ("softmax", {"cp": 2, "ep": 2, "sequence": 11, "zero": 1}),
    ("softmax", {"dp_shard": 2, "cp": 2, "ep": 2, "zero": 2, "context": "ulysses"}),
    ("not renormalised", {"dp_shard": 4, "zero": 3}),
    ("shared", {"dp_shard": 2, "tp": 2, "ep": 2, "zero": 2}),
]
LAYOUTS = [*QUICK, *(pytest.param(*case, marks=pytest.mark.full) for case in MORE)]


@pytest.mark.parametrize(("name", "layout"), LAYOUTS, ids=str)
def test_layouts_equal_one_process(ranks: Ranks, name: str, layout: dict[str, Any]) -> None:
    """With and without the auxiliary loss, packed documents, unevenly masked tokens."""
    config = moe_config(name, **layout)
    check(train(ranks, config), reference(config), 1e-12)


def expert_load(rank: int, world_size: int, config: Config) -> list[float | None]:
    """Of two steps, the second with all tokens sent to one expert."""
    stepper = stepper_on(resolve_config(config, world_size), start_group())
    resolved = resolve_config(config, world_size)
    at = resolved.mesh.data_rank(rank)
    share = held_out_share(global_batch(config, 0), resolved.batch, at, CPU, resolved.spans(rank))
    found = [stepper.step(share, 0.0).expert_load]
    for module in stepper.model.module.modules():
        if isinstance(module, Experts):
            assert module.selection_bias is not None
            module.selection_bias[3] = 9.0
    return [*found, stepper.step(share, 0.0).expert_load]


def test_expert_load_is_that_of_the_whole_batch(ranks: Ranks) -> None:
    """top_k 2 of 4: the busiest expert, wanted by every token, gets twice the mean; no load at all does not hang."""
    options = replace(VARIANTS["biased"], count=4)
    config = replace(toy_config(dp_shard=2, cp=2, ep=4, zero=1, global_batch=4), model=with_experts(options))
    results = ranks.run(expert_load, config, timeout=300)
    assert all(result == results[0] for result in results)
    assert 1.0 < results[0][0] < 2.0
    assert results[0][1] == 2.0
