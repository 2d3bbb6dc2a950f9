"""Every data-parallel layout computes what one process computes: gradients, norm, parameters, moments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from fivefold.config.tree import Config
from fivefold.parallel.apply import ParallelModel
from fivefold.proof.error import errors, parameter_errors
from fivefold.spec.legal import resolve_config
from fivefold.trainer.batches import held_out_share
from ranks import Ranks
from toy import CPU, MODEL, global_batch, reference, start_group, stepper_on, toy_config, train_on_ranks


@pytest.fixture(scope="module", params=[2, 3, pytest.param(4, marks=pytest.mark.full)])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(request.param, backend=None) as started:
        yield started


GRID = [(micro_batch, accumulation) for micro_batch in (1, 2, 4) for accumulation in (1, 2, 4)]
COVERING = [(1, 4), (4, 1), (2, 2)]


def kinds(world_size: int) -> list[dict[str, Any]]:
    """Every zero stage, hybrid where it fits."""
    found: list[dict[str, Any]] = [{"zero": zero} for zero in range(4)]
    if world_size == 4:
        found += [{"zero": zero, "dp_replicate": 2, "dp_shard": 2} for zero in (1, 2, 3)]
    return found


def cut(kind: dict[str, Any], world_size: int, micro_batch: int, accumulation: int) -> dict[str, Any]:
    return kind | {"micro_batch": micro_batch, "global_batch": micro_batch * accumulation * world_size}


def covering(world_size: int) -> list[dict[str, Any]]:
    """Every kind, and every cutting, in few runs."""
    each = 3 if world_size == 2 else 1
    return [
        cut(kind, world_size, *COVERING[(number + extra) % 3])
        for number, kind in enumerate(kinds(world_size))
        for extra in range(each)
    ]


def grid(world_size: int) -> list[dict[str, Any]]:
    return [cut(kind, world_size, *cutting) for kind in kinds(world_size) for cutting in GRID]


def all_errors(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    """The design's metric on gradients of step 1, and on parameters and both moments after the last step."""
    worst = {f"gradient {n}": e for n, e in errors(found["gradients"], expected["gradients"]).items()}
    values = [
        {n.removeprefix("model."): t for n, t in result["state"].items() if n.startswith("model.")}
        for result in (found, expected)
    ]
    of_parameters = parameter_errors(
        *values,
        initial=expected["initial"],
        gradients=expected["gradients"],
        learning_rate=expected["optimizer"].lr,
        eps=expected["optimizer"].eps,
    )
    worst |= {f"model.{name}": error for name, error in of_parameters.items()}
    for family in (".exp_avg", ".exp_avg_sq", ".momentum_buffer"):
        names = [n for n in expected["state"] if n.endswith(family)]
        worst |= errors({n: found["state"][n] for n in names}, {n: expected["state"][n] for n in names})
    assert len(worst) == len(expected["gradients"]) + len(expected["state"])
    return worst


def check(found: dict[str, Any], expected: dict[str, Any], bound: float, updated: float = 0.0) -> None:
    """Initial values to the bit; the rest by the design's metric, what updates have changed within `updated` if that is
    more."""
    for name, tensor in expected["initial"].items():
        assert torch.equal(found["initial"][name], tensor), f"initial {name}"
    for name, error in all_errors(found, expected).items():
        own = bound if name.startswith("gradient") else max(bound, updated)
        assert error <= own, f"{name}: {error:.1e}"
    for name in ("loss", "grad_norm"):
        for mine, theirs in zip(found[name], expected[name], strict=True):
            assert abs(mine - theirs) <= bound * abs(theirs), name


def check_replicas(results: list[dict[str, Any]]) -> None:
    """Ranks agree to the bit on everything."""
    for other in results[1:]:
        assert other["loss"] == results[0]["loss"]
        assert other["grad_norm"] == results[0]["grad_norm"]
        for name, tensor in results[0]["state"].items():
            assert torch.equal(other["state"][name], tensor), name


def run(ranks: Ranks, config: Config) -> dict[str, Any]:
    results = ranks.run(train_on_ranks, config)
    check_replicas(results)
    return results[0]


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("layouts", [covering, pytest.param(grid, marks=pytest.mark.full)])
def test_layouts_equal_one_process(
    ranks: Ranks, dtype: str, layouts: Callable[[int], list[dict[str, Any]]]
) -> None:
    bound = {"float64": 1e-12, "float32": 1e-5}[dtype]
    expected: dict[int, dict[str, Any]] = {}
    for layout in layouts(ranks.world_size):
        config = toy_config(dtype=dtype, **layout)
        size = config.batch.global_batch
        if size not in expected:
            expected[size] = reference(config)
        check(run(ranks, config), expected[size], bound)


@pytest.mark.parametrize("zero", [0, 3])
def test_tied_head(ranks: Ranks, zero: int) -> None:
    config = toy_config(zero=zero, global_batch=2 * ranks.world_size)
    config = replace(config, model=replace(MODEL, tied=True))
    check(run(ranks, config), reference(config), 1e-12)


@pytest.mark.parametrize("recompute", ["attention", "elementwise", "full"])
def test_recompute(ranks: Ranks, recompute: str) -> None:
    for zero in (0, 3):
        config = toy_config(zero=zero, recompute=recompute, global_batch=2 * ranks.world_size, micro_batch=2)
        check(run(ranks, config), reference(config), 1e-12)


def worst_by_kind(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    """The largest error among gradients, among parameters, among first and among second moments."""
    worst: dict[str, float] = {}
    for name, error in all_errors(found, expected).items():
        kind = "gradient" if name.startswith("gradient") else name.rpartition(".")[2]
        worst[kind] = max(worst.get(kind, 0.0), error)
    return worst


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp16", marks=pytest.mark.full)])
def test_half_precision_differs_no_more_than_a_permutation_does(ranks: Ranks, dtype: str) -> None:
    """Their rule: at most 3 × what one process shows when the rows of its micro-batches are permuted."""
    size = 4 * ranks.world_size
    alone = toy_config(dtype=dtype, global_batch=size, micro_batch=2)
    with Ranks(1, backend=None) as one:
        expected = one.run(train_on_ranks, alone)[0]
        others = [worst_by_kind(one.run(train_on_ranks, alone, seed)[0], expected) for seed in (1, 2, 3)]
    assert min(others[0].values()) > 1e-5, f"{dtype} was not used"
    for kind in kinds(ranks.world_size):
        config = toy_config(dtype=dtype, **cut(kind, ranks.world_size, 1, 4))
        for name, error in worst_by_kind(run(ranks, config), expected).items():
            assert error <= 3 * max(other[name] for other in others), f"{kind} {name}: {error:.1e}"


def same_batch_three_times(rank: int, world_size: int, config: Config) -> list[dict[str, torch.Tensor]]:
    """Gradients of three steps that change nothing, on the same batch."""
    resolved = resolve_config(config, world_size)
    stepper = stepper_on(resolved, start_group())
    share = held_out_share(global_batch(config, 0), resolved.batch, resolved.mesh.data_rank(rank), CPU)
    found: list[dict[str, torch.Tensor]] = []
    for _ in range(3):
        stepper.step(share, 0.0, inspect=lambda model: found.append(held_gradients(model)))
    return found


def held_gradients(model: ParallelModel) -> dict[str, torch.Tensor]:
    return {p.spec.name: gradient.clone() for p in model.parameters if (gradient := p.gradient()) is not None}


@pytest.mark.parametrize("zero", [0, 3])
def test_buckets_are_fixed_before_the_first_step(ranks: Ranks, zero: int) -> None:
    """torch's DDP rebuilds its buckets after step 1, and so sums in another order on 3 and 4 ranks."""
    config = toy_config(zero=zero, dtype="float32", global_batch=2 * ranks.world_size)
    for first, *others in ranks.run(same_batch_three_times, config):
        for other in others:
            assert all(torch.equal(other[name], gradient) for name, gradient in first.items())
