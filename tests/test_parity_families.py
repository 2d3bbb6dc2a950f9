"""Families other than Llama over the layouts: small biases and norms, a table of positions, uneven shards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from ranks import Ranks
from test_decoder import GPT2
from test_parity import check, run
from toy import MODEL, reference, toy_config

QWEN: dict[str, Any] = {"qkv_bias": True, "qk_norm": True}


@pytest.fixture(scope="module", params=[3])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(request.param, backend=None) as started:
        yield started


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("change", [GPT2, QWEN], ids=["gpt2", "qwen"])
def test_layouts_equal_one_process(ranks: Ranks, zero: int, change: dict[str, Any]) -> None:
    config = toy_config(zero=zero, global_batch=2 * ranks.world_size)
    config = replace(config, model=replace(MODEL, **change))
    found, expected = run(ranks, config), reference(config)
    check(found, expected, 1e-12)
