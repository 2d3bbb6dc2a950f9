"""Tensor and sequence parallel compute what one process computes, for every model and every layout around them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import Tensor

from checkpoint_state import checkpointer
from fivefold.config.huggingface import config_json
from fivefold.config.model import Experts
from fivefold.config.tree import Config, Parallel, Precision
from fivefold.nn.generate import generate
from fivefold.nn.hub.weights import open_weights, write_weights
from fivefold.nn.loss import IGNORED, cross_entropy_sum
from fivefold.nn.vocabulary import Embedding, VocabularyShard, head_logits
from fivefold.parallel.local import load
from fivefold.parallel.tensor import vocabulary_shard
from fivefold.proof.error import errors
from fivefold.proof.gather import wholes
from fivefold.spec.legal import resolve_config
from fivefold.spec.parameters import parameters
from fivefold.trainer.batches import held_out_share
from fivefold.trainer.evaluate import evaluate
from fivefold.trainer.state import tensors
from ranks import Ranks
from test_agreement import step_with_poison
from test_decoder import GPT2
from test_parity import check, check_replicas, worst_by_kind
from toy import CPU, MODEL, global_batch, reference, start_group, stepper_on, toy_config, train_on_ranks


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


@pytest.mark.parametrize(
    ("world_size", "vocab", "tokens"), [(3, 53, 40), (4, 5, 12), (3, 2, 7), (2, 4099, 2100)]
)
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


QWEN2: dict[str, Any] = {"qkv_bias": True, "output_bias": True, "tied": True}
THIRDS: dict[str, Any] = {"heads": 6, "kv_heads": 3, "ffn": 42, "vocab": 53}
ROUTED = Experts(count=4, top_k=2, ffn=12, auxiliary_loss=0.05)
GATED = replace(ROUTED, shared_ffn=20, shared_gate=True, router="sigmoid", router_bias=True, dense_layers=1)
BY_RUNS: dict[str, Any] = {"sequence_parallel": True}
TWICE: dict[str, Any] = {"tp": 2, "micro_batch": 2, "global_batch": 8}

CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {  # ranks, config, model
    "tp 2": (2, TWICE, {}),
    "tp 2 sp, grouped heads normed": (2, TWICE | BY_RUNS | {"recompute": "attention"}, {"qk_norm": True}),
    "tp 3, gpt2": (3, {"tp": 3}, GPT2 | THIRDS | {"kv_heads": 6}),
    "tp 3 sp, tokens that do not divide, prime vocabulary": (3, {"tp": 3, "sequence": 7} | BY_RUNS, THIRDS),
    "tp 4, KV heads twice each, ranks without vocabulary": (4, {"tp": 4}, {"vocab": 5, "qk_norm": True}),
    "tp 4 sp, one KV head, biases": (
        4,
        {"tp": 4, "sequence": 9, "recompute": "elementwise"} | BY_RUNS,
        QWEN2 | {"kv_heads": 1},
    ),
    "tp 2 sp, learned positions": (2, TWICE | BY_RUNS | {"sequence": 7, "recompute": "full"}, GPT2),
    "tp 2 × dp 2, experts": (4, TWICE, {"experts": ROUTED}),
    "tp 2 sp × dp 2 zero 1, experts, shared, balanced": (
        4,
        TWICE | BY_RUNS | {"zero": 1, "recompute": "full"},
        {"experts": GATED, "output_bias": True},
    ),
    "tp 2 × dp 2 zero 2, gpt2": (4, TWICE | {"zero": 2, "recompute": "elementwise"}, GPT2),
    "tp 2 sp × dp 2 zero 3, biases": (4, TWICE | BY_RUNS | {"zero": 3}, QWEN2 | {"kv_heads": 1}),
    "tp 2 sp × dp 2 zero 3 float32": (4, TWICE | BY_RUNS | {"zero": 3, "dtype": "float32"}, {}),
}


def case(name: str) -> tuple[int, Config]:
    world_size, options, change = CASES[name]
    config = toy_config(**{"global_batch": 4, "steps": 2} | options)
    return world_size, replace(config, model=replace(MODEL, **change))


@pytest.mark.parametrize("name", CASES)
def test_layouts_equal_one_process(ranks: Ranks, name: str) -> None:
    world_size, config = case(name)
    results = ranks.run(train_on_ranks, config, world_size=world_size)
    check_replicas(results)
    found, expected = results[0], reference(config)
    check(found, expected, 1e-5 if config.precision.dtype == "float32" else 1e-12)


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp16", marks=pytest.mark.full)])
def test_half_precision_is_as_far_from_the_truth_as_one_process(ranks: Ranks, dtype: str) -> None:
    """Each rank's part of a sum is rounded, which no permutation of rows in one process does: so what is compared is
    how far either is from float64."""
    alone = toy_config(dtype=dtype, global_batch=8, micro_batch=2, steps=3)
    truth = reference(replace(alone, precision=Precision(dtype="float64")))
    usual = worst_by_kind(ranks.run(train_on_ranks, alone, world_size=1)[0], truth)
    assert usual["weight"] > 1e-4, f"{dtype} was not used"
    for options in ({}, BY_RUNS):
        results = ranks.run(train_on_ranks, toy_config(dtype=dtype, steps=3, **TWICE | options), world_size=2)
        check_replicas(results)
        for kind, error in worst_by_kind(results[0], truth).items():
            if kind != "gradient" or dtype != "fp16":  # that one is scaled
                assert error <= 1.5 * usual[kind], f"{options} {kind}: {error:.1e}, usual {usual[kind]:.1e}"


def life(
    rank: int, world_size: int, config: Config, run: Path, weights: Path, load_from: str
) -> dict[str, Any]:
    """State in one layout, its loss on a batch, and text: of published `weights`, of the checkpoint of `run`, or
    (`load_from` is "") after a step, which is then saved there."""
    recorder = start_group()
    resolved = resolve_config(config, world_size)
    stepper = stepper_on(resolved, recorder)
    data_rank = resolved.mesh.data_rank(rank)
    share = held_out_share(global_batch(config, 0), resolved.batch, data_rank, CPU)
    keeper = checkpointer(run)
    state = tensors(stepper.model, stepper.optimizer)
    if load_from == "weights":
        published = open_weights(weights)
        for parameter in stepper.model.parameters:
            load(parameter, published)
    elif load_from:
        path = keeper.latest()
        assert path is not None
        keeper.load(path, state)
    else:
        stepper.step(share, 1e-3)
        keeper.save(1, state, {}, "", asynchronous=False)
    keeper.close()
    stepper.model.data.updated()
    texts = [
        generate(stepper.model.next_logits, [3, 1, 4], 6, context=5, temperature=heat, top_k=7, seed=2)
        for heat in (0.0, 0.8)
    ]
    held = wholes(state)
    assert not held.disagreeing
    loss = evaluate(stepper.model, [share], stepper.agreement)
    return {"state": held.tensors, "loss": loss, "texts": texts}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_state_loss_and_text_are_the_same_in_every_layout(ranks: Ranks, tmp_path: Path, family: str) -> None:
    """Saved in one layout and loaded in others, or published weights read; then evaluated, and asked for text."""
    model = replace(MODEL, **(GPT2 | {"tied": True} if family == "gpt2" else {}))
    base = replace(toy_config(global_batch=4), model=model)
    (tmp_path / "weights").mkdir()
    theirs = config_json(model)
    assert theirs is not None
    whole = {f"{spec.name}": torch.randn(spec.shape, dtype=torch.float64) for spec in parameters(model)}
    write_weights(tmp_path / "weights", theirs["model_type"], model, whole)
    (tmp_path / "weights" / "config.json").write_text(json.dumps(theirs))
    layouts: list[tuple[int, dict[str, Any]]] = [
        (2, {"tp": 2, "sequence_parallel": True}),
        (1, {}),
        (4, {"tp": 4}),
        (4, {"tp": 2, "zero": 3, "sequence_parallel": True}),
    ]
    for source in ("run", "weights"):
        first: dict[str, Any] | None = None
        for number, (world_size, options) in enumerate(layouts):
            config = replace(base, parallel=Parallel(**options))
            load_from = "weights" if source == "weights" else "run" * (number > 0)
            places = (tmp_path / "run", tmp_path / "weights")
            results = ranks.run(life, config, *places, load_from, world_size=world_size)
            first = first or results[0]
            for result in results:
                assert result["texts"] == first["texts"]
                assert result["loss"] == pytest.approx(first["loss"], rel=1e-12)
                for name, tensor in first["state"].items():
                    assert torch.equal(result["state"][name], tensor), name
            if source == "weights":
                for name, tensor in whole.items():
                    assert torch.equal(results[0]["state"][f"model.{name}"], tensor), name


@pytest.mark.parametrize("where", ["gradient", "output"])
@pytest.mark.parametrize("options", [{}, BY_RUNS | {"zero": 3}])
def test_one_ranks_bad_number_is_skipped_by_all_and_named(
    ranks: Ranks, where: str, options: dict[str, Any]
) -> None:
    """An output is told of the rank that made it, a gradient after the data ranks have shared it."""
    config = toy_config(tp=2, global_batch=4, **options)
    for sick in (1, 2):
        results = ranks.run(step_with_poison, config, sick, float("nan"), where)
        named = {
            "gradient": "gradient of layers.1.attention.query.weight in backward",
            "output": f"rank {sick}: output of layers.0.feed_forward in forward",
        }
        for result in results:
            assert result["unchanged"]
            assert named[where] in result["skipped"]
            assert result["skipped"] == results[0]["skipped"]
