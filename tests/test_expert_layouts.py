"""Expert parallel trains what one process trains, with context parallel and every zero stage, and sends what the
ledger says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from fivefold.config.tree import Config
from ranks import Ranks
from test_context_layouts import train
from test_experts import VARIANTS, with_experts
from test_parity import check
from toy import reference, toy_config


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4, backend=None) as started:
        yield started


def moe_config(name: str, **layout: Any) -> Config:
    config = toy_config(**{"steps": 3, "dp_shard": 1, "global_batch": 8} | layout)
    options = VARIANTS[name]
    if name != "biased":
        options = replace(options, count=4)
    return replace(config, model=with_experts(options))


LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("biased", {"cp": 2}),
    ("shared", {"cp": 2, "zero": 3, "recompute": "full", "micro_batch": 2}),
    ("softmax", {"cp": 3, "recompute": "elementwise", "context": "ring", "global_batch": 4}),
    ("shared behind a gate", {"cp": 2, "ep": 2, "zero": 1}),
    ("softmax", {"cp": 2, "ep": 2, "recompute": "full"}),
    ("softmax", {"dp_shard": 2, "ep": 2, "zero": 2, "recompute": "elementwise"}),
    ("sigmoid, scaled", {"dp_shard": 4, "ep": 2, "zero": 3}),
    ("softmax", {"dp_shard": 4, "ep": 4, "zero": 1, "micro_batch": 2}),
    ("shared", {"dp_shard": 2, "cp": 2, "ep": 4, "zero": 3}),
    ("softmax", {"dp_shard": 2, "cp": 2, "ep": 2, "zero": 2, "context": "ulysses"}),
    ("softmax", {"dp_replicate": 2, "dp_shard": 2, "ep": 2, "zero": 3, "micro_batch": 2}),
    ("not renormalised", {"dp_shard": 4, "zero": 3}),
]


@pytest.mark.parametrize(("name", "layout"), LAYOUTS, ids=str)
def test_layouts_equal_one_process(ranks: Ranks, name: str, layout: dict[str, Any]) -> None:
    """With the auxiliary loss, packed documents, unevenly masked tokens."""
    config = moe_config(name, **layout)
    check(train(ranks, config), reference(config), 1e-12)
