"""Conversations, whose prompts no loss counts, in rows packed as the data room packs them: the same in every layout."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pytest
from msgspec.structs import replace

from fivefold.config.tree import Data
from fivefold.data.rows import Batch
from fivefold.data.samples import Samples
from fivefold.data.shards import prepare
from fivefold.nn.loss import IGNORED
from ranks import Ranks
from test_parity import check, check_replicas
from toy import MODEL, SEQUENCE, reference, toy_config, train_on_ranks

VOCAB = 280


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(3, backend=None) as started:
        yield started


@pytest.fixture(scope="module")
def batches(tmp_path_factory: pytest.TempPathFactory) -> list[Batch]:
    """Three batches of six rows."""
    place = tmp_path_factory.mktemp("conversations")
    random = np.random.default_rng(0)
    words = ["what is", "why", "tell me", "no", "yes it is", "a", "perhaps not", "because"]
    records = [
        {
            "prompt": " ".join(random.choice(words, random.integers(1, 4))),
            "response": " ".join(random.choice(words, random.integers(0, 3))),
        }
        for _ in range(60)
    ]
    (place / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    data = Data(path=str(place / "a.jsonl"), cache_dir=str(place / "cache"), answers_only=True)
    (store,) = prepare(data, VOCAB, lambda what, done: None)
    samples = Samples(store, data, SEQUENCE, 0)
    return [samples.batch(samples.sample_ids(6 * step, 6)) for step in range(3)]


def test_rows_are_masked_unevenly(batches: list[Batch]) -> None:
    counted = [int((row != IGNORED).sum()) for batch in batches for row in batch.labels]
    assert min(counted) < max(counted)
    assert all(int((batch.labels == IGNORED).sum()) > 6 for batch in batches)
    assert any(batch.documents.any() for batch in batches)


@pytest.mark.parametrize(("world_size", "zero", "micro_batch"), [(2, 0, 1), (3, 1, 2), (2, 2, 3), (3, 3, 1)])
def test_layouts_equal_one_process(
    ranks: Ranks, batches: list[Batch], world_size: int, zero: int, micro_batch: int
) -> None:
    config = toy_config(global_batch=6, micro_batch=micro_batch, zero=zero, steps=3)
    config = replace(config, model=replace(MODEL, vocab=VOCAB))
    results = ranks.run(train_on_ranks, config, 0, True, batches, world_size=world_size)
    check_replicas(results)
    check(results[0], reference(config, batches), 1e-12)
