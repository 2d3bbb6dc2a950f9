"""Dropout's masks: random as masks should be, the same in every layout, none outside training."""

from __future__ import annotations

from collections.abc import Iterator
from math import sqrt
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from fivefold.config.tree import Config
from fivefold.nn.dropout import _mix, _signed, drop, dropped, site_keys, site_number, step_key, token_keys
from fivefold.nn.generate import generate
from fivefold.nn.inputs import Inputs
from fivefold.parallel.apply import parallelize
from fivefold.parallel.mesh import Groups
from fivefold.spec.legal import resolve_config
from fivefold.trainer.agreement import Agreement
from fivefold.trainer.batches import held_out_share
from fivefold.trainer.evaluate import evaluate
from ranks import Ranks
from test_experts import VARIANTS, with_experts
from test_parity import check, check_replicas
from toy import CPU, MODEL, global_batch, reference, toy_config, train_on_ranks

DROPPING = replace(MODEL, dropout=0.1)


def mask(
    *, seed: int = 3, step: int = 0, site: int = 0, rows: int = 8, length: int = 64, p: float = 0.1
) -> Tensor:
    """`[rows, length, 96]`."""
    keys = token_keys(step_key(seed, step), torch.arange(rows), torch.arange(length))
    return dropped(site_keys(keys, site), p, 0, 96)


def test_the_mixer_is_the_published_one() -> None:
    """The first numbers of SplitMix64 from seed 1234567, as published with it."""
    gamma = 0x9E3779B97F4A7C15
    states = torch.tensor([_signed(1234567 + count * gamma) for count in (1, 2, 3)])
    found = [number % 2**64 for number in _mix(states).tolist()]
    assert found == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_any_part_can_be_computed_alone() -> None:
    key = step_key(5, 17)
    rows, positions = torch.arange(6), torch.arange(40)
    whole = dropped(site_keys(token_keys(key, rows, positions), 4), 0.3, 0, 50)
    generator = torch.Generator().manual_seed(0)
    for start, stop in ((0, 50), (3, 4), (7, 33), (48, 50), (16, 16)):
        some_rows = torch.randperm(6, generator=generator)[:3]
        some_positions = torch.randperm(40, generator=generator)[:11]
        part = dropped(site_keys(token_keys(key, some_rows, some_positions), 4), 0.3, start, stop)
        assert torch.equal(part, whole[some_rows][:, some_positions, start:stop])


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_masks_are_uniform(p: float) -> None:
    """Means over all, over each token, feature, row and position, in standard deviations of a fair mask."""
    found = mask(p=p, rows=16, length=128).double()
    deviation = sqrt(p * (1 - p))
    for dims in ((0, 1, 2), (2,), (0, 1), (1, 2), (0, 2)):
        means = found.mean(dim=dims)
        count = found.numel() / means.numel()
        z = (means - p) * sqrt(count) / deviation
        assert z.abs().max() < (4.0 if means.numel() == 1 else 5.5)
        if means.numel() > 20:
            assert abs(z.square().mean() - 1) < 5 * sqrt(2 / means.numel())


def correlation(a: Tensor, b: Tensor) -> float:
    """In standard deviations of that of two independent masks."""
    a, b = a.double().flatten(), b.double().flatten()
    return float(torch.corrcoef(torch.stack((a, b)))[0, 1]) * sqrt(a.numel())


def test_masks_are_independent() -> None:
    """Of features, tokens, rows, branches, layers, steps and seeds."""
    here = mask()
    for distance in (1, 2, 3, 4, 5, 8, 16, 32):
        assert abs(correlation(here[..., distance:], here[..., :-distance])) < 4.5
        assert abs(correlation(here[:, distance:], here[:, :-distance])) < 4.5
    assert abs(correlation(here[1:], here[:-1])) < 4.5
    sites = [site_number(layer, branch) for layer in range(3) for branch in (0, 1)]
    assert len({0, *sites}) == 7
    others: list[dict[str, Any]] = [{"site": site} for site in sites]
    others += [{"step": step} for step in (1, 2, 1000)] + [{"seed": seed} for seed in (0, 1, 2, 4)]
    for other in others:
        assert abs(correlation(here, mask(**other))) < 4.5, other


def test_what_is_kept_is_scaled_to_the_same_mean() -> None:
    keys = site_keys(token_keys(step_key(0, 0), torch.arange(16), torch.arange(256)), 1)
    x = torch.full((16, 256, 64), 2.0, dtype=torch.float64)
    found = drop(x, keys, 0.25)
    assert set(found.unique().tolist()) == {0.0, 2.0 / 0.75}
    assert found.mean().item() == pytest.approx(2.0, abs=5 * 2 * sqrt(0.25 / 0.75 / x.numel()))
    assert torch.equal(found == 0.0, dropped(keys, 0.25, 0, 64))
    assert drop(x, None, 0.25) is x


def test_evaluation_and_generation_drop_nothing() -> None:
    config = toy_config(global_batch=4)
    losses, texts = [], []
    for model in (MODEL, DROPPING):
        resolved = resolve_config(replace(config, model=model))
        built = parallelize(resolved, Groups(), 0, CPU)
        share = held_out_share(global_batch(config, 0), resolved.batch, 0, CPU)
        losses.append(evaluate(built, [share], Agreement(CPU)))
        texts.append(generate(built.next_logits, [1, 2], 5, context=8, temperature=0.8, top_k=0, seed=1))
    assert losses[0] == losses[1]
    assert texts[0] == texts[1]


def test_a_step_drops_its_own() -> None:
    config = replace(toy_config(micro_batch=12), model=DROPPING)
    resolved = resolve_config(config)
    decoder = parallelize(resolved, Groups(), 0, CPU).module
    batch = held_out_share(global_batch(config, 0), resolved.batch, 0, CPU)[0]
    tokens, segments, labels = batch.inputs.tokens, batch.inputs.segments, batch.inputs.labels
    keys = (None, step_key(7, 0), step_key(7, 1), step_key(8, 0))
    losses = [decoder(Inputs(tokens, segments, labels, dropout_key=key)).item() for key in keys]
    assert len(set(losses)) == 4


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(3, backend=None) as started:
        yield started


def trained(ranks: Ranks, config: Config, world_size: int, timeout: float = 60.0) -> dict[str, Any]:
    results = ranks.run(train_on_ranks, config, world_size=world_size, timeout=timeout)
    check_replicas(results)
    return results[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", ["float64", pytest.param("float32", marks=pytest.mark.full)])
def test_layouts_equal_one_process(ranks: Ranks, dtype: str) -> None:
    """Twelve rows on 1, 2 and 3 ranks, in micro-batches of 1, 2 and 4, under every zero and recompute mode."""
    layouts: list[tuple[Any, ...]] = [  # ranks, micro-batch, zero, recompute, other axes
        (1, 4, 0, "none"),
        (1, 1, 0, "elementwise"),
        (2, 2, 0, "full"),
        (2, 1, 1, "attention"),
        (2, 3, 3, "elementwise"),
        (3, 1, 0, "attention"),
        (3, 2, 1, "elementwise"),
        (3, 4, 2, "none"),
        (3, 2, 3, "full"),
        (2, 3, 0, "full", {"tp": 2}),
        (2, 4, 0, "none", {"tp": 2, "sequence_parallel": True}),
        (2, 4, 0, "none", {"cp": 2}),
        (2, 2, 0, "full", {"pp": 2}),
    ]
    expected = None
    for world_size, micro_batch, zero, recompute, *axes in layouts:
        layout = {"zero": zero, "recompute": recompute} | (axes[0] if axes else {})
        config = toy_config(dtype=dtype, micro_batch=micro_batch, global_batch=12, steps=3, **layout)
        config = replace(config, model=DROPPING)
        expected = expected or reference(config)
        check(trained(ranks, config, world_size), expected, {"float64": 1e-12, "float32": 1e-5}[dtype])


def test_experts_drop_alike(ranks: Ranks) -> None:
    config = toy_config(micro_batch=2, zero=3, recompute="full", global_batch=12, steps=3)
    config = replace(config, model=replace(with_experts(VARIANTS["shared"]), dropout=0.1))
    check(trained(ranks, config, 3), reference(config), 1e-12)
