"""Mixture of experts in half precision: the reference's routing repeated, and what would have been chosen told."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from fivefold.config.tree import Config
from fivefold.nn.attention import Segments
from fivefold.nn.dropout import step_key
from fivefold.nn.inputs import Inputs
from fivefold.parallel.apply import ParallelModel
from fivefold.proof.gather import wholes
from fivefold.proof.routing import Choices, Flips, Routings
from fivefold.spec.legal import resolve_config
from fivefold.trainer.batches import held_out_share
from fivefold.trainer.state import tensors
from ranks import Ranks
from test_decoder import made
from test_experts import OPTIONS, with_experts
from test_parity import worst_by_kind
from toy import CPU, SEQUENCE, global_batch, gradients, permuted, start_group, stepper_on, toy_config


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2, backend=None) as started:
        yield started


def train(
    rank: int, world_size: int, config: Config, replayed: Choices | None = None, permutation: int = 0
) -> tuple[dict[str, Any], Choices, Flips]:
    """As `toy.train_on_ranks`, with routing kept or repeated."""
    recorder, rows = start_group(), config.batch.global_batch
    resolved = resolve_config(config, world_size)
    stepper = stepper_on(resolved, recorder)
    found: dict[str, Any] = {"loss": [], "grad_norm": [], "optimizer": config.optimizer}
    found["initial"] = wholes({p.spec.name: p.piece(p.value) for p in stepper.model.parameters}).tensors
    if permutation and replayed is not None:
        order = torch.randperm(rows, generator=torch.Generator().manual_seed(permutation))
        replayed = {key: choices[order] for key, choices in replayed.items()}
    routings = Routings(stepper.model.module, rows, SEQUENCE, replayed)

    def keep(model: ParallelModel) -> None:
        found.setdefault("gradients", gradients(model))

    for step in range(config.run.steps):
        if step:
            routings.next_step()
        batch = permuted(global_batch(config, step), permutation)
        data_rank, key = resolved.mesh.data_rank(rank), step_key(config.run.seed, step)
        share = held_out_share(batch, resolved.batch, data_rank, CPU, resolved.spans(rank), key)
        result = stepper.step(share, 1e-3, inspect=keep)
        found["loss"].append(result.loss)
        found["grad_norm"].append(result.grad_norm)
    found["state"] = wholes(tensors(stepper.model, stepper.optimizer)).tensors
    return found, routings.kept, routings.flips


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp16", marks=pytest.mark.full)])
def test_half_precision_with_the_references_routing(ranks: Ranks, dtype: str) -> None:
    """At most 3 × what one process shows when the rows of its micro-batches are permuted."""
    alone = toy_config(dtype=dtype, global_batch=8, micro_batch=2, steps=3)
    alone = replace(alone, model=with_experts(OPTIONS))
    expected, choices, _ = ranks.run(train, alone, world_size=1)[0]
    assert all(bool((choice >= 0).all()) for choice in choices.values())
    bounds: dict[str, float] = {}
    for seed in (1, 2, 3):
        other = ranks.run(train, alone, choices, seed, world_size=1)[0][0]
        for kind, error in worst_by_kind(other, expected).items():
            bounds[kind] = max(bounds.get(kind, 0.0), error)
    for zero in (0, 1, 2, 3):
        config = replace(
            alone, parallel=replace(alone.parallel, zero=zero, recompute="full" if zero == 3 else "none")
        )
        results = ranks.run(train, config, choices)
        for kind, error in worst_by_kind(results[0][0], expected).items():
            assert error <= 3 * bounds[kind], f"zero {zero} {kind}: {error:.1e}, permuted {bounds[kind]:.1e}"
        for _, _, flips in results:
            assert flips.choices >= 3 * 4 * SEQUENCE * 2 * 2  # steps, rows, tokens, layers, experts
            assert max(flips.margins, default=0.0) < 0.05, str(flips)


def test_flips_are_counted_with_their_margins() -> None:
    """Router scores of one process, against choices turned over by hand."""
    decoder = made(with_experts(OPTIONS), torch.float64)
    tokens = torch.arange(12).view(1, 12)
    inputs = Inputs(tokens, Segments((12,)))
    kept = Routings(decoder, 1, 12)
    decoder(inputs)
    choices = {key: choice.clone() for key, choice in kept.kept.items()}
    assert set(choices) == {(0, "0"), (0, "1")}
    same = Routings(decoder, 1, 12, choices)
    decoder(inputs)
    assert str(same.flips) == "none of 48 routing choices would have been another"
    used = choices[0, "0"][0, 5]
    other = next(expert for expert in range(5) if expert not in used.tolist())
    choices[0, "0"][0, 5, 1] = other
    turned = Routings(decoder, 1, 12, choices)
    decoder(inputs)
    own = [margin for margin in turned.flips.margins if margin > 0]
    assert own
    assert turned.flips.choices == 48
    assert f"{len(turned.flips.margins)} of 48" in str(turned.flips)
