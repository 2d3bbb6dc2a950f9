"""Tensor and sequence parallel compute what one process computes, for every model and every layout around them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.nn.loss import IGNORED, cross_entropy_sum
from fivefold.nn.vocabulary import Embedding, VocabularyShard, head_logits
from fivefold.parallel.tensor import vocabulary_shard
from fivefold.proof.error import errors
from ranks import Ranks


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4, backend=None) as started:
        yield started


def vocabulary_case(vocab: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """A head, hidden states and labels, some of which are not counted."""
    generator = torch.Generator().manual_seed(vocab)
    weight = torch.randn(vocab, 8, dtype=torch.float64, generator=generator)
    hidden = torch.randn(tokens, 8, dtype=torch.float64, generator=generator)
    labels = torch.randint(vocab, (tokens,), generator=generator)
    labels[::3] = IGNORED
    return weight, hidden, labels


def shard_of(weight: Tensor) -> tuple[VocabularyShard, Tensor]:
    shard = vocabulary_shard(len(weight), dist.group.WORLD)
    return shard, weight[shard.first : shard.first + shard.count].clone().requires_grad_()


def vocabulary_errors(rank: int, world_size: int, vocab: int, tokens: int) -> dict[str, float]:
    """Of everything that is sharded by rows of the vocabulary, from the whole of it."""
    dist.init_process_group("gloo")
    weight, hidden, labels = (t.requires_grad_(t.is_floating_point()) for t in vocabulary_case(vocab, tokens))
    shard, part = shard_of(weight.detach())
    embedding = Embedding(1, 8)
    embedding.shard, embedding.weight = shard, torch.nn.Parameter(part.detach().clone())
    ids = labels.where(labels != IGNORED, 0).view(1, -1)
    embedded = embedding(ids)
    embedded.backward(hidden.detach().unsqueeze(0))
    mine = hidden.detach().clone().requires_grad_()
    loss = cross_entropy_sum(mine, part, labels, shard)
    (3.0 * loss).backward()
    sums = [embedded.detach(), mine.grad]
    for tensor in sums:
        dist.all_reduce(tensor)
    expected_loss = cross_entropy_sum(hidden, weight, labels)
    (3.0 * expected_loss).backward()
    whole = torch.nn.Parameter(weight.detach().clone())
    expected_embedded = torch.nn.functional.embedding(ids, whole)
    expected_embedded.backward(hidden.detach().unsqueeze(0))
    rows = slice(shard.first, shard.first + shard.count)
    found = {
        "loss": loss,
        "logits": head_logits(mine[:5], part, shard),
        "embedded": sums[0],
        "hidden": sums[1],
    }
    expected = {
        "loss": expected_loss,
        "logits": hidden[:5] @ weight.T,
        "embedded": expected_embedded,
        "hidden": hidden.grad,
    }
    if shard.count:
        found |= {"head": part.grad, "embedding": embedding.weight.grad}
        expected |= {"head": weight.grad[rows], "embedding": whole.grad[rows]}
    assert part.grad is not None
    assert embedding.weight.grad is not None
    return errors(found, expected)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize(("vocab", "tokens"), [(53, 40), (5, 12), (2, 7), (4099, 2100)])
def test_a_vocabulary_in_rows_over_ranks(ranks: Ranks, world_size: int, vocab: int, tokens: int) -> None:
    """Prime, smaller than its ranks allow (the last hold none), and with logits of more than one chunk."""
    for found in ranks.run(vocabulary_errors, vocab, tokens, world_size=world_size):
        assert max(found.values()) <= 1e-12, found


def refusals(rank: int, world_size: int) -> list[str]:
    dist.init_process_group("gloo")
    weight, hidden, labels = vocabulary_case(50, 12)
    shard, part = shard_of(weight)
    said = []
    for bad_hidden, bad_part, text in (
        (hidden @ part.T, part, "logits"),
        (hidden @ weight.T, weight, "whole logits"),
        (hidden[:6], part, "a run of the tokens"),
        (hidden, weight, "the whole head"),
    ):
        with pytest.raises(ValueError, match=r"this tensor-parallel rank holds|makes the logits itself"):
            cross_entropy_sum(bad_hidden, bad_part, labels, shard)
        said.append(text)
    labels[0] = 50
    assert cross_entropy_sum(hidden, part, labels, shard).item() == float("inf")
    return said


def test_what_is_sharded_otherwise_is_refused(ranks: Ranks) -> None:
    """Logits of the whole vocabulary taken for a rank's would shift the loss by log tp and look right."""
    for said in ranks.run(refusals, world_size=2):
        assert len(said) == 4
