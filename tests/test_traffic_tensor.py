"""What tensor and sequence parallel send equals the ledger's rows, to the byte."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from fivefold.config.model import Experts
from fivefold.config.tree import Config
from fivefold.ledger.total import estimate
from fivefold.planner.jobs import job_of
from ranks import Ranks
from test_decoder import GPT2
from toy import MODEL, toy_config, train_on_ranks

ROUTED = Experts(count=4, top_k=2, ffn=12, shared_ffn=20, shared_gate=True, dense_layers=1)
BIASES: dict[str, Any] = {"qkv_bias": True, "output_bias": True, "qk_norm": True}

CASES: list[tuple[int, dict[str, Any], dict[str, Any]]] = [  # ranks, config, model
    (2, {"tp": 2, "global_batch": 6, "micro_batch": 2}, BIASES),
    (2, {"tp": 2, "global_batch": 6, "micro_batch": 2, "sequence_parallel": True, "dtype": "bf16"}, {}),
    (
        3,
        {"tp": 3, "sequence_parallel": True, "sequence": 7},
        {"heads": 6, "kv_heads": 3, "ffn": 42, "vocab": 53},
    ),
    (4, {"tp": 4, "recompute": "full"}, {"kv_heads": 1, "tied": True}),
    (4, {"tp": 4, "recompute": "elementwise", "sequence_parallel": True, "sequence": 7}, BIASES),
    (4, {"tp": 2, "sequence_parallel": True, "recompute": "attention", "zero": 3, "global_batch": 4}, GPT2),
    (4, {"tp": 2, "recompute": "full", "zero": 1, "global_batch": 4}, {"experts": ROUTED}),
    (
        4,
        {"tp": 2, "sequence_parallel": True, "recompute": "full", "zero": 2, "global_batch": 4},
        {"experts": ROUTED},
    ),
]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4, backend=None) as started:
        yield started


def predicted(config: Config) -> dict[tuple[str, str], tuple[int, int]]:
    count: Counter[tuple[str, str]] = Counter()
    size: Counter[tuple[str, str]] = Counter()
    for row in estimate(job_of(config)).traffic:
        if row.axis == "tp":
            count[row.primitive, row.phase] += row.times
            size[row.primitive, row.phase] += round(row.bytes_per_rank)
    return {key: (count[key], size[key]) for key in count}


@pytest.mark.parametrize(("world_size", "options", "change"), CASES)
def test_recorded_bytes_equal_the_ledger(
    ranks: Ranks, world_size: int, options: dict[str, Any], change: dict[str, Any]
) -> None:
    config = toy_config(**{"steps": 1, "global_batch": 2} | options)
    run = replace(config.run, ranks=world_size)
    config = replace(config, model=replace(MODEL, **change), run=run)
    found = ranks.run(train_on_ranks, config, world_size=world_size)[0]
    rows = {(r.primitive, r.phase): (r.count, r.bytes_per_rank) for r in found["rows"][0] if r.axis == "tp"}
    assert rows == predicted(config)
